"""The wires between the first process of a world and the others, one for all groups of a run.

The first process calls, the others serve; it is itself one of those that work, if the group that it calls is also
here. Calls may be under way in several groups at once: every process answers in the order in which it was asked. A
process that fails says why in the store that all share before it ends; the caller raises that.

Calls and results travel as JSON and raw numbers (serialization.py): neither the store nor the sockets between
processes ask who is writing, so nothing that comes from them is unpickled.
"""

import contextlib
import json
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trimtab.distributed.launcher import HOST, Group, InProcessLauncher, Launcher, Processes, RoleHost, SeededOptions
from trimtab.distributed.process_group import (
    COLLECTIVE_TIMEOUT,
    World,
    abort_reason,
    noting_sockets,
    reinit_process_group,
)
from trimtab.distributed.serialization import Serializer
from trimtab.distributed.supervision import pulse
from trimtab.errors import OutOfMemory, RunFailed, UserError

FAILURE = "trimtab_failure"


class RpcHub:
    def __init__(self, world: World, roles: dict[str, Any], records: Sequence[type] = ()):
        """`roles`: those of this process, now or later; `records`: the dataclasses and exceptions that go to the roles
        or come back."""
        self.world, self.roles = world, roles
        self._serializer = Serializer(*records)
        self._connect()

    def _connect(self) -> None:
        with noting_sockets():
            self._channel = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        self._store = dist.distributed_c10d._get_default_store()
        self._own: deque[RpcCall] = deque()  # what this process has been asked and has not done yet
        self._expected: list[deque[RpcCall]] = [deque() for _ in range(self.world.size)]

    def reinit_process_group(self) -> None:
        """After what the processes were in the middle of was called off."""
        reinit_process_group(self.world)
        self._connect()

    def group(self, name: str, processes: Processes | None = None) -> "RpcGroup":
        """`processes`: those that have this role, if not all."""
        return RpcGroup(self, name, processes or Processes.apart(range(self.world.size)))

    # ---- the first process

    def start(
        self, role: str, method: str, ranks: Sequence[int], parts: Sequence[Any] | None, shared: dict[str, Any]
    ) -> "RpcCall":
        own = [None] * len(ranks) if parts is None else [(part,) for part in parts]
        call = RpcCall(self, f"{role}.{method}", ranks)
        try:
            for rank, part in zip(ranks, own, strict=True):
                if rank == self.world.rank:
                    call.work = (role, method, part, shared)
                    self._own.append(call)
                else:
                    call.sent += self._post([role, method, part, shared], rank)
                    self._expected[rank].append(call)
        except RuntimeError as error:
            self._explain(error)
            raise
        return call

    def finish(self, call: "RpcCall", seconds: float | None) -> None:
        """Work and listen until all results of a call are there."""
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            while call in self._own:
                mine = self._own.popleft()
                assert mine.work is not None
                mine.results[self.world.rank] = self._perform(*mine.work)
            for rank in call.ranks:
                late = f"{call.name}: process {rank} has not answered for {seconds} s"
                while rank not in call.results:
                    left = None if deadline is None else max(0.001, deadline - time.monotonic())
                    result = self._receive(rank, left, late)
                    self._expected[rank].popleft().results[rank] = result
            for sending, _ in call.sent:
                sending.wait()
        except RuntimeError as error:  # what sending or a collective raises when a process has gone
            self._explain(error)
            raise

    def _explain(self, error: RuntimeError) -> None:
        """Raise the reason that another process has given for a broken connection, if there is one."""
        if (why := abort_reason()) is not None:
            raise OutOfMemory(why) from error
        if (reported := self._reported()) is not None:
            raise reported from error

    def hang_up(self) -> None:
        for rank in range(1, self.world.size):
            with contextlib.suppress(RuntimeError):  # it may be gone already
                self._send(None, rank)

    # ---- the others

    def serve(self) -> None:
        """What the other processes do until the first one hangs up."""
        while True:
            try:
                if (asked := self._receive(0)) is None:
                    return
                result = self._perform(*asked)
                if abort_reason() is not None:  # nobody listens any more on the old connections
                    self.reinit_process_group()
                    continue
                self._send(result, 0)
            except OutOfMemory:
                self.reinit_process_group()
            except BaseException as error:
                if isinstance(error, RuntimeError) and abort_reason() is not None:
                    self.reinit_process_group()
                    continue
                self._report(error)
                raise

    def _perform(self, role: str, method: str, own: tuple | None, shared: dict[str, Any]) -> Any:
        assert not method.startswith("_"), "a role's own business"
        pulse.move(f"{role}.{method}")
        return getattr(self.roles[role], method)(*(own or ()), **shared)

    # ---- messages

    def _post(self, value: Any, rank: int) -> list[tuple[Any, torch.Tensor]]:
        """On its way: who receives may still be busy, and have a result to tell first. What comes back must be kept
        until it has arrived."""
        message = torch.frombuffer(self._serializer.pack(value), dtype=torch.uint8)
        parts = torch.tensor([len(message)]), message
        return [(dist.isend(part, rank, group=self._channel), part) for part in parts]

    def _send(self, value: Any, rank: int) -> None:
        message = torch.frombuffer(self._serializer.pack(value), dtype=torch.uint8)
        with pulse.waiting():
            dist.send(torch.tensor([len(message)]), rank, group=self._channel)
            dist.send(message, rank, group=self._channel)

    def _receive(self, rank: int, seconds: float | None = None, late: str = "") -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        with pulse.waiting():
            coming = dist.irecv(size, rank, group=self._channel)
            assert coming is not None
            if seconds is None:
                coming.wait()
            else:
                self._wait(coming, seconds, late)
            message = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(message, rank, group=self._channel)
        return self._serializer.unpack(message.numpy())

    def _wait(self, coming: Any, seconds: float, late: str) -> None:
        try:
            coming.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                raise RunFailed(late) from error
            raise

    def _report(self, error: BaseException) -> None:
        known = type(error) if isinstance(error, UserError | RunFailed) else RunFailed
        message = str(error) if known is type(error) else f"{type(error).__name__}: {error}"
        self._store.set(FAILURE, json.dumps([known.__name__, self.world.rank, message]))

    def _reported(self) -> Exception | None:
        if not self._store.check([FAILURE]):
            return None
        try:
            kind, rank, message = json.loads(self._store.get(FAILURE))
        except ValueError:  # not written by one of us
            return None
        return UserError(message) if kind == "UserError" else RunFailed(f"process {rank}: {message}")


