"""How endpoints have turns drawn: at a desk of this process, or of another one (front.py)."""

import asyncio
import itertools
from dataclasses import dataclass
from typing import Protocol

from trimtab.rollout.seeds import request_seed
from trimtab.rollout.types import Rollout, Sampling
from trimtab.serving.desk import Ask, Desk
from trimtab.serving.seeds import stream_seed


@dataclass(frozen=True)
class Turn:
    """What is wanted behind one prompt."""

    prompt_ids: list[int]
    sampling: Sampling
    answers: int = 1
    session: str | None = None
    seed: int | None = None  # None: one that nobody else draws from
    number: int = 0  # of the prompt in its request


class Drawing(Protocol):
    @property
    def most_waiting(self) -> int:
        """Answers at once; whoever asks beyond them is turned away."""

    @property
    def waiting(self) -> int:
        """Answers that were asked for and are not there yet."""

    @property
    def closed(self) -> bool:
        """Whether nothing is drawn any more."""

    async def draw(self, turn: Turn) -> list[Rollout]: ...

    def close(self, error: Exception) -> None:
        """Whoever still waits gets this, and whoever comes later."""


class DrawingHere:
    """At a desk of this process."""

    def __init__(self, desk: Desk, seed: int):
        """`seed`: from which turns draw that have none."""
        self.desk, self.seed = desk, seed
        self.most_waiting = desk.most_waiting
        self._numbers = itertools.count()

    @property
    def waiting(self) -> int:
        return self.desk.waiting

    @property
    def closed(self) -> bool:
        return self.desk.closed

    def close(self, error: Exception) -> None:
        self.desk.close(error)

    def asks(self, turn: Turn) -> list[Ask]:
        """One for each answer."""
        if (seed := turn.seed) is None:
            seed = stream_seed(self.seed, turn.session, next(self._numbers))
        seed = request_seed(seed, turn.number) if turn.number else seed
        seeds = [seed, *(request_seed(seed, answer) for answer in range(1, turn.answers))]
        return [Ask(turn.prompt_ids, own, turn.sampling, turn.session) for own in seeds]

    async def draw(self, turn: Turn) -> list[Rollout]:
        asks = self.asks(turn)
        try:
            self.desk.ask(*asks)
            return list(await asyncio.gather(*(asyncio.wrap_future(ask.answer) for ask in asks)))
        finally:
            for ask in asks:
                ask.answer.cancel()
