"""Launcher for the processes of one torchrun-style world: rank 0 is the controller, the other ranks serve its calls.

`RpcHub` connects rank 0 with the others, once for all groups of a run. Rank 0 calls and the others serve; it also
performs calls itself if it has the role. Several calls of different groups may be pending at once: every process
answers in the order of the calls. A process that fails writes the reason into the shared store before it exits, and the
caller raises it.

Calls and results are sent as JSON and raw numbers (serialization): neither the store nor the sockets authenticate the
sender, so nothing is unpickled.
"""

import contextlib
import json
import time
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trimtab.distributed.launcher import HOST, Group, InProcessLauncher, PendingCall, Processes, RoleHost
from trimtab.distributed.process_group import World, abort_reason, new_group, reinit_process_group
from trimtab.distributed.serialization import Serializer
from trimtab.distributed.supervision import own_heartbeat
from trimtab.errors import OutOfMemory, RunFailed, UserError

FAILURE = "trimtab_failure"  # in the store


class RpcCall(PendingCall):
    """A call to several processes, with the results received so far."""

    def __init__(self, hub: "RpcHub", name: str, ranks: Sequence[int], reporting: Sequence[int]):
        super().__init__(name)
        self.ranks, self.reporting = ranks, reporting
        self.work: tuple | None = None  # the call's arguments for this process, if it is among the ranks
        self.results: dict[int, Any] = {}
        self.sent: list[tuple[Any, torch.Tensor]] = []
        self._hub = hub

    def wait(self, seconds: float | None = None) -> list[Any]:
        self._hub.finish(self, seconds)
        return [self.results[rank] for rank in self.reporting]


class RpcHub:
    """The connections between rank 0 and the other processes of a world."""

    def __init__(self, world: World, roles: dict[str, Any], records: Sequence[type] = ()):
        """`roles`: this process's roles, which may be added later; `records`: dataclasses and exceptions in
        messages."""
        self.world, self.roles = world, roles
        self._serializer = Serializer(*records)
        self._connect()

    def _connect(self) -> None:
        self._channel = new_group(backend="gloo")
        self._store = dist.distributed_c10d._get_default_store()
        self._own: deque[RpcCall] = deque()  # calls that this process still has to perform itself
        self._expected: list[deque[RpcCall]] = [deque() for _ in range(self.world.size)]

    def reinit_process_group(self) -> None:
        """Reconnect after collectives were aborted."""
        reinit_process_group(self.world)
        self._connect()

    def group(self, name: str, processes: Processes | None = None) -> "RpcGroup":
        """`processes`: the ranks with this role; None: all."""
        return RpcGroup(self, name, processes or Processes.apart(range(self.world.size)))

    # ---- rank 0

    def start(
        self, group: "RpcGroup", method: str, arguments: Sequence[tuple], reporting: Sequence[int], shared: dict
    ) -> RpcCall:
        call = RpcCall(self, f"{group.name}.{method}", group.ranks, reporting)
        try:
            for rank, own in zip(group.ranks, arguments, strict=True):
                asked = (group.name, method, own, shared)
                if rank == self.world.rank:
                    call.work = asked
                    self._own.append(call)
                else:
                    call.sent += self._post(asked, rank)
                    self._expected[rank].append(call)
        except RuntimeError as error:
            self._explain(error)
            raise
        return call

    def finish(self, call: RpcCall, seconds: float | None) -> None:
        """Perform own calls and receive results until all results of `call` are there."""
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            while call in self._own:
                mine = self._own.popleft()
                assert mine.work is not None
                mine.results[self.world.rank] = self._perform(*mine.work)
            for rank in call.ranks:
                late = f"{call.name}: process {rank} has not answered for {seconds} s"
                while rank not in call.results:
                    result = self._receive(rank, deadline, late)
                    self._expected[rank].popleft().results[rank] = result
            for sending, _ in call.sent:
                sending.wait()
        except RuntimeError as error:  # raised by sends and collectives when a process has died
            self._explain(error)
            raise

    def _explain(self, error: RuntimeError) -> None:
        """Raise the reason that another process has stored for a broken connection, if any."""
        if (why := abort_reason()) is not None:
            raise OutOfMemory(why) from error
        if not self._store.check([FAILURE]):
            return
        with contextlib.suppress(ValueError):  # not written by one of our processes
            kind, rank, message = json.loads(self._store.get(FAILURE))
            raise (UserError(message) if kind == "UserError" else RunFailed(f"process {rank}: {message}")) from error

    def disconnect(self) -> None:
        for rank in range(1, self.world.size):
            with contextlib.suppress(RuntimeError):  # it may have exited already
                self._send(None, rank)

    # ---- other ranks

    def serve(self) -> None:
        """Answer calls until rank 0 disconnects."""
        while True:
            try:
                if (asked := self._receive(0)) is None:
                    return
                result = self._perform(*asked)
                if abort_reason() is None:
                    self._send(result, 0)
                    continue
            except OutOfMemory:
                pass
            except BaseException as error:
                if not isinstance(error, RuntimeError) or abort_reason() is None:
                    self._report(error)
                    raise
            self.reinit_process_group()

    def _report(self, error: BaseException) -> None:
        known = type(error) if isinstance(error, UserError | RunFailed) else RunFailed
        message = str(error) if known is type(error) else f"{type(error).__name__}: {error}"
        self._store.set(FAILURE, json.dumps([known.__name__, self.world.rank, message]))

    def _perform(self, role: str, method: str, own: tuple, shared: dict[str, Any]) -> Any:
        assert not method.startswith("_"), "a private method of a role"
        own_heartbeat.move(f"{role}.{method}")
        return getattr(self.roles[role], method)(*own, **shared)

    # ---- messages

    def _post(self, value: Any, rank: int) -> list[tuple[Any, torch.Tensor]]:
        """Send without waiting: the receiver may be busy, or have a result to send first. The caller must keep the
        returned
        tensors until they have been sent."""
        message = torch.frombuffer(self._serializer.pack(value), dtype=torch.uint8)
        parts = torch.tensor([len(message)]), message
        return [(dist.isend(part, rank, group=self._channel), part) for part in parts]

    def _send(self, value: Any, rank: int) -> None:
        with own_heartbeat.waiting():
            for sending, _ in self._post(value, rank):
                sending.wait()

    def _receive(self, rank: int, deadline: float | None = None, late: str = "") -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        with own_heartbeat.waiting():
            coming = dist.irecv(size, rank, group=self._channel)
            assert coming is not None
            try:
                if deadline is None:
                    coming.wait()
                else:
                    coming.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
            except RuntimeError as error:
                if deadline is not None and "timed out" in str(error).lower():
                    raise RunFailed(late) from error
                raise
            message = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(message, rank, group=self._channel)
        return self._serializer.unpack(message.numpy())


