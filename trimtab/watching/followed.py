"""A run as it is on disk, kept up to date: the `Run` that reports are made of, by reading only what is new."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from trimtab.report.numbers import plural
from trimtab.report.read import (
    MANIFEST,
    METRICS,
    OPTIONS,
    REWARDS,
    ROLLOUTS,
    SAMPLES,
    TIME_LINE,
    Run,
    by_step,
    read_description,
    spans_of,
)
from trimtab.watching.lines import FollowedLines

DESCRIPTION = (OPTIONS, MANIFEST, SAMPLES, REWARDS)
MOST_ITERATIONS = 200
"""Of whose answers are in memory: the first, and the newest."""


class FollowedRun:
    def __init__(self, folder: Path):
        self.folder = folder
        self.run = Run(folder)
        self._metrics, self._rollouts = FollowedLines(folder / METRICS), FollowedLines(folder / ROLLOUTS)
        self._spans = FollowedLines(folder / TIME_LINE, "iteration")
        self._rows: list[dict[str, Any]] = []
        self._answers: list[dict[str, Any]] = []
        self._span_rows: list[dict[str, Any]] = []
        self._described: list[Any] = []
        self._undescribed: list[str] = []  # what could not be read of its description

    def refresh(self) -> bool:
        """Read what is new; whether anything was."""
        changed = [self._describe(), self._follow(self._metrics, self._rows)]
        if self.run.is_rl:
            changed.append(self._follow(self._rollouts, self._answers))
        if self.run.options.get("async_staleness"):
            changed.append(self._follow(self._spans, self._span_rows))
        if any(changed):
            self.run.rows = by_step(self._rows, self.run.job)
            self._answers.sort(key=lambda row: row["step"])
            self._forget_answers()
            self.run.rollouts = self._answers
            self.run.spans = spans_of(self._span_rows)
            self.run.problems = self._undescribed + [
                f"{file.path.name}: {plural(file.unreadable, 'unreadable line')} left out."
                for file in (self._metrics, self._rollouts, self._spans)
                if file.unreadable
            ]
        return any(changed)

    @property
    def begun(self) -> bool:
        """Whether there is anything of a run in the folder."""
        return bool(self._rows) or bool(self.run.manifest)

    @property
    def written(self) -> float | None:
        """When the run last wrote what it writes again and again; None: it has not begun to."""
        times = [file.written for file in (self._metrics, self._rollouts, self._spans) if file.written is not None]
        for name in (MANIFEST, OPTIONS):
            if (status := _status(self.folder / name)) is not None:
                times.append(status.st_mtime)
        return max(times, default=None)

    def _describe(self) -> bool:
        found = [
            status and (status.st_ino, status.st_mtime_ns, status.st_size)
            for status in (_status(self.folder / name) for name in DESCRIPTION)
        ]
        if found == self._described:
            return False
        self._described = found
        self.run.problems = []
        read_description(self.run)
        self._undescribed = self.run.problems
        return True

    def _follow(self, file: FollowedLines, rows: list[dict[str, Any]]) -> bool:
        void, news = file.news()
        if void:
            rows.clear()
        before = len(rows)
        rows.extend(news)
        return void or len(rows) > before

    def _forget_answers(self) -> None:
        steps = sorted({row["step"] for row in self._answers})
        if len(steps) > MOST_ITERATIONS:
            kept = {steps[0], *steps[1 - MOST_ITERATIONS :]}
            self._answers[:] = [row for row in self._answers if row["step"] in kept]


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
