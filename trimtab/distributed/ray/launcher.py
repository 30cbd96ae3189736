"""The Ray launcher: one process for each device of a cluster, all in one world, and engines outside of it.

A run uses the Ray at RAY_ADDRESS, or starts one that only this machine can reach. The controller is the process that
the user started, and has no model. It starts processes according to the placement, lets them join one process group,
and then builds and calls roles like any other launcher. Messages have the common serialization; Ray transports them.
"""

import contextlib
import dataclasses
import json
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trimtab.distributed.device import Device, kind_of_resource, visible_devices_env
from trimtab.distributed.launcher import (
    HOST,
    EngineLost,
    Group,
    Launcher,
    PendingCall,
    Processes,
    Unanswered,
    WorkerLost,
)
from trimtab.distributed.process_group import World
from trimtab.distributed.ray.placement import CPU_SHARE, Layout, Placement, missing
from trimtab.distributed.ray.preflight import living_nodes
from trimtab.distributed.ray.workers import (
    DONE,
    MISTAKE,
    NO_ROOM,
    RayJob,
    RayWorker,
    RayWorkers,
    WorkerHandle,
    WorkerRank,
)
from trimtab.distributed.serialization import Serializer
from trimtab.distributed.supervision import DIST_BACKEND
from trimtab.errors import OutOfMemory, RunFailed, UserError
from trimtab.interrupts import StopRequest

ADDRESS = "RAY_ADDRESS"  # `ray job submit` sets it for the command that it starts
TO_ANSWER = 10.0  # seconds to wait for a connection to Ray
TOKENS = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"  # only the owner of a process can read its environment
SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
if not os.environ.get(ADDRESS):
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Otherwise a local Ray listens on every interface of this machine. Despite its name the variable decides whether
    # this Ray may have other nodes; it is read when ray is imported.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # When the driver is killed, the kernel kills Ray's control store with it. Workers and agents wait this long for a
    # restarted store before they exit and free their memory (60 s by default); a local store is never restarted.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "5")
    if "ray" not in sys.modules:  # read at import; if that is past, ray.init enables tokens by itself
        os.environ.setdefault("RAY_AUTH_MODE", "token")

