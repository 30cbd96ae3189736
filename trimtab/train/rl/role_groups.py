"""Whom the loop speaks to."""

from dataclasses import dataclass

from trimtab.distributed.launcher import Group


@dataclass
class Roles:
    actor: Group
    rollouts: Group
    reference: Group | None = None
    teacher: Group | None = None
    critic: Group | None = None
    reward: Group | None = None  # the reward models
