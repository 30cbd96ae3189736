"""Processes of a run that are gone, and what Ray and PyTorch say of them in our words."""

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
from trimtab.distributed.launcher import EngineLost, Processes, RoleHost, SeededOptions, Unit, WorkerLost
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.process_group import (
    World,
    abort_reason,
    init_process_group,
    reinit_process_group,
    use_interface_of,
)
from trimtab.distributed.serialization import Serializer
from trimtab.distributed.supervision import GRACE, in_collective, is_lost_connection, pulse
from trimtab.distributed.weight_transfer import NODE_ADDRESS
from trimtab.errors import OutOfMemory, RunFailed, UserError
from trimtab.interrupts import StopRequest

# How Ray says of a process that its machine has gone with it.
OF_THE_NODE = ("node was terminated", "node has died", "node died", "missing too many heartbeats", "node failure")


def in_words(error: BaseException) -> str:
    """Why a call to a process of Ray failed."""
    name, said = type(error).__name__, " ".join(str(error).split())
    if any(words in said for words in OF_THE_NODE):
        why = "its node is gone"
    elif name == "ActorUnavailableError":
        why = "its process or its node is gone"
    elif name == "OutOfMemoryError":
        why = "Ray ended it, since its node was short of memory"
    elif name == "ActorDiedError" and "creation task" in said:
        why = f"it could not be started: {said[-300:]}"
    elif name == "ActorDiedError":
        why = "its process ended" + (" (killed, or out of memory)" if "SYSTEM_ERROR" in said else "")
    else:
        why = said[:300]
    return f"was lost: {why} ({name})"


# ---- A process of a run on Ray, as the controller knows it: by its roles, rank and machine.


@dataclass
class WorkerHandle:
    handle: Any  # Ray's
    rank: int
    roles: str  # in words
    node: str = "a node that is not known yet"
    process: int | None = None
    engine: bool = False  # it only answers prompts
    node_id: str | None = None
    silent: bool = False  # it may be stopped, and then does not even notice that it is to end

    def __str__(self) -> str:
        number = "" if self.process is None else f", pid {self.process}"
        return f"{self.roles} (process {self.rank} on {self.node}{number})"

    def lost(self, why: str) -> WorkerLost:
        return EngineLost(f"{self} {why}", self.rank) if self.engine else WorkerLost(f"{self} {why}")


# ---- One process of a run on Ray: the host of its roles. The controller calls it, and asks it how it is while it
# works.


DONE, NO_ROOM, MISTAKE, FAILED = "done", "no room", "mistake", "failed"


@dataclass(frozen=True)
class RayJob:
    """What every process of a run is told before it builds anything. Functions and classes of modules, so that they
    can be named to another process."""

    options: SeededOptions
    units: Callable[[Any, int], Sequence[Unit]]
    make_mesh: Callable[..., Mesh]  # (options, world, ranks, learns=...)
    records: tuple[type, ...]
    prepare: Callable[[Any], None]  # this process, before any role is built
    folder: str  # from which relative paths go


@dataclass(frozen=True)
class WorkerRank:
    """Where a process is among the others."""

    rank: int
    size: int
    neighbours: int  # processes of this run on its machine
    threads: int | None  # None: its share of the machine's


