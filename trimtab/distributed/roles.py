"""Roles: what the RL loop speaks to, wherever they work.

A role is an ordinary object with methods such as `log_probs`, `update`, `generate`. The loop runs in one process and
calls a *group*; a group is the role in one process or in many:

    Alone      the method itself, in this process
    Everywhere the same role in every process of a world that a launcher started: the first process calls, the others
               serve. A call hands each process its part and brings back one result a process, in rank order.

The loop does not know which. Inside a call all processes of a group run the same method, so a method may use
collectives. A process that fails says why in the store that all share before it ends; the caller raises that.

Calls and results travel as JSON and raw numbers (wire.py): neither the store nor the sockets between processes ask who
is writing, so nothing that comes from them is unpickled.
"""

import json
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from trimtab.distributed.calling_off import meet_again, reason_to_call_off
from trimtab.distributed.watch import pulse
from trimtab.distributed.wire import Wire
from trimtab.distributed.world import PATIENCE, World
from trimtab.errors import OutOfMemory, RunFailed, UserError

FAILURE = "trimtab_failure"
DONE, AGAIN = "done", "again"  # the run is over, or is to be built and begun anew


class Group(Protocol):
    size: int

    def call(self, method: str, parts: Sequence[Any] | None = None, **shared: Any) -> list[Any]:
        """Run a method in every process: with its own part, if there are parts, and what all are told alike."""

    def meet_again(self) -> bool:
        """After OutOfMemory. True: there are several processes, which can be called again, but what they hold together
        (a split model) can only be saved: it must be built anew."""


class Alone:
    size = 1

    def __init__(self, role: Any):
        self.role = role

    def call(self, method: str, parts: Sequence[Any] | None = None, **shared: Any) -> list[Any]:
        own = () if parts is None else (parts[0],)
        return [getattr(self.role, method)(*own, **shared)]

    def meet_again(self) -> bool:
        return False


class Switchboard:
    """The wires between the first process and the others: one for all groups of a run."""

    def __init__(self, world: World, roles: dict[str, Any], records: Sequence[type] = ()):
        """`records`: the dataclasses and exceptions that go to the roles or come back."""
        self.world, self.roles = world, roles
        self._wire = Wire(*records)
        self._connect()

    def _connect(self) -> None:
        self._channel = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._store = dist.distributed_c10d._get_default_store()

    def meet_again(self) -> None:
        """After what the processes were in the middle of was called off."""
        meet_again(self.world)
        self._connect()

    def group(self, name: str) -> "Everywhere":
        return Everywhere(self, name)

    def call(self, role: str, method: str, parts: Sequence[Any] | None, shared: dict[str, Any]) -> list[Any]:
        """Made by the first process."""
        own = [None] * self.world.size if parts is None else [(part,) for part in parts]
        try:
            for rank in range(1, self.world.size):
                self._send([role, method, own[rank], shared], rank)
            result = self._perform(role, method, own[0], shared)
            return [result, *(self._receive(rank) for rank in range(1, self.world.size))]
        except RuntimeError as error:  # what sending or a collective raises when a process has gone
            if (why := reason_to_call_off()) is not None:
                raise OutOfMemory(why) from error
            raise self._reported() or error from error

    def serve(self) -> str:
        """What the other processes do until the first one hangs up; the word with which it does."""
        while True:
            try:
                asked = self._receive(0)
                if isinstance(asked, str):
                    return asked
                self._send(self._perform(*asked), 0)
            except OutOfMemory:
                self.meet_again()
            except BaseException as error:
                if isinstance(error, RuntimeError) and reason_to_call_off() is not None:
                    self.meet_again()
                    continue
                self._report(error)
                raise

    def hang_up(self, word: str = DONE) -> None:
        for rank in range(1, self.world.size):
            self._send(word, rank)

    def _perform(self, role: str, method: str, own: tuple | None, shared: dict[str, Any]) -> Any:
        assert not method.startswith("_"), "a role's own business"
        pulse.move(f"{role}.{method}")
        return getattr(self.roles[role], method)(*(own or ()), **shared)

    def _send(self, value: Any, rank: int) -> None:
        message = self._wire.pack(value)
        with pulse.waiting():
            dist.send(torch.tensor([len(message)]), rank, group=self._channel)
            dist.send(message, rank, group=self._channel)

    def _receive(self, rank: int) -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        with pulse.waiting():
            dist.recv(size, rank, group=self._channel)
            message = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(message, rank, group=self._channel)
        return self._wire.unpack(message)

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


class Everywhere:
    def __init__(self, switchboard: Switchboard, name: str):
        self._switchboard, self._name = switchboard, name

    @property
    def size(self) -> int:
        return self._switchboard.world.size

    def call(self, method: str, parts: Sequence[Any] | None = None, **shared: Any) -> list[Any]:
        assert parts is None or len(parts) == self.size
        return self._switchboard.call(self._name, method, parts, shared)

    def meet_again(self) -> bool:
        self._switchboard.meet_again()
        return True