from ray.exceptions import AuthenticationError  # noqa: E402


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Connect to Ray or start a local one. Install signal handlers inside: Ray replaces existing ones."""
    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address := os.environ.get(ADDRESS):
            _check_reachable(address)
            ray.init(address=address, **quiet)
        else:
            _set_token()
            ray.init(address="local", include_dashboard=False, **quiet)
    except AuthenticationError as error:
        raise UserError(
            f"Ray at {os.environ.get(ADDRESS, 'this machine')} asks for its token: set RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN_PATH to the file that its head was started with"
        ) from error
    except UserError:
        raise
    except Exception as error:  # Ray raises a plain Exception if it does not start within half a minute
        place = f"at {os.environ[ADDRESS]} (RAY_ADDRESS)" if ADDRESS in os.environ else "on this machine"
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"no Ray {place}: {reason}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _set_token() -> None:
    """Set an authentication token for the local Ray unless the user has given one. Ray itself would write one to
    ~/.ray/auth_token, readable by every user of this machine, who could then run code here."""
    if not any(name in os.environ for name in TOKENS):
        os.environ[TOKENS[0]] = secrets.token_hex(32)


def _check_reachable(address: str) -> None:
    """Raise ConnectionError if no Ray answers at the address. Ray itself would retry for minutes."""
    if "://" in address:
        raise UserError(f"RAY_ADDRESS {address}: give the head's own address, HOST:PORT, from a node of the cluster")
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=TO_ANSWER).close()
        except OSError as error:
            raise ConnectionError(error.strerror or str(error) or "it does not answer") from error


def stop_line() -> str | None:
    """How to stop a run started by `ray job submit`, whose terminal only shows the output; None for other runs."""
    if SUBMITTED not in os.environ:
        return None
    name = json.loads(os.environ[SUBMITTED]).get("metadata", {}).get("job_submission_id", "ID")
    return f"to stop this run and keep its work: ray job stop {name}"


# ---- roles on the nodes of a cluster


TO_PLACE = 60.0  # seconds to reserve resources that were free at the preflight check
TO_START = 300.0  # seconds for a process to start, import everything and join the others
# Environment variables of the controller for libraries, which a node may lack.
PASSED_ON = (
    *("HF_HUB_OFFLINE", "HF_HOME", "HF_ENDPOINT", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM"),
    DIST_BACKEND,
)
ENGINE_DIED = "EngineDead"  # vLLM's exception when one of its processes has died
LARGE = 2**16  # bytes; larger shared arguments are put into Ray's object store once


class RayCall(PendingCall):
    """A call to several Ray workers."""

    def __init__(
        self,
        name: str,
        workers: RayWorkers,
        serializer: Serializer,
        calls: list[tuple[WorkerHandle, Any]],
        reporting: Sequence[int],
    ):
        super().__init__(name)
        self._workers, self._serializer, self._calls, self._reporting = workers, serializer, calls, reporting
        self._by_rank: dict[int, Any] = {}
        self._shortage: str | None = None

    def wait(self, seconds: float | None = None) -> list[Any]:
        if self._workers.wait(self._calls, self._take, seconds):
            late = next(member for member, _ in self._calls if member.rank not in self._by_rank)
            raise RunFailed(f"{self.name}: {late} has not answered for {seconds} s")
        return self._reported()

    def poll(self, seconds: float) -> list[Any]:
        deadline = time.monotonic() + seconds
        while waiting := [(member, call) for member, call in self._calls if member.rank not in self._by_rank]:
            try:
                self._workers.wait(waiting, self._take, max(0.0, deadline - time.monotonic()))
                break
            except EngineLost as lost:
                self._by_rank[lost.rank] = lost
        return self._reported()

    def _reported(self) -> list[Any]:
        if self._shortage is not None:  # raised only now, when no member is inside a call
            raise OutOfMemory(self._shortage)
        return [self._by_rank.get(rank, Unanswered()) for rank in self._reporting]

    def _take(self, member: WorkerHandle, answer: tuple[str, Any]) -> None:
        kind, content = answer
        self._by_rank[member.rank] = None
        if kind == DONE:
            self._by_rank[member.rank] = self._serializer.unpack(np.array(content))
        elif kind == NO_ROOM:
            self._shortage = content
        elif kind == MISTAKE:
            raise UserError(content)
        elif member.engine and ENGINE_DIED in content:
            raise member.lost(f"was lost: {content}")
        else:
            self._workers.blame(member, f"{self.name}: {content}")


class RayGroup(Group):
    """A role on Ray workers."""

    def __init__(
        self,
        workers: RayWorkers,
        serializer: Serializer,
        name: str,
        members: Sequence[WorkerHandle],
        processes: Processes | None = None,
        *,
        replace_engine: Callable[[EngineLost], None] | None = None,
    ):
        """`processes`: the part of a call that each member gets, by default its own. `replace_engine`: replaces a lost
        engine, for engines outside the world."""
        self.name, self.members, self.apart = name, members, replace_engine is not None
        self.processes = processes or Processes.apart([member.rank for member in members])
        self._workers, self._serializer, self._replace_engine = workers, serializer, replace_engine

    def _send(
        self, method: str, arguments: Sequence[tuple], reporting: Sequence[int], shared: dict[str, Any]
    ) -> RayCall:
        settings: Any = np.frombuffer(self._serializer.pack(shared), dtype=np.uint8)
        if settings.nbytes > LARGE and len(self.members) > 1:
            settings = ray.put(settings)
        calls = []
        for member, value in zip(self.members, arguments, strict=True):
            own = np.frombuffer(self._serializer.pack([self.name, method, value]), dtype=np.uint8)
            calls.append((member, member.handle.perform.remote(own, settings)))
        return RayCall(f"{self.name}.{method}", self._workers, self._serializer, calls, reporting)

    def reinit_process_group(self) -> bool:
        """Re-initialize the process group in all processes of the world, also those of other groups."""
        workers = self._workers
        world = workers.members[: workers.world_size]
        workers.call("reinit_process_group", seconds=workers.hang_timeout, members=world)
        return workers.world_size > 1

    def replace_engine(self, lost: Exception) -> None:
        if self._replace_engine is None or not isinstance(lost, EngineLost):
            raise lost
        self._replace_engine(lost)


class RayLauncher(Launcher):
    """Starts workers on the nodes of a cluster and builds roles in them."""

    def __init__(
        self,
        job: RayJob,
        layout: Layout,
        placement: Placement,
        hang_timeout: float,
        stop: StopRequest,
        *,
        again: bool = False,
    ):
        """`again`: this is a restart after a process was lost."""
        self.job, self.layout, self.placement, self.stop = job, layout, placement, stop
        self.units = list(job.units(job.options, layout.size))
        self.device = Device(torch.device("cpu"), "CPU")  # of this process, which has no model
        self.world = World(0, layout.size)  # the workers' world; this process only prints for it
        self._serializer = Serializer(*job.records, Processes)
        self._workers = RayWorkers(hang_timeout, stop, layout.size)
        self._apart = next((unit for unit in self.units if unit.apart), None)  # the engines' unit
        self.found: list[dict[str, Any]] = []  # `describe` of each worker: its node and device
        self.devices: list[dict[str, Any]] = []  # device facts for the manifest, by worker
        self._reserved: Any = None
        self._again = again
        self._engine_groups: dict[str, Group] = {}

    @property
    def _in_world(self) -> list[WorkerHandle]:
        return self._workers.members[: self.layout.size]

    @property
    def _engines(self) -> list[WorkerHandle]:
        return self._workers.members[self.layout.size :]

    # ---- processes

    def open(self) -> None:
        """Reserve resources and start the workers on their nodes."""
        self._reserved = self._reserve()
        for worker in self.placement.workers:
            units = [
                unit for unit in self.units if not unit.apart and (unit.ranks is None or worker.rank in unit.ranks)
            ]
            roles = ", ".join(role for unit in units for role in unit.roles)
            handle = self._start(worker.bundle, {}, self.placement.share)
            self._workers.members.append(WorkerHandle(handle, worker.rank, roles, worker.node.address))
        self.found = self._located(self._in_world)
        if self._apart is None:
            return
        for index, bundles in enumerate(self.placement.engines):
            node, held = self.placement.bundle_nodes[bundles[0]], ", ".join(self._apart.roles)
            member = WorkerHandle(None, self.layout.size + index, held, node.address, engine=True)
            self._start_engine(member)
            self._workers.members.append(member)
        self.found += self._located(self._engines)

    def _reserve(self) -> Any:
        labels = [{"ray.io/node-id": node.id} for node in self.placement.bundle_nodes]
        group = placement_group(self.placement.bundles, strategy="PACK", bundle_label_selector=labels)
        if not group.wait(TO_PLACE):
            remove_placement_group(group)
            lacking = missing(self.layout, living_nodes(), ray.available_resources())
            raise WorkerLost(lacking) if self._again else UserError(lacking)
        return group

    def _start(self, bundle: int, environment: dict[str, str], devices: float) -> Any:
        wanted: dict[str, Any] = {"num_cpus": CPU_SHARE}
        if self.placement.resource == "GPU":
            wanted["num_gpus"] = devices
        elif self.placement.resource is not None:
            wanted["resources"] = {self.placement.resource: devices}
        passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        remote = ray.remote(concurrency_groups={"health": 1})(RayWorker)
        return remote.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._reserved, bundle),
            runtime_env={"env_vars": passed_on | environment},
            **wanted,
        ).remote()

    def _start_engine(self, member: WorkerHandle) -> None:
        assert self._apart is not None and self.layout.engines is not None
        bundles, environment = self.placement.engines[member.rank - self.layout.size], dict(self._apart.environment)
        if len(bundles) > 1:  # devices of a pool, of which Ray would make only the first visible
            pairs = zip(self.placement.workers, self.found)
            shown = [name for worker, found in pairs if worker.bundle in bundles for name in found["devices"]]
            if shown:
                seen = self.found[0]["kind"]  # a worker that does not see its device reports a CPU
                kind = seen if seen.visible is not None else kind_of_resource(self.placement.resource)
                environment |= visible_devices_env(kind, shown)
        shares = self.layout.engines.pool is not None
        devices = self.placement.share if shares else float(self.layout.engines.tensor_parallel)
        member.handle = self._start(bundles[0], environment, devices)

    def _located(self, members: Sequence[WorkerHandle]) -> list[dict[str, Any]]:
        found = self._workers.call("describe", seconds=TO_START, members=members)
        for member, where in zip(members, found):
            member.node, member.node_id, member.process = where["address"], where["node"], where["process"]
            member.devices = tuple(where["devices"])
        return found

    def meet(self, options: Any) -> None:
        """Let the workers join one process group, with these options."""
        self.job = dataclasses.replace(self.job, options=options)
        first = self._in_world[0]
        ((address, port),) = self._workers.results([(first, first.handle.open_store.remote())], TO_START)
        calls = [(member, self._join(member, address, port)) for member in self._workers.members]
        self.devices = self._workers.results(calls, TO_START, "has not met the others in {:g} s")

    def _join(self, member: WorkerHandle, address: str = "", port: int = 0) -> Any:
        threads = int(os.environ["OMP_NUM_THREADS"]) if "OMP_NUM_THREADS" in os.environ else None
        neighbours = sum(other.node == member.node for other in self._workers.members)
        rank, size = (0, 1) if member.engine else (member.rank, self.layout.size)
        place = WorkerRank(rank, size, neighbours, self._workers.sharing(member), threads)
        return member.handle.join.remote(self.job, place, address, port)

    def _replace_engine(self, lost: EngineLost) -> None:
        """Replace all dead engines by new ones with the initial weights."""
        assert self._apart is not None
        gone = [member for member in self._engines if member.rank == lost.rank or not self._workers.is_alive(member)]
        alive = {node.id for node in living_nodes()}
        bundles = [self.placement.engines[member.rank - self.layout.size][0] for member in gone]
        if not {self.placement.bundle_nodes[bundle].id for bundle in bundles} <= alive:
            raise WorkerLost(str(lost))  # its node is lost too
        try:
            for member in gone:
                self._workers.kill(member)
                self._start_engine(member)
            self._located(gone)
            for member in gone:
                self._workers.results([(member, self._join(member))], TO_START)
                self._workers.pass_signal(member)
            self._hosts_of(gone).call("build", unit=self._apart.name)
        except EngineLost as another:
            raise WorkerLost(str(another)) from another

    # ---- roles

    def groups(self, options: Any) -> dict[str, Group]:
        building = self._start_building_engines()
        shares = self.layout.engines is not None and self.layout.engines.pool is not None
        if building is not None and shares:
            building.wait()  # one after the other, because each measures the free memory of the shared device
        groups = super().groups(options)
        if building is not None and not shares:
            building.wait()
        return groups | self._engine_groups

    def _hosts(self, options: Any) -> tuple[Group, Iterable[str]]:
        assert options == self.job.options, "the other processes know the options as they were given"
        return self._hosts_of(self._in_world), [unit.name for unit in self.units if not unit.apart]

    def _hosts_of(self, members: Sequence[WorkerHandle]) -> RayGroup:
        return RayGroup(self._workers, self._serializer, HOST, members)

    def _group(self, role: str, processes: Processes) -> RayGroup:
        members = [self._workers.members[rank] for rank in processes.ranks]
        return RayGroup(self._workers, self._serializer, role, members, processes)

    def _start_building_engines(self) -> PendingCall | None:
        """Build the engines, once: they continue when other roles are rebuilt."""
        if self._apart is None or self._engine_groups:
            return None
        parts = self._workers, self._serializer
        self._engine_groups = {
            role: RayGroup(*parts, role, self._engines, replace_engine=self._replace_engine)
            for role in self._apart.roles
        }
        return self._hosts_of(self._engines).start("build", unit=self._apart.name)

    def rebuild_groups(self) -> dict[str, Group]:
        self._hosts_of(self._in_world).call("release")
        return self.groups(self.job.options)

    def described(self) -> dict[str, Any]:
        threads = [device["threads"] for device in self.devices]
        return {"layout": self.layout.rows(self.placement.resource), "threads_of_processes": threads}

    def close(self, *, kindly: bool = True) -> None:
        """End all workers; `kindly`: no worker is lost, so all can close their roles first."""
        self._workers.end(kindly=kindly)
        if self._reserved is not None:
            remove_placement_group(self._reserved)
            self._reserved = None