class RayWorker:
    def __init__(self) -> None:
        self.stop = StopRequest()
        os.environ[NODE_ADDRESS] = ray.util.get_node_ip_address()
        self._place: socket.socket | None = None
        pulse.rest()  # to start has a limit of its own

    # ---- beside the work

    @ray.method(concurrency_group="health")
    def beat(self) -> tuple[str, float, bool]:
        """What it is doing, for how many seconds nothing has moved, and whether it waits for others."""
        return pulse.doing, pulse.still(), in_collective()

    @ray.method(concurrency_group="health")
    def hear(self, number: int) -> None:
        self.stop.hear(number)

    # ---- where it is

    def where(self) -> dict[str, Any]:
        context, device = ray.get_runtime_context(), find_device()
        return {
            "node": context.get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "process": os.getpid(),
            "kind": device.kind,
            "bf16_fault": device.bf16_fault(),
            "devices": [name for names in context.get_accelerator_ids().values() for name in names],
        }

    def offer_place(self) -> tuple[str, int]:
        """Where the processes meet: open already, at the address by which the nodes know each other."""
        address = ray.util.get_node_ip_address()
        self._place = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        self._place.bind((address, 0))
        self._place.listen(1024)
        return address, self._place.getsockname()[1]

    # ---- the run

    def meet(self, job: RayJob, seating: WorkerRank, address: str, port: int) -> dict[str, Any]:
        """Join the others and be ready to build roles. What its device is."""
        os.environ["LOCAL_WORLD_SIZE"] = str(seating.neighbours)
        if os.path.isdir(job.folder):
            os.chdir(job.folder)
        torch.set_num_threads(seating.threads or max(1, (os.cpu_count() or 1) // seating.neighbours))
        device = find_device()
        world = World(device=device.torch)
        if seating.size > 1:
            use_interface_of(ray.util.get_node_ip_address())
            os.environ["MASTER_PORT"] = str(port)  # of the connections that stay when others are broken
            listening = {} if self._place is None else {"is_master": True, "master_listen_fd": self._place.detach()}
            store = dist.TCPStore(address, port, seating.size, wait_for_workers=False, **listening)
            init_process_group(device.torch, store=store, rank=seating.rank, world_size=seating.size)
            world = World(seating.rank, seating.size, device.torch)
        job.prepare(job.options)
        units = job.units(job.options, seating.size)
        self._serializer = Serializer(*job.records, Processes)
        self.host = RoleHost(job.options, units, job.make_mesh, device, world, self.stop)
        return device.described()

    def perform(self, own: np.ndarray, shared: np.ndarray) -> tuple[str, Any]:
        """One call of a role. What goes wrong is told, not raised: so the controller reads it as it was meant."""
        try:
            role, method, part = self._serializer.unpack(own.copy())
            settings = self._serializer.unpack(shared.copy())  # Ray's memory is not to be written to
            assert not method.startswith("_"), "a role's own business"
            pulse.thread = threading.get_ident()
            pulse.move(f"{role}.{method}")
            result = getattr(self.host.roles[role], method)(*(part or ()), **settings)
            if (why := abort_reason()) is not None:
                return NO_ROOM, why
            return DONE, np.frombuffer(self._serializer.pack(result), dtype=np.uint8)
        except OutOfMemory as error:
            return NO_ROOM, str(error)
        except UserError as error:
            return MISTAKE, str(error)
        except RunFailed as error:
            return FAILED, str(error)
        except Exception as error:
            if isinstance(error, RuntimeError) and (why := abort_reason()) is not None:
                return NO_ROOM, why
            where = "".join(traceback.format_tb(error.__traceback__)[-3:])
            return FAILED, f"{type(error).__name__}: {error}\n{where}".rstrip()
        finally:
            pulse.rest()

    def reinit_process_group(self) -> None:
        self.host.device.release_memory()
        reinit_process_group(self.host.world)

    def leave(self) -> None:
        self.host.close()


# ---- All processes of a run on Ray: who they are, how they are, and how calls to them are waited for. Every wait has
# an end. While one waits, all processes are asked how they are, each in a thread of its own beside its work: a dead
# one is named at once, one that stands still or does not answer after --hang_timeout. Neighbours of a dead process
# complain of broken connections first, so before anybody is blamed all are asked once more.


LOOK_EVERY = 0.5  # seconds
ASK_EVERY = 3.0
TO_BLAME = 8.0  # seconds in which a dead process is found out, once something is wrong
TO_LEAVE = 10.0


class RayWorkers:
    def __init__(self, hang_timeout: float, stop: StopRequest, world_size: int):
        """`world_size`: how many of the members, the first ones, compute together."""
        self.members: list[WorkerHandle] = []
        self.hang_timeout, self.stop, self.world_size = hang_timeout, stop, world_size
        self._told: int | None = None
        self._asked: dict[int, tuple[Any, float]] = {}  # rank: the question under way, and since when
        self._next_question = 0.0

    def wait(
        self, of: Sequence[tuple[WorkerHandle, Any]], take: Callable[[WorkerHandle, Any], None], seconds: float | None
    ) -> int:
        """Hand over every result as it comes; how many are missing after so many seconds."""
        deadline = None if seconds is None else time.monotonic() + seconds
        waiting = {reference: member for member, reference in of}
        while waiting:
            left = LOOK_EVERY if deadline is None else min(LOOK_EVERY, max(0.0, deadline - time.monotonic()))
            done, _ = ray.wait([*waiting], num_returns=len(waiting), timeout=left)
            for reference in done:
                member = waiting.pop(reference)
                try:
                    result = ray.get(reference)
                except RayTaskError as error:
                    self._pass_on(member, error)
                except RayError as error:
                    self.blame(member, error)
                take(member, result)
            if waiting:
                self.look({member.rank for member in waiting.values()})
                if deadline is not None and time.monotonic() >= deadline:
                    break
        return len(waiting)

    def call(
        self, method: str, *arguments: Any, seconds: float, members: Sequence[WorkerHandle] | None = None
    ) -> list[Any]:
        """The same of all or of these, in their order; one that is late is lost."""
        members = self.members if members is None else members
        calls = [(member, getattr(member.handle, method).remote(*arguments)) for member in members]
        results: dict[int, Any] = {}
        self.wait(calls, lambda member, result: results.update({member.rank: result}), seconds)
        for member in members:
            if member.rank not in results:
                raise member.lost(f"has not answered for {seconds:g} s ({method})")
        return [results[member.rank] for member in members]

    def one(self, member: WorkerHandle, reference: Any, seconds: float) -> Any:
        """What one member answers."""
        results: list[Any] = []
        if self.wait([(member, reference)], lambda _, result: results.append(result), seconds):
            raise member.lost(f"has not answered for {seconds:g} s")
        return results[0]

    # ---- how they are

    def look(self, needed: Collection[int]) -> None:
        """Pass a signal on, and notice who is dead, stands still or does not answer. An engine matters only while it is
        needed: until then its loss is no loss."""
        if self.stop.signal is not None and self._told is None:
            self._told = self.stop.signal
            for member in self.members:
                member.handle.hear.remote(self._told)
        now = time.monotonic()
        if now >= self._next_question:
            self._next_question = now + ASK_EVERY
            for member in self.members:
                if member.rank not in self._asked:
                    self._asked[member.rank] = member.handle.beat.remote(), now
        answered, _ = ray.wait([ask for ask, _ in self._asked.values()], num_returns=len(self._asked), timeout=0)
        for member in self.members:
            try:
                self._hear_from(member, answered)
            except EngineLost:
                if member.rank in needed:
                    raise

    def _hear_from(self, member: WorkerHandle, answered: list[Any]) -> None:
        question, since = self._asked.get(member.rank, (None, 0.0))
        if question is None:
            return
        if question not in answered:
            if time.monotonic() - since > self.hang_timeout:
                member.silent = True
                raise member.lost(f"has given no sign of life for {self.hang_timeout:g} s (--hang_timeout)")
            return
        del self._asked[member.rank]
        try:
            doing, still, waits = ray.get(question)
        except RayError as error:
            self.blame(member, error)
        if still > self.hang_timeout * (1 + GRACE if waits else 1):
            why = "waits for a process that does not come" if waits else "hangs"
            raise member.lost(f"{why}: {doing} has not moved for {self.hang_timeout:g} s (--hang_timeout)")

    def _pass_on(self, member: WorkerHandle, error: RayTaskError) -> NoReturn:
        """What a member has raised."""
        if isinstance(error.cause, UserError):
            raise UserError(str(error.cause)) from error
        self.blame_somebody(member, f"{type(error.cause).__name__}: {error.cause}")

    def answers(self, member: WorkerHandle) -> bool:
        """Whether it is alive, asked once."""
        try:
            ray.get(member.handle.beat.remote(), timeout=TO_BLAME)
        except RayError:
            return False
        return True

    def tell(self, member: WorkerHandle) -> None:
        """One that came later hears what the others were told."""
        if self._told is not None:
            member.handle.hear.remote(self._told)

    def blame(self, member: WorkerHandle, error: RayError) -> NoReturn:
        """A call to a member has failed: it is gone."""
        raise member.lost(in_words(error)) from error

    def blame_somebody(self, member: WorkerHandle, message: str) -> NoReturn:
        """A member has failed, by its own fault or since another one is gone."""
        if is_lost_connection(message):
            self._find_the_dead()
        raise RunFailed(f"{member}: {message}")

    def _find_the_dead(self) -> None:
        """Nobody may be: then it takes all the time that there is."""
        deadline = time.monotonic() + TO_BLAME
        while (left := deadline - time.monotonic()) > 0:
            asked = {member.handle.beat.remote(): member for member in self.members}
            answered, silent = ray.wait([*asked], num_returns=len(asked), timeout=left)
            for question in answered:
                try:
                    ray.get(question)
                except RayError as error:
                    self.blame(asked[question], error)
            if silent:
                asked[silent[0]].silent = True
                raise asked[silent[0]].lost(f"was lost: it has not answered for {TO_BLAME:g} s")
            time.sleep(LOOK_EVERY)

    # ---- the end

    def end(self, *, kindly: bool) -> None:
        """`kindly`: they may close what they hold."""
        if kindly:
            try:
                self.call("leave", seconds=TO_LEAVE)
            except (WorkerLost, RayError):
                for member in self.members:
                    member.silent = member.silent or not self.answers(member)
        for member in self.members:
            self.kill(member)
        # Ray only passes the wish on: whoever leaves before it has come true may leave processes behind.
        asked = [member.handle.beat.remote() for member in self.members]
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=TO_LEAVE)
        self.members = []

    def kill(self, member: WorkerHandle) -> None:
        """Also one that is stopped, to which Ray's own way does nothing."""
        ray.kill(member.handle)
        self._asked.pop(member.rank, None)
        if member.silent and member.process is not None and member.node_id is not None:
            there = NodeAffinitySchedulingStrategy(member.node_id, soft=False)
            end = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(_end)
            with contextlib.suppress(RayError):
                ray.get(end.remote(member.process), timeout=TO_LEAVE)
            member.silent = False


def _end(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
