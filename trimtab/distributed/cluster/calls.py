"""Groups of roles on Ray. What travels is packed as between any processes (wire.py), and handed over by Ray."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
import torch

from trimtab.distributed.cluster.crew import Crew
from trimtab.distributed.cluster.losses import EngineLost
from trimtab.distributed.cluster.member import Member
from trimtab.distributed.cluster.worker import DONE, MISTAKE, NO_ROOM
from trimtab.distributed.roles import Group
from trimtab.distributed.wire import Wire
from trimtab.errors import OutOfMemory, RunFailed, UserError

ENGINE_DIED = "EngineDead"  # how vLLM calls it when a process of its own has gone
LARGE = 2**16  # bytes; what all are told alike is put into Ray's memory once


class RayGroup(Group):
    def __init__(self, crew: Crew, wire: Wire, name: str, members: Sequence[Member], parts: Sequence[int]):
        """`parts`: which part of a call each member gets."""
        self.name, self.members = name, members
        self.ranks = [member.rank for member in members]
        self.size = max(parts) + 1
        self._crew, self._wire, self._parts = crew, wire, parts

    def start(self, method: str, parts: Sequence[Any] | None = None, **shared: Any) -> "RayCall":
        assert parts is None or len(parts) == self.size
        settings: Any = self._wire.pack(shared).numpy()
        if settings.nbytes > LARGE and len(self.members) > 1:
            settings = ray.put(settings)
        asked = []
        for member, part in zip(self.members, self._parts, strict=True):
            own = self._wire.pack([self.name, method, None if parts is None else (parts[part],)]).numpy()
            asked.append((member, member.handle.perform.remote(own, settings)))
        # One of those that got a part tells its result; without parts all do.
        told = self.ranks if parts is None else [self.ranks[self._parts.index(part)] for part in range(self.size)]
        return RayCall(self._crew, self._wire, f"{self.name}.{method}", asked, told)

    def meet_again(self) -> bool:
        """All processes of the world do, also those of other groups."""
        world = self._crew.members[: self._crew.world_size]
        self._crew.call("meet_again", seconds=self._crew.hang_timeout, members=world)
        return self._crew.world_size > 1


class EngineGroup(RayGroup):
    """Of processes that compute alone, each of which another can stand in for."""

    def __init__(self, *parts: Any, stand_in: Callable[[EngineLost], None]):
        super().__init__(*parts)
        self._stand_in = stand_in

    def stand_in(self, lost: Exception) -> None:
        assert isinstance(lost, EngineLost)
        self._stand_in(lost)


class RayCall:
    def __init__(self, crew: Crew, wire: Wire, name: str, asked: list[tuple[Member, Any]], told: Sequence[int]):
        self.name = name
        self._crew, self._wire, self._asked, self._told = crew, wire, asked, told
        self._results: dict[int, Any] = {}
        self._shortage: str | None = None

    def wait(self, seconds: float | None = None) -> list[Any]:
        if self._crew.wait(self._asked, self._take, seconds):
            late = next(member for member, _ in self._asked if member.rank not in self._results)
            raise RunFailed(f"{self.name}: {late} has not answered for {seconds} s")
        if self._shortage is not None:  # now that none is in the middle of anything
            raise OutOfMemory(self._shortage)
        return [self._results[rank] for rank in self._told]

    def _take(self, member: Member, answer: tuple[str, Any]) -> None:
        kind, content = answer
        self._results[member.rank] = None
        if kind == DONE:
            self._results[member.rank] = self._wire.unpack(torch.from_numpy(np.array(content)))
        elif kind == NO_ROOM:
            self._shortage = content
        elif kind == MISTAKE:
            raise UserError(content)
        elif member.engine and ENGINE_DIED in content:
            raise member.lost(f"was lost: {content}")
        else:
            self._crew.blame_somebody(member, f"{self.name}: {content}")
