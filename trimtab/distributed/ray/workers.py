"""Workers of a run on Ray: one process (`RayWorker`), and the controller's calls and health checks (`RayWorkers`).

Every wait is bounded. While the controller waits, it requests heartbeats from all processes, which each answers in a
separate thread. Ray itself detects a dead process only in a call to it. Heartbeats also detect one that dies while
another's call is pending, one whose work does not advance, and one that does not answer for --hang_timeout (Ray takes a
process stopped by SIGSTOP for alive). Neighbours of a dead process report broken connections first, so all are asked
for a heartbeat again before one of them is blamed.
"""

import contextlib
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trimtab.distributed.device import find_device
from trimtab.distributed.launcher import EngineLost, Processes, RoleHost, Unit, WorkerLost
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.process_group import (
    World,
    abort_reason,
    init_process_group,
    reinit_process_group,
    use_interface_of,
)
from trimtab.distributed.serialization import Serializer
from trimtab.distributed.supervision import GRACE, PER_DEVICE, in_collective, is_lost_connection, own_heartbeat
from trimtab.distributed.weight_transfer import NODE_ADDRESS
from trimtab.errors import OutOfMemory, RunFailed, UserError
from trimtab.interrupts import StopRequest

DONE, NO_ROOM, MISTAKE, FAILED = "done", "no room", "mistake", "failed"
# Seconds: between two checks of pending calls; between two heartbeats; to find the dead process after a failure; for
# processes to close their roles.
LOOK_EVERY, HEARTBEAT_EVERY, TO_BLAME, TO_LEAVE = 0.5, 3.0, 8.0, 10.0
# Ray's messages for a process whose node is gone.
NODE_IS_GONE = ("node was terminated", "node has died", "node died", "missing too many heartbeats", "node failure")


@dataclass(frozen=True)
class RayJob:
    """The job description that every process gets first. Its functions and classes are at module level, so that another
    process can import them."""

    options: Any
    units: Callable[[Any, int], Sequence[Unit]]
    make_mesh: Callable[..., Mesh]  # (options, world, ranks, learns=...)
    records: tuple[type, ...]
    prepare: Callable[[Any], None]  # called in every process before roles are built
    folder: str  # base of relative paths


@dataclass(frozen=True)
class WorkerRank:
    """A process's rank and its share of the machine."""

    rank: int
    size: int
    neighbours: int  # number of the run's processes on its machine
    sharing: int  # number of the world's processes on its device
    threads: int | None  # None: an equal share of the machine's


