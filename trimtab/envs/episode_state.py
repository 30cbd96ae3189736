"""The state of an episode in an environment: its token sequences, its record, and what it waits for."""

import time
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

import numpy as np

from trimtab.envs.chat_tokens import ChatTokens
from trimtab.envs.types import Message, Task
from trimtab.rollout.episode import Episode, Said
from trimtab.rollout.trajectory import Draft, Finish, Rollout

COUNTERS = ("tool_calls", "tool_failures", "unknown_tools", "seconds_environment")


class EpisodePhase(Enum):
    """What an episode waits for."""

    RESETTING = auto()  # the environment's first observation
    REPLAYING = auto()  # a new instance, to be where the last one was
    GENERATING = auto()  # the engine
    STEPPING = auto()  # the environment's observation
    ENDING = auto()  # the reward of the whole episode


@dataclass(frozen=True)
class Strand:
    """A sequence of tokens: a prompt, and what the model generated and read after it. Immutable."""

    prompt_ids: list[int]
    tokens: np.ndarray
    drawn: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    plain_log_probs: np.ndarray

    @classmethod
    def of(cls, prompt_ids: list[int]) -> "Strand":
        ints, floats = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
        return cls(prompt_ids, ints, ints.astype(bool), floats, ints, floats)

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.tokens)

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.tokens.tolist()

    def read(self, ids: list[int]) -> "Strand":
        """Append tokens of an observation."""
        tokens = np.concatenate((self.tokens, np.array(ids, dtype=np.int32)))
        drawn = np.concatenate((self.drawn, np.zeros(len(ids), dtype=bool)))
        return Strand(self.prompt_ids, tokens, drawn, self.log_probs, self.versions, self.plain_log_probs)

    def wrote(self, turn: Draft, plain_log_probs: np.ndarray | None = None) -> "Strand":
        """Append a turn of the model, whole or partial."""
        plain = self.plain_log_probs
        return Strand(
            self.prompt_ids,
            np.concatenate((self.tokens, turn.tokens)),
            np.concatenate((self.drawn, np.ones(len(turn.tokens), dtype=bool))),
            np.concatenate((self.log_probs, turn.log_probs)),
            np.concatenate((self.versions, turn.versions)),
            plain if plain_log_probs is None else np.concatenate((plain, plain_log_probs)),
        )


@dataclass(frozen=True)
class EpisodeSnapshot:
    """An episode's data at one moment. Replaced as a whole, because other threads read it."""

    strands: tuple[Strand, ...] = ()
    said: tuple[Said, ...] = ()
    request: int | None = None  # of the engine's session, that generates the next turn
    part: Draft | None = None  # of the next turn, from which the engine resumes

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
    def strand(self) -> Strand:
        return self.now.strands[-1]

    def restore(self, drafts: list[Draft]) -> None:
        """Restore the state from drafts, one for each of its sequences in order. The environment must be replayed."""
        record = drafts[0].episode
        if record is None:
            return
        self.begun = record.begun
        if not record.said and not len(drafts[0].tokens):  # it has not begun
            return
        self.opening = record.opening
        self.counters = {name: record.logs.get(name, 0.0) for name in COUNTERS}
        self.logs = {name: value for name, value in record.logs.items() if name not in COUNTERS}
        strands = tuple(_strand(draft, self.prompt_ids) for draft in drafts)
        last = len(strands) - 1
        end = max((said.end for said in record.said if said.branch == last), default=0)
        strand, part = strands[-1], None
        if (more := len(strand.tokens) - end) > 0:
            log_probs, versions = strand.log_probs, strand.versions
            part = Draft(0, strand.tokens[end:], log_probs[-more:], versions[-more:])
            cut = replace(strand, tokens=strand.tokens[:end], drawn=strand.drawn[:end])
            strands = (*strands[:-1], replace(cut, log_probs=log_probs[:-more], versions=versions[:-more]))
        self.now = EpisodeSnapshot(strands, tuple(record.said), part=part)

    def clear(self) -> None:
        """Begin from nothing."""
        self.now, self.finish, self.next_sampling, self.opening = EpisodeSnapshot(), None, None, None
        self.phase, self.replayed, self.last_reward, self.logs = EpisodePhase.RESETTING, 0, 0.0, {}
        self.counters, self.last_tools = dict.fromkeys(COUNTERS, 0.0), {}
        self.begun += 1

    def add(self, said: Said, strands: tuple[Strand, ...]) -> None:
        self.now = EpisodeSnapshot(strands, (*self.now.said, said))

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

    def drafts(self, part: Draft | None, now: EpisodeSnapshot | None = None) -> list[Draft]:
        """The episode so far, with the part of the current turn that is generated."""
        now = now or self.now
        if not now.strands:
            return [Draft.empty(self.sample)]
        episode, strands = self.record(now=now), now.strands
        part = now.part if part is None else part
        if part is not None:
            strands = (*strands[:-1], strands[-1].wrote(part))
        return [
            Draft(self.sample, s.tokens, s.log_probs, s.versions, None, s.drawn, episode, branch)
            for branch, s in enumerate(strands)
        ]

    def rollouts(self, finish: Finish, episode: Episode, plain: bool = False) -> list[Rollout]:
        """One rollout for each of its sequences."""
        strands = self.now.strands if finish != "failed" else ()
        if finish == "abort" and self.now.part is not None:
            strands = (*strands[:-1], strands[-1].wrote(self.now.part))
        return [
            Rollout(
                *(self.request, self.sample, s.prompt_ids, s.tokens, s.log_probs, finish),
                s.plain_log_probs if plain else None,
                s.versions,
                s.drawn,
                episode,
                branch,
            )
            for branch, s in enumerate(strands or [Strand.of(self.prompt_ids)])
        ]


def _strand(draft: Draft, prompt_ids: list[int]) -> Strand:
    """A draft's sequence, with the row's prompt until the environment's reset gives its own."""
    drawn = np.ones(len(draft.tokens), dtype=bool) if draft.drawn is None else draft.drawn
    nothing = np.zeros(0, dtype=np.float32)
    return Strand(prompt_ids, draft.tokens, drawn, draft.log_probs, draft.versions, nothing)
