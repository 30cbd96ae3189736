"""A process of a run on Ray, as the controller knows it: by its roles, rank and machine."""

from dataclasses import dataclass
from typing import Any

from trimtab.distributed.cluster.losses import EngineLost, Lost


@dataclass
class Member:
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

    def lost(self, why: str) -> Lost:
        return EngineLost(f"{self} {why}", self.rank) if self.engine else Lost(f"{self} {why}")
