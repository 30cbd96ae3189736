"""How a run is doing, by its files alone.

A run locks its folder while it works, and the system lets go of the lock when its process ends, however that comes; and
until its model is whole it leaves a mark. So a run that was killed is told from one that is slow. Where a lock of
another machine cannot be seen, the time since the last row has to do.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean

from trimtab.files import is_locked
from trimtab.report.numbers import duration
from trimtab.report.read import Run, finite
from trimtab.watching.followed import FollowedRun

PATIENCE = 60.0
"""Seconds without a row that are nothing unusual, whatever a step takes."""
STEPS_OF_PATIENCE = 5
RECENT = 10


class Condition(StrEnum):
    AWAITED = "awaited"  # nothing there yet
    STARTING = "starting"
    RUNNING = "running"
    SILENT = "silent"
    STOPPED = "stopped"
    FINISHED = "finished"


@dataclass(frozen=True)
class State:
    condition: Condition
    quiet: float = 0.0
    """Seconds since the run has written something."""

    @property
    def in_words(self) -> str:
        if self.condition is Condition.AWAITED:
            return "no run here yet"
        if self.condition is Condition.SILENT:
            return f"silent for {duration(self.quiet)}"
        return str(self.condition)

    @property
    def is_over(self) -> bool:
        return self.condition in (Condition.STOPPED, Condition.FINISHED)


def state_of(followed: FollowedRun, now: float | None = None) -> State:
    run, written = followed.run, followed.written
    quiet = max(0.0, (time.time() if now is None else now) - written) if written is not None else 0.0
    locked = is_locked(followed.folder)
    if not followed.begun:
        return State(Condition.STARTING if locked else Condition.AWAITED, quiet)
    if run.manifest and run.has_saved_model:
        return State(Condition.FINISHED, quiet)
    if locked is False:
        return State(Condition.STOPPED, quiet)
    if quiet > patience(run):
        return State(Condition.SILENT, quiet)
    return State(Condition.RUNNING if run.rows else Condition.STARTING, quiet)


def patience(run: Run) -> float:
    """How many seconds without a row mean nothing."""
    recent = [finite(row.get("seconds")) or 0.0 for row in run.rows[-RECENT:]]
    return max(PATIENCE, STEPS_OF_PATIENCE * max(recent, default=0.0))


@dataclass(frozen=True)
class Progress:
    done: int
    planned: int | None
    seconds: float | None
    """Of a step, of late."""

    @property
    def share(self) -> float | None:
        return min(1.0, self.done / self.planned) if self.planned else None

    @property
    def remaining(self) -> float | None:
        """Seconds to the end at this pace."""
        if self.planned is None or self.seconds is None:
            return None
        return max(0, self.planned - self.done) * self.seconds


def progress_of(run: Run) -> Progress:
    planned = finite(run.manifest.get("steps"))
    recent = [value for row in run.rows[-RECENT:] if (value := finite(row.get("seconds"))) is not None and value > 0]
    return Progress(
        run.rows[-1]["step"] if run.rows else 0, int(planned) if planned else None, fmean(recent) if recent else None
    )
