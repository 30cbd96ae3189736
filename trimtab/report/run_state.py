"""How a run is doing, by its files alone.

A run locks its folder while it works, and the system lets go of the lock when its process ends, however that comes; and
until its model is whole it leaves a mark. So a run that was killed is told from one that is slow. Where a lock of
another machine cannot be seen, the time since the last row has to do.
"""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import fmean

from trimtab.errors import UserError
from trimtab.files import is_locked
from trimtab.report.formatting import duration
from trimtab.report.run_data import MANIFEST, METRICS, OPTIONS, FollowedRun, RunData, finite

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


def patience(run: RunData) -> float:
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


def progress_of(run: RunData) -> Progress:
    planned = finite(run.manifest.get("steps"))
    recent = [value for row in run.rows[-RECENT:] if (value := finite(row.get("seconds"))) is not None and value > 0]
    return Progress(
        run.rows[-1]["step"] if run.rows else 0, int(planned) if planned else None, fmean(recent) if recent else None
    )


# ---- Folders to watch.


BEGUN = (METRICS, MANIFEST, OPTIONS)
"""Any of these in a folder: a run has begun there."""


def watched_folders(names: Sequence[str], *, wait: bool) -> list[Path]:
    """The folders of runs, each once; `wait`: a run may also begin later."""
    # What a shell makes of runs/* may hold files as well.
    chosen = [name for name in names if not Path(name).is_file()] or names
    folders = {os.path.realpath(name): Path(name) for name in chosen}
    for folder in folders.values():
        check(folder, wait=wait)
    return list(folders.values())


def check(folder: Path, *, wait: bool) -> None:
    try:
        if folder.is_file():
            raise UserError(f"{folder}: a file; give the --save_path of a run, which is a folder")
        if not folder.is_dir():
            if wait:
                return
            raise UserError(
                f"{folder}: no such folder; {_meant(folder)}give the --save_path of a run, or add --wait to "
                "wait for one that is about to begin"
            )
        names = set(os.listdir(folder))
        if METRICS in names:
            with (folder / METRICS).open("rb"):
                pass
        if wait or not names.isdisjoint(BEGUN):
            return
    except OSError as error:
        raise UserError(f"{error.filename or folder}: cannot be read ({error.strerror}); see who may read it") from None
    inside = sorted(path.parent.name for path in folder.glob(f"*/{METRICS}"))
    more = f"there are runs inside: {', '.join(inside[:5])}" if inside else "give the --save_path of a run"
    raise UserError(f"{folder}: no {METRICS} in this folder; {more}, or add --wait to wait for one to begin there")


def _meant(folder: Path) -> str:
    """A folder of almost this name that holds a run."""
    if not folder.parent.is_dir():
        return ""
    runs = [path.name for path in folder.parent.iterdir() if (path / METRICS).is_file()]
    close = difflib.get_close_matches(folder.name, runs, n=1)
    return f"did you mean {folder.parent / close[0]}? Or " if close else ""