class RpcCall:
    """One that has been made, and the results that are there."""

    def __init__(self, hub: RpcHub, name: str, ranks: Sequence[int]):
        self.name, self.ranks = name, ranks
        self.told = ranks  # whose results are handed out
        self.work: tuple | None = None  # of this process, if it is among them
        self.results: dict[int, Any] = {}
        self.sent: list[tuple[Any, torch.Tensor]] = []
        self._hub = hub

    def wait(self, seconds: float | None = None) -> list[Any]:
        self._hub.finish(self, seconds)
        return [self.results[rank] for rank in self.told]

    def found(self, seconds: float) -> list[Any]:
        """These work together: there is no result without the others."""
        return self.wait()


class RpcGroup(Group):
    def __init__(self, hub: RpcHub, name: str, processes: Processes):
        self._hub, self.name, self.processes = hub, name, processes
        self.size = processes.size

    def start(self, method: str, parts: Sequence[Any] | None = None, **shared: Any) -> RpcCall:
        if parts is None:
            return self._hub.start(self.name, method, self.ranks, None, shared)
        assert len(parts) == self.size
        own = [parts[part] for part in self.processes.parts]
        call = self._hub.start(self.name, method, self.ranks, own, shared)
        call.told = self.processes.telling
        return call

    def each(self, method: str, values: Sequence[Any]) -> list[Any]:
        return self._hub.start(self.name, method, self.ranks, values, {}).wait()

    def reinit_process_group(self) -> bool:
        self._hub.reinit_process_group()
        return True


class LocalProcessLauncher(Launcher):
    """Made in every process of a world; the first one runs the loop, the others `serve`."""

    def __init__(self, host: RoleHost, records: Sequence[type]):
        self.host = host
        self.device, self.world, self.stop = host.device, host.world, host.stop
        self._hub = RpcHub(host.world, host.roles, records)
        self._hosts = self._hub.group(HOST)

    def groups(self, options: SeededOptions) -> dict[str, Group]:
        assert options == self.host.options, "the other processes know the options as they were given"
        for unit in self.host.units:
            self._hosts.call("build", unit=unit)
        self._hosts.call("settle")
        return {name: self._hub.group(name, found) for name, found in self.host.processes().items()}

    def rebuild_groups(self) -> dict[str, Group]:
        self._hosts.call("let_go")
        return self.groups(self.host.options)

    def serve(self) -> None:
        try:
            self._hub.serve()
        finally:
            self.host.close()

    def hang_up(self) -> None:
        self._hub.hang_up()

    def close(self) -> None:
        self.host.close()


def launcher_of(host: RoleHost, records: Sequence[type] = ()) -> InProcessLauncher | LocalProcessLauncher:
    """The way that fits how this process was started. `records`: what may travel to roles and back."""
    return InProcessLauncher(host) if host.world.size == 1 else LocalProcessLauncher(host, records)
