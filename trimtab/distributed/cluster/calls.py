"""Groups of roles on Ray. Messages are serialized as between any processes, and Ray transports them."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray

from trimtab.distributed.cluster.crew import Crew
from trimtab.distributed.cluster.losses import EngineLost
from trimtab.distributed.cluster.member import Member
from trimtab.distributed.cluster.worker import DONE, MISTAKE, NO_ROOM
from trimtab.distributed.roles import Group, Processes, Unanswered
from trimtab.distributed.serialization import Serializer
from trimtab.errors import OutOfMemory, RunFailed, UserError

ENGINE_DIED = "EngineDead"  # how vLLM calls it when a process of its own has gone
LARGE = 2**16  # bytes; what all are told alike is put into Ray's memory once


class RayGroup(Group):
    def __init__(
        self,
        crew: Crew,
        serializer: Serializer,
        name: str,
        members: Sequence[Member],
        processes: Processes | None = None,
    ):
        """`processes`: which part of a call each member gets, if not one of its own."""
        self.name, self.members = name, members
        self.processes = processes or Processes.apart([member.rank for member in members])
        self.size = self.processes.size
        self._crew, self._serializer = crew, serializer

    def start(self, method: str, parts: Sequence[Any] | None = None, **shared: Any) -> "RayCall":
        if parts is None:
            return self._ask(method, [None] * len(self.members), self.ranks, shared)
        assert len(parts) == self.size
        own = [(parts[part],) for part in self.processes.parts]
        return self._ask(method, own, self.processes.telling, shared)

    def each(self, method: str, values: Sequence[Any]) -> list[Any]:
        return self._ask(method, [(value,) for value in values], self.ranks, {}).wait()

    def _ask(
        self, method: str, values: Sequence[tuple | None], told: Sequence[int], shared: dict[str, Any]
    ) -> "RayCall":
        """`told`: whose results are handed out."""
        settings: Any = np.frombuffer(self._serializer.pack(shared), dtype=np.uint8)
        if settings.nbytes > LARGE and len(self.members) > 1:
            settings = ray.put(settings)
        asked = []
        for member, value in zip(self.members, values, strict=True):
            own = np.frombuffer(self._serializer.pack([self.name, method, value]), dtype=np.uint8)
            asked.append((member, member.handle.perform.remote(own, settings)))
        return RayCall(self._crew, self._serializer, f"{self.name}.{method}", asked, told)

    def meet_again(self) -> bool:
        """All processes of the world do, also those of other groups."""
        world = self._crew.members[: self._crew.world_size]
        self._crew.call("meet_again", seconds=self._crew.hang_timeout, members=world)
        return self._crew.world_size > 1


class EngineGroup(RayGroup):
    apart = True

    def __init__(self, *parts: Any, stand_in: Callable[[EngineLost], None]):
        super().__init__(*parts)
        self._stand_in = stand_in

    def stand_in(self, lost: Exception) -> None:
        assert isinstance(lost, EngineLost)
        self._stand_in(lost)


class RayCall:
    def __init__(
        self, crew: Crew, serializer: Serializer, name: str, asked: list[tuple[Member, Any]], told: Sequence[int]
    ):
        self.name = name
        self._crew, self._serializer, self._asked, self._told = crew, serializer, asked, told
        self._results: dict[int, Any] = {}
        self._shortage: str | None = None

    def wait(self, seconds: float | None = None) -> list[Any]:
        if self._crew.wait(self._asked, self._take, seconds):
            late = next(member for member, _ in self._asked if member.rank not in self._results)
            raise RunFailed(f"{self.name}: {late} has not answered for {seconds} s")
        if self._shortage is not None:  # now that none is in the middle of anything
            raise OutOfMemory(self._shortage)
        return [self._results[rank] for rank in self._told]

    def found(self, seconds: float) -> list[Any]:
        deadline = time.monotonic() + seconds
        while waiting := [(member, asked) for member, asked in self._asked if member.rank not in self._results]:
            try:
                self._crew.wait(waiting, self._take, max(0.0, deadline - time.monotonic()))
                break
            except EngineLost as lost:
                self._results[lost.rank] = lost
        if self._shortage is not None:
            raise OutOfMemory(self._shortage)
        return [self._results.get(rank, Unanswered()) for rank in self._told]

    def _take(self, member: Member, answer: tuple[str, Any]) -> None:
        kind, content = answer
        self._results[member.rank] = None
        if kind == DONE:
            self._results[member.rank] = self._serializer.unpack(np.array(content))
        elif kind == NO_ROOM:
            self._shortage = content
        elif kind == MISTAKE:
            raise UserError(content)
        elif member.engine and ENGINE_DIED in content:
            raise member.lost(f"was lost: {content}")
        else:
            self._crew.blame_somebody(member, f"{self.name}: {content}")