class RayWorker:
    """The Ray actor of one process, which hosts its roles."""

    def __init__(self) -> None:
        self.stop = StopRequest()
        os.environ[NODE_ADDRESS] = ray.util.get_node_ip_address()
        self._store_socket: socket.socket | None = None
        own_heartbeat.rest()  # starting has its own timeout

    @ray.method(concurrency_group="health")
    def heartbeat(self) -> tuple[str, float, bool]:
        """The current call, seconds without progress, and whether it waits in a collective."""
        return own_heartbeat.doing, own_heartbeat.still(), in_collective()

    @ray.method(concurrency_group="health")
    def receive_signal(self, number: int) -> None:
        self.stop.hear(number)

    def describe(self) -> dict[str, Any]:
        """Its node, process id and device."""
        context, device = ray.get_runtime_context(), find_device()
        return {
            "node": context.get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "process": os.getpid(),
            "kind": device.kind,
            "bf16_fault": device.bf16_fault(),
            "devices": [name for names in context.get_accelerator_ids().values() for name in names],
        }

    def open_store(self) -> tuple[str, int]:
        """Open the socket of the store at which the processes join, on the node's address, and return address and
        port."""
        address = ray.util.get_node_ip_address()
        self._store_socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        self._store_socket.bind((address, 0))
        self._store_socket.listen(1024)
        return address, self._store_socket.getsockname()[1]

    def join(self, job: RayJob, place: WorkerRank, address: str, port: int) -> dict[str, Any]:
        """Join the process group and prepare for building roles. Returns device facts for the manifest."""
        os.environ["LOCAL_WORLD_SIZE"] = str(place.neighbours)
        os.environ[PER_DEVICE] = str(place.sharing)  # a worker sees only its own device
        if os.path.isdir(job.folder):
            os.chdir(job.folder)
        torch.set_num_threads(place.threads or max(1, (os.cpu_count() or 1) // place.neighbours))
        device = find_device()
        world = World(place.rank, place.size, device.torch)
        if place.size > 1:
            use_interface_of(ray.util.get_node_ip_address())
            os.environ["MASTER_PORT"] = str(port)  # connections to this port survive `abort_collectives`
            opened = self._store_socket
            listening = {} if opened is None else {"is_master": True, "master_listen_fd": opened.detach()}
            store = dist.TCPStore(address, port, place.size, wait_for_workers=False, **listening)
            init_process_group(device.torch, store=store, rank=place.rank, world_size=place.size)
        job.prepare(job.options)
        self._serializer = Serializer(*job.records, Processes)
        units = job.units(job.options, place.size)
        self.host = RoleHost(job.options, units, job.make_mesh, device, world, self.stop)
        return device.described()

    def perform(self, own: np.ndarray, shared: np.ndarray) -> tuple[str, Any]:
        """Call a role's method. Failures are returned with their kind, not raised, since Ray would wrap exceptions."""
        try:
            role, method, arguments = self._serializer.unpack(own.copy())
            settings = self._serializer.unpack(shared.copy())  # copies, since Ray's memory is read-only
            assert not method.startswith("_"), "a private method of a role"
            own_heartbeat.thread = threading.get_ident()
            own_heartbeat.move(f"{role}.{method}")
            result = getattr(self.host.roles[role], method)(*arguments, **settings)
            if (why := abort_reason()) is not None:
                return NO_ROOM, why
            return DONE, np.frombuffer(self._serializer.pack(result), dtype=np.uint8)
        except (OutOfMemory, UserError, RunFailed) as error:
            kinds = {OutOfMemory: NO_ROOM, UserError: MISTAKE, RunFailed: FAILED}
            return next(kind for known, kind in kinds.items() if isinstance(error, known)), str(error)
        except Exception as error:
            if isinstance(error, RuntimeError) and (why := abort_reason()) is not None:
                return NO_ROOM, why
            where = "".join(traceback.format_tb(error.__traceback__)[-3:])
            return FAILED, f"{type(error).__name__}: {error}\n{where}".rstrip()
        finally:
            own_heartbeat.rest()

    def reinit_process_group(self) -> None:
        self.host.device.release_memory()
        reinit_process_group(self.host.world)

    def leave(self) -> None:
        self.host.close()


# ---- the controller's side


@dataclass
class WorkerHandle:
    """A worker as the controller sees it: actor handle, rank, roles and node."""

    handle: Any  # Ray's
    rank: int
    roles: str  # names, for messages
    node: str = "a node that is not known yet"
    process: int | None = None
    engine: bool = False  # it only generates, and can be replaced
    node_id: str | None = None
    devices: tuple[str, ...] = ()  # Ray's names
    silent: bool = False  # it may be stopped (SIGSTOP), so that Ray cannot end it

    def __str__(self) -> str:
        number = "" if self.process is None else f", pid {self.process}"
        return f"{self.roles} (process {self.rank} on {self.node}{number})"

    def lost(self, why: str) -> WorkerLost:
        return EngineLost(f"{self} {why}", self.rank) if self.engine else WorkerLost(f"{self} {why}")


Calls = Sequence[tuple[WorkerHandle, Any]]  # workers with Ray's references to their results


class RayWorkers:
    """Calls all workers of a run, and detects dead and hanging ones."""

    def __init__(self, hang_timeout: float, stop: StopRequest, world_size: int):
        """`world_size`: the first members, this many, form the world; the others are engines."""
        self.members: list[WorkerHandle] = []
        self.hang_timeout, self.stop, self.world_size = hang_timeout, stop, world_size
        self._signal_sent = False
        self._asked: dict[int, tuple[Any, float]] = {}  # rank -> pending heartbeat and its time
        self._next_heartbeat = 0.0

    def sharing(self, member: WorkerHandle) -> int:
        """Processes of the world on the device of this one."""
        own = member.node_id, member.devices
        if member.engine or not member.devices:
            return 1
        return sum((other.node_id, other.devices) == own for other in self.members[: self.world_size])

    def wait(
        self,
        calls: Sequence[tuple[WorkerHandle, Any]],
        take: Callable[[WorkerHandle, Any], None],
        seconds: float | None,
    ) -> int:
        """Pass every result to `take` as it arrives; returns the number of missing ones after `seconds`."""
        deadline = None if seconds is None else time.monotonic() + seconds
        waiting = {reference: member for member, reference in calls}
        while waiting:
            left = LOOK_EVERY if deadline is None else min(LOOK_EVERY, max(0.0, deadline - time.monotonic()))
            done, _ = ray.wait([*waiting], num_returns=len(waiting), timeout=left)
            for reference in done:
                member = waiting.pop(reference)
                try:
                    result = ray.get(reference)
                except RayTaskError as error:  # raised in the worker
                    if isinstance(error.cause, UserError):
                        raise UserError(str(error.cause)) from error
                    self.blame(member, f"{type(error.cause).__name__}: {error.cause}")
                except RayError as error:
                    raise member.lost(_loss_reason(error)) from error
                take(member, result)
            if waiting:
                self._check_health({member.rank for member in waiting.values()})
                if deadline is not None and time.monotonic() >= deadline:
                    break
        return len(waiting)

    def results(self, calls: Calls, seconds: float, late: str = "has not answered for {:g} s") -> list[Any]:
        """The results of all calls, in order. A member that does not answer in time counts as lost."""
        found: dict[int, Any] = {}
        self.wait(calls, lambda member, result: found.update({member.rank: result}), seconds)
        for member, _ in calls:
            if member.rank not in found:
                raise member.lost(late.format(seconds))
        return [found[member.rank] for member, _ in calls]

    def call(self, method: str, *, seconds: float, members: Sequence[WorkerHandle]) -> list[Any]:
        calls = [(member, getattr(member.handle, method).remote()) for member in members]
        return self.results(calls, seconds, f"has not answered for {{:g}} s ({method})")

    # ---- health

    def _check_health(self, needed: Collection[int]) -> None:
        """Forward a stop signal, and raise for members that are dead, hang or do not answer. The loss of an engine is
        raised only if it is in `needed`."""
        if self.stop.signal is not None and not self._signal_sent:
            self._signal_sent = True
            for member in self.members:
                self.pass_signal(member)
        now = time.monotonic()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_EVERY
            for member in self.members:
                if member.rank not in self._asked:
                    self._asked[member.rank] = member.handle.heartbeat.remote(), now
        answered, _ = ray.wait([asked for asked, _ in self._asked.values()], num_returns=len(self._asked), timeout=0)
        for member in self.members:
            try:
                self._check_heartbeat(member, answered)
            except EngineLost:
                if member.rank in needed:
                    raise

    def _check_heartbeat(self, member: WorkerHandle, answered: list[Any]) -> None:
        if member.rank not in self._asked:
            return
        asked, since = self._asked[member.rank]
        if asked not in answered:
            if time.monotonic() - since > self.hang_timeout:
                member.silent = True
                raise member.lost(f"has given no sign of life for {self.hang_timeout:g} s (--hang_timeout)")
            return
        del self._asked[member.rank]
        try:
            doing, still, waits = ray.get(asked)
        except RayError as error:
            raise member.lost(_loss_reason(error)) from error
        if still > self.hang_timeout * (1 + GRACE if waits else 1):
            why = "waits for a process that does not come" if waits else "hangs"
            raise member.lost(f"{why}: {doing} has not moved for {self.hang_timeout:g} s (--hang_timeout)")

    def pass_signal(self, member: WorkerHandle) -> None:
        """Send a member the stop signal of this process, if it was sent to the others."""
        if self._signal_sent:
            member.handle.receive_signal.remote(self.stop.signal)

    def is_alive(self, member: WorkerHandle) -> bool:
        try:
            ray.get(member.handle.heartbeat.remote(), timeout=TO_BLAME)
        except RayError:
            return False
        return True

    def blame(self, member: WorkerHandle, message: str) -> NoReturn:
        """Raise for a failed member, or for a dead one that caused its failure, which may take some time to show."""
        deadline = time.monotonic() + (TO_BLAME if is_lost_connection(message) else 0.0)
        while (left := deadline - time.monotonic()) > 0:
            asked = {other.handle.heartbeat.remote(): other for other in self.members}
            answered, silent = ray.wait([*asked], num_returns=len(asked), timeout=left)
            for heartbeat in answered:
                try:
                    ray.get(heartbeat)
                except RayError as error:
                    raise asked[heartbeat].lost(_loss_reason(error)) from error
            if silent:
                asked[silent[0]].silent = True
                raise asked[silent[0]].lost(f"was lost: it has not answered for {TO_BLAME:g} s")
            time.sleep(LOOK_EVERY)
        raise RunFailed(f"{member}: {message}")

    # ---- the end

    def end(self, *, kindly: bool) -> None:
        """End all workers; `kindly`: let them close their roles first."""
        if kindly:
            try:
                self.call("leave", seconds=TO_LEAVE, members=self.members)
            except (WorkerLost, RayError):
                for member in self.members:
                    member.silent = member.silent or not self.is_alive(member)
        for member in self.members:
            self.kill(member)
        # Ray kills asynchronously: exiting before it has taken effect may leave processes behind.
        asked = [member.handle.heartbeat.remote() for member in self.members]
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=TO_LEAVE)
        self.members = []

    def kill(self, member: WorkerHandle) -> None:
        """Kill a worker. Ray cannot kill a stopped process, so that gets SIGKILL from a task on its node."""
        ray.kill(member.handle)
        self._asked.pop(member.rank, None)
        if member.silent and member.process is not None and member.node_id is not None:
            there = NodeAffinitySchedulingStrategy(member.node_id, soft=False)
            kill = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(_kill_process)
            with contextlib.suppress(RayError):
                ray.get(kill.remote(member.process), timeout=TO_LEAVE)
            member.silent = False


def _kill_process(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _loss_reason(error: BaseException) -> str:
    """Why a call to a worker failed, from Ray's exception."""
    name, message = type(error).__name__, " ".join(str(error).split())
    if any(words in message for words in NODE_IS_GONE):
        why = "its node is gone"
    elif name == "ActorUnavailableError":
        why = "its process or its node is gone"
    elif name == "OutOfMemoryError":
        why = "Ray ended it, since its node was short of memory"
    elif name == "ActorDiedError" and "creation task" in message:
        why = f"it could not be started: {message[-300:]}"
    elif name == "ActorDiedError":
        why = "its process ended" + (" (killed, or out of memory)" if "SYSTEM_ERROR" in message else "")
    else:
        why = message[:300]
    return f"was lost: {why} ({name})"
