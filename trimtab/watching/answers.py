"""The best and the worst answers of an iteration, and where among them a person is."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Any

from trimtab.report.numbers import plain
from trimtab.report.read import Run
from trimtab.report.rollouts import best_and_worst


@dataclass(frozen=True)
class Answer:
    kind: str
    """best or worst."""
    number: int
    """Among those of its kind, from 1."""
    of: int
    step: int
    row: dict[str, Any]


class Shelf:
    """The answers of a run, one of which is looked at. Whoever has not gone back sees the newest."""

    def __init__(self) -> None:
        self.step: int | None = None
        """Whose answers are shown; None: the newest iteration's, whichever that is."""
        self.place = 0
        self._steps: list[int] = []
        self._rows: list[dict[str, Any]] = []

    def fill(self, run: Run) -> None:
        # Those of the iteration that is about to have its row may not be written all.
        done = run.rows[-1]["step"] if run.rows else 0
        self._rows = [row for row in run.rollouts if row["step"] <= done and row.get("kept") in ("best", "worst")]
        self._steps = sorted({row["step"] for row in self._rows})
        if self.step not in self._steps:
            self.step = None

    def shown(self) -> Answer | None:
        answers = self._answers()
        if not answers:
            return None
        self.place = max(0, min(self.place, len(answers) - 1))
        return answers[self.place]

    def other(self) -> Answer | None:
        """To compare with: the very worst of the iteration beside one of the best, and the other way round."""
        shown = self.shown()
        return next((answer for answer in self._answers() if shown and answer.kind != shown.kind), None)

    def turn(self, by: int) -> None:
        """To the next answer of this iteration, or the one before; round and round."""
        if answers := self._answers():
            self.place = (self.place + by) % len(answers)

    def jump(self, kind: str) -> None:
        """To the very best or the very worst."""
        self.place = next((place for place, answer in enumerate(self._answers()) if answer.kind == kind), self.place)

    def go(self, by: int) -> None:
        """To an earlier or later iteration; past the last one, to whatever is the newest."""
        if not self._steps:
            return
        here = len(self._steps) - 1 if self.step is None else self._steps.index(self.step)
        there = max(0, here + by)
        self.step = self._steps[there] if there < len(self._steps) - 1 else None

    def _answers(self) -> list[Answer]:
        if not self._steps:
            return []
        step = self._steps[-1] if self.step is None else self.step
        kinds = best_and_worst([row for row in self._rows if row["step"] == step])
        return [
            Answer(kind, number, len(rows), step, row)
            for kind, rows in zip(("best", "worst"), kinds)
            for number, row in enumerate(rows, start=1)
        ]


def harmless(text: Any) -> str:
    """What a model or a file said, without what would steer a terminal."""
    return "".join(map(_harmless, plain(text).replace("\t", "    ")))


def _harmless(letter: str) -> str:
    kind = unicodedata.category(letter)
    if letter in "\n\N{ZERO WIDTH JOINER}" or kind not in ("Cc", "Cf", "Cs", "Co"):
        return letter
    if ord(letter) < 32:
        return chr(0x2400 + ord(letter))  # the picture of a control character
    return "" if kind == "Cf" else "\N{REPLACEMENT CHARACTER}"