class RpcGroup(Group):
    def __init__(self, hub: RpcHub, name: str, processes: Processes):
        self._hub, self.name, self.processes = hub, name, processes

    def _send(
        self, method: str, arguments: Sequence[tuple], reporting: Sequence[int], shared: dict[str, Any]
    ) -> RpcCall:
        return self._hub.start(self, method, arguments, reporting, shared)

    def reinit_process_group(self) -> bool:
        self._hub.reinit_process_group()
        return True


class LocalProcessLauncher(InProcessLauncher):
    """Launcher in every process of a world; rank 0 runs the loop, the others `serve`."""

    def __init__(self, host: RoleHost, records: Sequence[type]):
        super().__init__(host)
        self._hub = RpcHub(host.world, host.roles, (*records, Processes))

    def _hosts(self, options: Any) -> tuple[Group, Iterable[str]]:
        assert options == self.host.options, "the other processes know the options as they were given"
        return self._hub.group(HOST), self.host.units

    def _group(self, role: str, processes: Processes) -> Group:
        return self._hub.group(role, processes)

    def rebuild_groups(self) -> dict[str, Group]:
        self._hub.group(HOST).call("release")
        return self.groups(self.host.options)

    def serve(self) -> None:
        try:
            self._hub.serve()
        finally:
            self.host.close()

    def disconnect(self) -> None:
        self._hub.disconnect()


def launcher_of(host: RoleHost, records: Sequence[type] = ()) -> InProcessLauncher:
    """The launcher for the size of this process's world. `records`: dataclasses and exceptions in calls and results."""
    return InProcessLauncher(host) if host.world.size == 1 else LocalProcessLauncher(host, records)
