"""Roles: what the RL loop speaks to, wherever they work.

A role is an ordinary object with methods such as `log_probs`, `update`, `sample`. The loop runs in one process and
calls a *group*: the role in one process, or in several, each with its part of the work.

    LocalGroup   the role in this process
    WorldGroup   the role in some or all processes of a world that a launcher started (switchboard.py)
    RayGroup     the role in processes on the nodes of a Ray cluster (cluster/calls.py)

The loop does not know which. Inside a call all processes of a group run the same method, so a method may use
collectives. How roles come to their processes is in staging.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trimtab.distributed.device import Device
from trimtab.distributed.random_state import random_state, restore_random_state


class Role:
    """What every role can be asked."""

    def describe(self) -> dict[str, Any]:
        """What the controller needs to know of it: plain values."""
        return {}

    def random_state(self) -> dict:
        return random_state()

    def restore_random_state(self, state: dict | None) -> None:
        if state is not None:
            restore_random_state(state)

    def close(self) -> None:
        """Let go of processes and connections."""


@dataclass(frozen=True)
class Processes:
    """Those of a run that have a role, in order."""

    ranks: Sequence[int]
    parts: Sequence[int]
    """Which part of a call each of them gets; of those with the same one the first tells the result."""
    streams: Sequence[int]
    """By which number each one's random state is known: those that draw alike have the same."""

    @classmethod
    def apart(cls, ranks: Sequence[int]) -> "Processes":
        """Each with a part of its own."""
        return cls(ranks, range(len(ranks)), ranks)

    @property
    def telling(self) -> list[int]:
        """Of every part, the process whose result counts."""
        return [self.ranks[self.parts.index(part)] for part in range(self.size)]

    @property
    def size(self) -> int:
        return max(self.parts) + 1


class Pending(Protocol):
    """A call that has been made."""

    name: str  # role and method

    def wait(self, seconds: float | None = None) -> list[Any]:
        """One result a part, in their order, or one a process where there were no parts. RunFailed: there is none
        after so many seconds."""

    def found(self, seconds: float) -> list[Any]:
        """The same, where the results of some do not wait for the others: in the place of one that is not there after
        so many seconds is `Unanswered`, which may be asked for again; in that of an engine that is gone, its loss."""


class Unanswered:
    """In the place of a result that is not there yet."""


class Group(ABC):
    name: str
    size: int
    """How many parts a call may have: processes that learn from different data."""
    processes: Processes
    apart = False
    """Of processes that compute alone, each of which another can stand in for."""

    @property
    def ranks(self) -> Sequence[int]:
        """Which processes of the run it is."""
        return self.processes.ranks

    @abstractmethod
    def start(self, method: str, parts: Sequence[Any] | None = None, **shared: Any) -> Pending:
        """Have a method run in every process: with its own part, if there are parts, and what all are told alike."""

    def call(self, method: str, parts: Sequence[Any] | None = None, **shared: Any) -> list[Any]:
        return self.start(method, parts, **shared).wait()

    def one_a_part(self, results: Sequence[Any]) -> list[Any]:
        """Of what every process has said, that of the first one with each part."""
        parts = list(self.processes.parts)
        return [results[parts.index(part)] for part in range(self.size)]

    @abstractmethod
    def each(self, method: str, values: Sequence[Any]) -> list[Any]:
        """Have a method run in every process, each with a value of its own, also where several share a part."""

    def stand_in(self, lost: Exception) -> None:
        """Another process in the place of one that is gone, with its roles as they were built at first."""
        raise lost

    @abstractmethod
    def meet_again(self) -> bool:
        """After OutOfMemory. True: there are several processes, which can be called again, but what they hold together
        (a split model) can only be saved: it must be built anew."""


class LocalGroup(Group):
    size = 1
    processes = Processes.apart((0,))

    def __init__(self, name: str, role: Any, device: Device):
        self.name, self.role, self.device = name, role, device

    def start(self, method: str, parts: Sequence[Any] | None = None, **shared: Any) -> "Done":
        own = () if parts is None else (parts[0],)
        return Done(f"{self.name}.{method}", [getattr(self.role, method)(*own, **shared)])

    def each(self, method: str, values: Sequence[Any]) -> list[Any]:
        return self.call(method, values)

    def meet_again(self) -> bool:
        self.device.release_memory()
        return False


class Done:
    """What was done at once, in this process."""

    def __init__(self, name: str, results: list[Any]):
        self.name, self._results = name, results

    def wait(self, seconds: float | None = None) -> list[Any]:
        return self._results

    def found(self, seconds: float) -> list[Any]:
        return self._results
