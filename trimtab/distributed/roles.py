"""Roles: what the RL loop speaks to, wherever they work.

A role is an ordinary object with methods such as `log_probs`, `update`, `generate`. The loop runs in one process and
calls a *group*; a group is the role in one process or in many:

    Alone      the method itself, in this process
    Everywhere the same role in every process of a world that a launcher started: the first process calls, the others
               serve. A call hands each process its part and brings back one result a process, in rank order.

The loop does not know which. Inside a call all processes of a group run the same method, so a method may use
collectives. A process that fails says why in the store that all share before it ends; the caller raises that.
"""

import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from trimtab.distributed.world import World
from trimtab.errors import RunFailed, UserError

PATIENCE = timedelta(days=30)  # an idle process waits for its next call as long as a slow reward takes
FAILURE = "trimtab_failure"


class Group(Protocol):
    size: int

    def call(self, method: str, parts: Sequence[Any] | None = None, **shared: Any) -> list[Any]:
        """Run a method in every process: with its own part, if there are parts, and what all are told alike."""


class Alone:
    size = 1

    def __init__(self, role: Any):
        self.role = role

    def call(self, method: str, parts: Sequence[Any] | None = None, **shared: Any) -> list[Any]:
        own = () if parts is None else (parts[0],)
        return [getattr(self.role, method)(*own, **shared)]


class Switchboard:
    """The wires between the first process and the others: one for all groups of a run."""

    def __init__(self, world: World, roles: dict[str, Any]):
        self.world, self.roles = world, roles
        self._wires = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._store = dist.distributed_c10d._get_default_store()

    def group(self, name: str) -> "Everywhere":
        return Everywhere(self, name)

    def call(self, role: str, method: str, parts: Sequence[Any] | None, shared: dict[str, Any]) -> list[Any]:
        """Made by the first process."""
        try:
            dist.broadcast_object_list([(role, method, shared, parts is not None)], src=0, group=self._wires)
            return self._take_part(role, method, parts, shared, parts is not None)
        except RuntimeError as error:  # what a collective raises when a process has gone
            raise self._reported() or error from error

    def serve(self) -> None:
        """What the other processes do until the first one hangs up."""
        while True:
            header: list[Any] = [None]
            dist.broadcast_object_list(header, src=0, group=self._wires)
            if header[0] is None:
                return
            role, method, shared, has_parts = header[0]
            try:
                self._take_part(role, method, None, shared, has_parts)
            except BaseException as error:
                self._report(error)
                raise

    def hang_up(self) -> None:
        dist.broadcast_object_list([None], src=0, group=self._wires)

    def _take_part(self, role: str, method: str, parts: Sequence[Any] | None, shared: dict, has_parts: bool) -> list:
        own: list[Any] = [None]
        if has_parts:
            dist.scatter_object_list(own, list(parts) if parts is not None else None, src=0, group=self._wires)
        result = getattr(self.roles[role], method)(*(own if has_parts else ()), **shared)
        results = [None] * self.world.size if self.world.leads else None
        dist.gather_object(result, results, dst=0, group=self._wires)
        return results

    def _report(self, error: BaseException) -> None:
        known = type(error) if isinstance(error, UserError | RunFailed) else RunFailed
        message = str(error) if known is type(error) else f"{type(error).__name__}: {error}"
        self._store.set(FAILURE, pickle.dumps((known.__name__, self.world.rank, message)))

    def _reported(self) -> Exception | None:
        if not self._store.check([FAILURE]):
            return None
        kind, rank, message = pickle.loads(self._store.get(FAILURE))
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
