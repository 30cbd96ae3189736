"""The state of an episode in an environment: its token sequences, its record, and what it waits for."""

import time
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from trimtab.envs.chat_tokens import ChatTokens
from trimtab.envs.types import Message, Task
from trimtab.rollout.episode import Episode, Segment
from trimtab.rollout.trajectory import Finish, Trajectory

COUNTERS = ("tool_calls", "tool_failures", "unknown_tools", "seconds_environment")


class EpisodePhase(Enum):
    """What an episode waits for."""

    RESETTING = auto()  # the environment's first observation
    REPLAYING = auto()  # a new instance, to be where the last one was
    GENERATING = auto()  # the engine
    STEPPING = auto()  # the environment's observation
    ENDING = auto()  # the reward of the whole episode


@dataclass(frozen=True)
class EpisodeSnapshot:
    """An episode's data at one moment. Replaced as a whole, because other threads read it."""

    trajectories: tuple[Trajectory, ...] = ()
    said: tuple[Segment, ...] = ()
    request: int | None = None  # of the engine's session, that generates the next turn
    part: Trajectory | None = None  # of the next turn, from which the engine resumes

    @property
    def turns(self) -> int:
        return sum([said.drawn for said in self.said])


@dataclass
class EpisodeState:
    number: int  # identifies the environment instance
    request: int
    seed: int  # of this sample
    task: Task
    prompt_ids: list[int]  # the row's
    limit: int  # of a turn
    now: EpisodeSnapshot = field(default_factory=EpisodeSnapshot)
    phase: EpisodePhase = EpisodePhase.RESETTING
    finish: Finish | None = None  # once it is known
    opening: list[Message] | None = None  # what reset returned
    chat: ChatTokens | None = None  # once its tools are known
    next_sampling: dict[str, Any] | None = None  # that the environment asks for in the next turn
    replayed: int = 0  # entries of the record that the new instance has seen
    begun: int = 1  # times from nothing
    failures: int = 0
    last_reward: float = 0.0
    logs: dict[str, float] = field(default_factory=dict)  # the environment's own
    counters: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0.0))
    last_tools: dict[str, float] = field(default_factory=dict)
    """What the last turn adds to the counters, once its observation is in the record: until then the turn may be
    replayed in another instance."""
    since: float = field(default_factory=time.monotonic)  # when the engine began the current turn

    @property
    def sample(self) -> int:
        return self.task.sample

    @property
    def trajectory(self) -> Trajectory:
        return self.now.trajectories[-1]

    def restore(self, partials: list[Trajectory]) -> None:
        """Restore the state from partials, one for each of its sequences in order. The environment must be replayed."""
        record = partials[0].episode
        if record is None:
            return
        self.begun = record.begun
        if not record.said and not len(partials[0].tokens):  # it has not begun
            return
        self.opening = record.opening
        self.counters = {name: record.logs.get(name, 0.0) for name in COUNTERS}
        self.logs = {name: value for name, value in record.logs.items() if name not in COUNTERS}
        # Each has the row's prompt until the environment's reset gives its own.
        trajectories = tuple(
            replace(partial, prompt_ids=self.prompt_ids, drawn=partial.mask, episode=None) for partial in partials
        )
        last = len(trajectories) - 1
        end = max((said.end for said in record.said if said.branch == last), default=0)
        trajectory, part = trajectories[-1], None
        if (more := len(trajectory.tokens) - end) > 0:
            log_probs, versions = trajectory.log_probs, trajectory.versions
            part = Trajectory(0, 0, [], trajectory.tokens[end:], log_probs[-more:], versions=versions[-more:])
            cut = replace(trajectory, tokens=trajectory.tokens[:end], drawn=trajectory.mask[:end])
            trajectories = (*trajectories[:-1], replace(cut, log_probs=log_probs[:-more], versions=versions[:-more]))
        self.now = EpisodeSnapshot(trajectories, tuple(record.said), part=part)

    def clear(self) -> None:
        """Begin from nothing."""
        self.now, self.finish, self.next_sampling, self.opening = EpisodeSnapshot(), None, None, None
        self.phase, self.replayed, self.last_reward, self.logs = EpisodePhase.RESETTING, 0, 0.0, {}
        self.counters, self.last_tools = dict.fromkeys(COUNTERS, 0.0), {}
        self.begun += 1

    def add(self, said: Segment, trajectories: tuple[Trajectory, ...]) -> None:
        self.now = EpisodeSnapshot(trajectories, (*self.now.said, said))

    def set_reward(self, reward: float) -> None:
        """Set the reward of the last turn."""
        *before, turn = self.now.said
        assert turn.drawn, "an environment rewards turns of the model"
        self.now = replace(self.now, said=(*before, replace(turn, reward=reward)))

    def conversation(self, count: int | None = None) -> list[Message]:
        """All messages so far, or those of the first `count` entries of the record."""
        first = self.task.asked if self.opening is None else self.opening
        return [*first, *(message for said in self.now.said[:count] for message in said.messages)]

    def count_tools(self) -> None:
        for name, more in self.last_tools.items():
            self.counters[name] += more
        self.last_tools = {}

    # ---- what callers get

    def record(self, problem: str | None = None, now: EpisodeSnapshot | None = None) -> Episode:
        now = now or self.now
        return Episode(
            list(now.said), self.opening, self.last_reward, {**self.logs, **self.counters}, self.begun, problem
        )

    def partials(self, part: Trajectory | None, now: EpisodeSnapshot | None = None) -> list[Trajectory]:
        """The episode so far, with the part of the current turn that is generated."""
        now = now or self.now
        if not now.trajectories:
            return [Trajectory.empty(self.sample)]
        episode, trajectories = self.record(now=now), now.trajectories
        part = now.part if part is None else part
        if part is not None:
            trajectories = (*trajectories[:-1], trajectories[-1].with_turn(part))
        return [
            Trajectory(
                *(0, self.sample, [], s.tokens, s.log_probs),
                versions=s.versions,
                drawn=s.mask,
                episode=episode,
                branch=branch,
            )
            for branch, s in enumerate(trajectories)
        ]

    def rollouts(self, finish: Finish, episode: Episode, plain: bool = False) -> list[Trajectory]:
        """One rollout for each of its sequences."""
        trajectories = self.now.trajectories if finish != "failed" else ()
        if finish == "abort" and self.now.part is not None:
            trajectories = (*trajectories[:-1], trajectories[-1].with_turn(self.now.part))
        return [
            replace(
                s,
                prompt=self.request,
                sample=self.sample,
                finish=finish,
                plain_log_probs=s.plain_log_probs if plain else None,
                drawn=s.mask,
                episode=episode,
                branch=branch,
            )
            for branch, s in enumerate(trajectories or [Trajectory.empty(self.sample, self.prompt_ids)])
        ]
