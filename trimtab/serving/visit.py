"""An agent's episode: a program that asks a server for turns, and the record of what it was given."""

from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np

from trimtab.envs.types import Task
from trimtab.rollout.episode import Episode, Said
from trimtab.rollout.types import Draft, Finish, Rollout
from trimtab.serving.records import Record, RecordedTurn, ends_of


@dataclass(frozen=True)
class Sequence:
    """One branch: tokens behind a prompt. A turn that several branches have is drawn in the first of them alone."""

    prompt_ids: list[int]
    tokens: np.ndarray
    drawn: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    plain_log_probs: np.ndarray | None


@dataclass
class Visit:
    number: int  # of the agent's instance
    request: int
    seed: int  # of this sample
    task: Task
    prompt_ids: list[int]  # the row's
    session: str
    record: Record
    begun: int = 1
    failures: int = 0
    reward: float = 0.0
    logs: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def sample(self) -> int:
        return self.task.sample

    def tokens(self) -> int:
        return sum(len(turn.rollout.tokens) for turn in list(self.record.turns))

    def rollouts(self, finish: Finish, problem: str | None = None) -> list[Rollout]:
        """One for each branch, with the episode's record."""
        turns = list(self.record.turns)  # the server's thread may be about to add one
        episode = self._episode(turns, problem)
        sequences = [] if finish == "failed" else _sequences(turns)
        return [
            Rollout(
                *(self.request, self.sample, s.prompt_ids, s.tokens, s.log_probs, finish),
                *(s.plain_log_probs, s.versions, s.drawn, episode, branch),
            )
            for branch, s in enumerate(sequences or [_nothing(self.prompt_ids)])
        ]

    def drafts(self) -> list[Draft]:
        turns = list(self.record.turns)
        episode = self._episode(turns)
        return [
            Draft(self.sample, s.tokens, s.log_probs, s.versions, None, s.drawn, episode, branch)
            for branch, s in enumerate(_sequences(turns))
        ] or [Draft.empty(self.sample)]

    def _episode(self, turns: list[RecordedTurn], problem: str | None = None) -> Episode:
        calls = sum(len(turn.message.get("tool_calls", ())) for turn in turns)
        figures = {"tool_calls": float(calls), "tool_failures": 0.0, "unknown_tools": 0.0}
        logs = {**self.logs, **figures, "seconds_environment": self.seconds}
        return Episode(_said(turns), None, self.reward, logs, self.begun, problem)

    def first_sequence(self) -> Sequence | None:
        return next(iter(_sequences(list(self.record.turns))), None)


def _said(turns: list[RecordedTurn]) -> list[Said]:
    """Every turn once, as they were drawn, each in the branch that has it as drawn, with what was read before."""
    found: list[tuple[int, Said]] = []
    known: set[int] = set()
    for branch, end in enumerate(ends_of(turns)):
        place = 0
        for number, turn in enumerate(end.path):
            start = place + (len(turn.read) if number else 0)
            if turn.number not in known:
                if number and len(turn.read):
                    read = Said(turn.said, place, start, False, _words(turn.said), branch=branch)
                    found.append((turn.number, read))
                stop = start + len(turn.rollout.tokens)
                text = turn.message.get("content") or ""
                said = Said([turn.message], start, stop, True, text, turn.rollout.finish, branch=branch)
                found.append((turn.number, said))
                known.add(turn.number)
            place = start + len(turn.rollout.tokens)
    return [said for _, said in sorted(found, key=itemgetter(0))]


def _sequences(turns: list[RecordedTurn]) -> list[Sequence]:
    known: set[int] = set()
    return [_sequence(end.path, known) for end in ends_of(turns)]


def _sequence(path: list[RecordedTurn], known: set[int]) -> Sequence:
    """`known`: turns that earlier branches have drawn; those of this one are added."""
    tokens: list[np.ndarray] = []
    drawn: list[np.ndarray] = []
    fresh: list[Rollout] = []
    for number, turn in enumerate(path):
        read = turn.read if number else turn.read[:0]
        own = turn.number not in known
        known.add(turn.number)
        fresh += [turn.rollout] if own else []
        tokens += [read, turn.rollout.tokens]
        drawn += [np.zeros(len(read), dtype=bool), np.full(len(turn.rollout.tokens), own)]
    plain = [rollout.plain_log_probs for rollout in fresh if rollout.plain_log_probs is not None]
    versions = [rollout.versions for rollout in fresh if rollout.versions is not None]
    assert len(versions) == len(fresh), "every engine says which weights drew"
    return Sequence(
        path[0].read.tolist(),
        np.concatenate(tokens),
        np.concatenate(drawn),
        np.concatenate([rollout.log_probs for rollout in fresh]),
        np.concatenate(versions),
        np.concatenate(plain) if plain else None,
    )


def _nothing(prompt_ids: list[int]) -> Sequence:
    ints = np.zeros(0, dtype=np.int32)
    return Sequence(prompt_ids, ints, ints.astype(bool), ints.astype(np.float32), ints, None)


def _words(messages: list[dict]) -> str:
    return "\n".join(message.get("content") or "" for message in messages)
