"""What travels between the loop, which decides what is written, and the processes that write it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from trimtab.rewards.requests import PromptBatch
from trimtab.rewards.types import RewardResult
from trimtab.rollout.trajectory import Trajectory
from trimtab.train.rl.experience import Experience


@dataclass
class Failed:
    """Prompts whose groups are left out: an environment failed in them, retries and all. No score is made up."""

    prompts: list[int] = field(default_factory=list)  # which of those that were asked for
    words: list[str] = field(default_factory=list)  # the environment's, one of each group's
    episodes: int = 0  # that failed

    @classmethod
    def of(cls, rollouts: Iterable[Trajectory]) -> "Failed":
        found: dict[int, str] = {}
        episodes = 0
        for rollout in rollouts:
            assert rollout.episode is not None, "an environment was played"
            if rollout.episode.problem is not None:  # else it was given up for another one of its group
                found.setdefault(rollout.prompt, rollout.episode.problem)
                episodes += 1
        return cls(list(found), list(found.values()), episodes)


@dataclass
class Answers:
    """All answers to some prompts, in order, and what each reward says of them."""

    experience: Experience
    results: list[RewardResult]


@dataclass
class Replied:
    """What became of prompts that were asked for at once."""

    answers: Answers | None  # None: all groups have failed
    failed: Failed = field(default_factory=Failed)


@dataclass
class UnderWay:
    """The answers to one prompt, which may outlive an update: a group that is not trained yet, nor whole."""

    place: int  # in the order of the prompts
    version: int  # of the weights when it was admitted: the iterations done by then
    row: int  # of the prompt data
    seed: int
    trajectories: list[Trajectory] = field(default_factory=list)  # of its samples; empty: not begun


@dataclass
class Admission:
    """Groups that a process is to write, and the question of each."""

    groups: list[UnderWay]
    questions: PromptBatch


@dataclass
class Written:
    """A group whose answers have all ended, and were judged by the rewards that are near the engine."""

    place: int
    answers: Answers


@dataclass
class LeftOut:
    """A group in which an environment failed, retries and all."""

    place: int
    words: str  # the environment's
    episodes: int  # that failed


@dataclass
class Collected:
    """What one process has done since it was asked last."""

    written: list[Written]
    drawn: int  # tokens
    read_again: int  # tokens of partial rollouts that other weights had to read
    seconds: float  # in which the engine was at work
    left_out: list[LeftOut] = field(default_factory=list)


@dataclass
class Wait:
    """What one answer of a group is waiting for."""

    place: int
    sample: int
    what: str
    tokens: int  # that it has so far
    seconds: float  # for which it has waited
