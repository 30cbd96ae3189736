"""The tokens of one answer, and what colours them: how sure the model was, what is reinforced, what carries loss."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from trimtab.report.numbers import short_number
from trimtab.report.read import finite

TOKENS = "tokens.jsonl"
BEGINNING = re.compile(rb'\{"step": (\d{1,15}), "answer": (\d{1,15}), ')
SURE = (-0.105, -0.51, -1.2, -2.3, -4.6)
"""Log-probs of 90, 60, 30, 10 and 1 percent: below each the colour is one stronger."""
STRENGTHS = (0.1, 0.4, 0.7)
"""Shares of an iteration's largest advantage, likewise."""


class TokenFile:
    """tokens.jsonl of a run, for several threads: where in it each answer is. What was read is not read again."""

    def __init__(self, folder: Path):
        self.path = folder / TOKENS
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._places: dict[tuple[int, int], int] = {}
        self._scales: dict[int, float] = {}
        self._end, self._inode = 0, -1

    def answer(self, step: int, number: int) -> str:
        """The tokens of an answer as HTML; nothing where they are not kept."""
        with self._lock:
            self._index()
            row = self._read(step, number)
            if row is None and (step, number) in self._places:  # another file has come in the place of this one
                self._forget()
                self._index()
                row = self._read(step, number)
            return "" if row is None else tokens(row, self._scale(step))

    def _scale(self, step: int) -> float:
        """The largest advantage of an iteration's answers, so that their colours can be compared."""
        if step not in self._scales:
            rows = [self._read(*key) for key in self._places if key[0] == step]
            sizes = [abs(value) for row in rows if row for value, _ in _runs(row.get("advantages"))]
            self._scales = {step: max(sizes, default=0.0)}
        return self._scales[step]

    def _index(self) -> None:
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._end:
                    self._forget()
                    self._inode = status.st_ino
                file.seek(self._end)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    if found := BEGINNING.match(line):
                        self._places[int(found[1]), int(found[2])] = self._end
                        self._scales.pop(int(found[1]), None)
                    self._end += len(line)
        except OSError:
            self._forget()

    def _read(self, step: int, number: int) -> dict[str, Any] | None:
        if (place := self._places.get((step, number))) is None:
            return None
        try:
            with self.path.open("rb") as file:
                file.seek(place)
                row = json.loads(file.readline())
        except (OSError, ValueError, RecursionError):
            return None
        return row if isinstance(row, dict) and (row.get("step"), row.get("answer")) == (step, number) else None


def tokens(row: dict[str, Any], scale: float) -> str:
    """An answer's tokens as spans, stretch by stretch; `scale`: the largest advantage."""
    texts = row.get("texts")
    texts = [str(text) for text in texts] if isinstance(texts, list) else []
    log_probs = iter(row["log_probs"] if isinstance(row.get("log_probs"), list) else ())
    advantages = (value for value, count in _runs(row.get("advantages")) for _ in range(count))
    gap, left_out = _gap(row.get("left_out"))
    body, place = "", 0
    for drawn, length in _stretches(row.get("drawn"), len(texts)):
        spans = ""
        for number in range(place, place + length):
            if number == gap:
                spans += f"<span class=gap> … {left_out:,} tokens are not kept … </span>"
            if drawn:
                spans += _drawn(texts[number], finite(next(log_probs, None)), next(advantages, None), scale)
            else:
                spans += f"<span class=world>{_shown(texts[number])}</span>"
        body += f'<li class="{"drawn" if drawn else "world"}"><pre>{spans}</pre></li>'
        place += length
    return f"<ol class=turns>{body}</ol>" if body else "<p class=nothing>No token was drawn.</p>"


def _drawn(text: str, log_prob: float | None, advantage: float | None, scale: float) -> str:
    classes, facts = ["drawn"], []
    if log_prob is not None:
        classes.append(f"p{sum(log_prob < edge for edge in SURE)}")
        facts.append(f"{log_prob:.3f}")
    if advantage is not None:
        if scale and (strength := sum(abs(advantage) >= share * scale for share in STRENGTHS)):
            classes.append(f"{'a' if advantage > 0 else 'b'}{strength}")
        facts.append(short_number(advantage))
    return f'<span class="{" ".join(classes)}" data-facts="{escape(" ".join(facts))}">{_shown(text)}</span>'


def _shown(text: str) -> str:
    """A line's end is a character that can be seen, and pointed at, too."""
    return escape(text).replace("\n", "<i>↵</i>\n")


def _stretches(listed: Any, whole: int) -> Iterator[tuple[bool, int]]:
    """By turns of the model and of the world, as far as there are tokens."""
    drawn = True
    for length in listed if isinstance(listed, list) else ():
        length = min(max(int(finite(length) or 0), 0), whole)
        if length:
            yield drawn, length
        whole -= length
        drawn = not drawn


def _runs(listed: Any) -> Iterator[tuple[float, int]]:
    for pair in listed if isinstance(listed, list) else ():
        value, count = map(finite, pair) if isinstance(pair, list) and len(pair) == 2 else (None, None)
        if count is not None:
            yield value or 0.0, int(count)


def _gap(listed: Any) -> tuple[int, int]:
    numbers = [finite(value) for value in listed] if isinstance(listed, list) else []
    place, count = numbers if len(numbers) == 2 else (None, None)
    return (-1, 0) if place is None or count is None else (int(place), int(count))
