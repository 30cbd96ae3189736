"""What was drawn in each session: exact tokens, for clients that speak in messages, and a trace for who asks.

A turn stands behind the one that it goes on from, and keeps only what came since: the tokens that were read, and those
that it drew. Turns that no other goes on from are the ends of branches.
"""

import hashlib
import secrets
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from trimtab.envs.types import Message
from trimtab.rollout.seeds import request_seed
from trimtab.rollout.types import Finish, Rollout, Sampling
from trimtab.serving.refusals import NotUnderstood
from trimtab.serving.seeds import stream_seed

MOST_TOKENS = 2**24  # of all sessions; each takes twelve bytes
TURN = 128  # tokens that have the size of what a turn has besides


@dataclass(eq=False)
class RecordedTurn:
    number: int
    before: "RecordedTurn | None"
    read: np.ndarray  # int32: between the turn before, or the beginning, and what it drew
    rollout: Rollout
    ended: bool  # its last token is one that ends turns
    message: Message
    said: list[Message] = field(default_factory=list)  # what was read, where the client spoke in messages

    @property
    def ids(self) -> list[int]:
        """Everything up to its end."""
        parts: list[np.ndarray] = []
        turn: RecordedTurn | None = self
        while turn is not None:
            parts += [turn.rollout.tokens, turn.read]
            turn = turn.before
        return np.concatenate(parts[::-1]).tolist()

    @cached_property
    def length(self) -> int:
        """Of everything up to its end."""
        before = 0 if self.before is None else self.before.length
        return before + len(self.read) + len(self.rollout.tokens)

    @cached_property
    def digest(self) -> "hashlib.blake2b":
        """The same, so that it is known again without a look at every token."""
        found = _digest() if self.before is None else self.before.digest.copy()
        found.update(self.read.tobytes())
        found.update(self.rollout.tokens.tobytes())
        return found

    @property
    def held(self) -> int:
        return len(self.read) + len(self.rollout.tokens) + TURN

    @property
    def path(self) -> "list[RecordedTurn]":
        """The turns up to it, the first one first."""
        path: list[RecordedTurn] = []
        turn: RecordedTurn | None = self
        while turn is not None:
            path.append(turn)
            turn = turn.before
        return path[::-1]

    def trace(self) -> dict[str, Any]:
        versions = self.rollout.versions
        return {
            "turn": self.number,
            "after": None if self.before is None else self.before.number,
            "read_token_ids": self.read.tolist(),
            "token_ids": self.rollout.tokens.tolist(),
            "logprobs": self.rollout.log_probs.tolist(),
            "versions": [] if versions is None else versions.tolist(),
            "finish_reason": self.rollout.finish,
            "message": self.message,
        }


class Record:
    """Of one session."""

    def __init__(self, seed: int | None = None, most_turns: int | None = None, pinned: Sampling | None = None) -> None:
        """`seed`: from which its turns draw, whatever requests say; `most_turns`: whoever asks for more is refused;
        `pinned`: how all its turns are drawn, while others may be drawn otherwise."""
        self.seed, self.most_turns, self.pinned = seed, most_turns, pinned
        self.refused: Finish | None = None  # why the last turn that was asked for was, if it was
        self._asked: Counter[int] = Counter()  # turns, by what stood before them
        self.turns: list[RecordedTurn] = []
        self.held = 0  # tokens, and as many as a turn takes besides
        self._by_history: dict[bytes, RecordedTurn] = {}
        self._by_tokens: dict[int, dict[bytes, RecordedTurn]] = {}  # by their number first

    def next_seed(self, length: int) -> int | None:
        """Of a turn before which so many tokens stand: by its place alone, and another one if it is asked for again."""
        if self.seed is None:
            return None
        self._asked[length] += 1
        return request_seed(stream_seed(self.seed, None, length), self._asked[length] - 1)

    def said_before(self, keys: Sequence[bytes]) -> tuple[int, RecordedTurn] | None:
        """The latest turn that a conversation of these beginnings has had here, and how many messages end with it."""
        for count in range(len(keys) - 1, 0, -1):
            if (turn := self._by_history.get(keys[count])) is not None:
                return count, turn
        return None

    def read_before(self, prompt_ids: list[int]) -> RecordedTurn | None:
        """The longest turn whose tokens these go on from."""
        ids, best, digest, read = np.array(prompt_ids, dtype=np.int32), None, _digest(), 0
        for length in sorted(length for length in self._by_tokens if length <= len(ids)):
            digest.update(ids[read:length].tobytes())
            read = length
            best = self._by_tokens[length].get(digest.digest(), best)
        return best

    def add(
        self,
        rollout: Rollout,
        before: RecordedTurn | None,
        message: Message,
        *,
        ended: bool,
        said: list[Message] | None = None,
        key: bytes | None = None,
    ) -> RecordedTurn:
        """`key`: of the history with this turn at its end."""
        known = 0 if before is None else before.length
        read = np.array(rollout.prompt_ids[known:], dtype=np.int32)
        kept = replace(rollout, prompt_ids=[], alternatives=None)  # what came before is in the record already
        turn = RecordedTurn(len(self.turns), before, read, kept, ended, message, said or [])
        self.turns.append(turn)
        self._by_tokens.setdefault(turn.length, {}).setdefault(turn.digest.digest(), turn)
        self.held += turn.held
        if key is not None:
            self._by_history[key] = turn
        return turn

    @property
    def ends(self) -> list[RecordedTurn]:
        return ends_of(self.turns)

    def trace(self) -> dict[str, Any]:
        branches = [[turn.number for turn in end.path] for end in self.ends]
        return {"turns": [turn.trace() for turn in self.turns], "branches": branches}


def ends_of(turns: Sequence[RecordedTurn]) -> list[RecordedTurn]:
    """The last turns of their branches, in the order in which they were drawn."""
    gone_on = {id(turn.before) for turn in turns}
    return [turn for turn in turns if id(turn) not in gone_on]


def _digest() -> "hashlib.blake2b":
    return hashlib.blake2b(digest_size=16)


class Records:
    """Of all sessions. When they hold too much, those are forgotten that were quiet for the longest."""

    def __init__(self, most_tokens: int = MOST_TOKENS, *, invited: bool = False, private: bool = False):
        """`invited`: only sessions that were opened here may be named, and every request names one; `private`: only
        names that `issue` gave."""
        self.most_tokens, self.held, self.invited, self.private = most_tokens, 0, invited, private
        self._records: OrderedDict[str, Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def find(self, session: str) -> Record | None:
        return self._records.get(session)

    def of(self, session: str | None) -> Record | None:
        """A new one for a session that nobody knows; None: nobody keeps one."""
        if self.invited and (session is None or session not in self._records):
            raise NotUnderstood("there is no such episode, or it is over", "session", status=404)
        if session is None:
            return None
        if self.private and session not in self._records:
            words = "this server names sessions itself: POST /sessions gives a name, until it is long unused"
            raise NotUnderstood(words, "session", status=404)
        record = self._records.setdefault(session, Record())
        self._records.move_to_end(session)
        return record

    def open(self, session: str, record: Record) -> None:
        self._records[session] = record

    def issue(self) -> str:
        """Open a session under a name that nobody can guess."""
        name, record = secrets.token_urlsafe(24), Record()
        record.held = TURN  # so that there is a limit to sessions without turns, too
        self.open(name, record)
        self.held += record.held
        self._make_room()
        return name

    def forget(self, session: str) -> None:
        if (record := self._records.pop(session, None)) is not None:
            self.held -= record.held

    def grown(self, session: str, turn: RecordedTurn) -> None:
        """A turn was added to this session's record, which may have been forgotten meanwhile."""
        record = self._records.get(session)
        if record is None or turn.number >= len(record.turns) or record.turns[turn.number] is not turn:
            return
        self.held += turn.held
        self._make_room()

    def _make_room(self) -> None:
        while self.held > self.most_tokens and not self.invited:
            self.forget(next(iter(self._records)))
