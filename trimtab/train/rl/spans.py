"""time_line.jsonl: what trainer and engines did, from when to when. Where answers outlive an update, phases overlap,
and their lengths alone no longer say where the time went.

A row is {"lane": "trainer", "what": "update", "begin": 12.5, "end": 13.1, "iteration": 4}; seconds count from the
beginning of the run, without the time between a stop and its resume. The trainer's lane has the phases of an iteration,
"engine 0" is WRITING and "rewards 0" is JUDGING, of the first process that has an engine.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trimtab.files import writing
from trimtab.train.metrics import MetricsFile, read_rows

FILE = "time_line.jsonl"
TRAINER = "trainer"
WRITING, JUDGING = "writing", "judging"
LANES = {WRITING: "engine", JUDGING: "rewards"}
NEIGHBOURS = 0.005  # seconds between two spans of the same kind that are told as one

Told = tuple[str, float, float]
"""What was done, and how many seconds before the telling it began and ended: clocks of two machines need not agree."""


class Spans:
    """What one process does, by several threads if need be, until it is asked for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: list[tuple[str, float, float]] = []
        self._running: dict[str, tuple[int, float]] = {}  # how many do it, and since when

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Several at the same time, as rewards of several groups, are one span: from the first to the last."""
        with self._lock:
            count, begin = self._running.get(what, (0, time.monotonic()))
            self._running[what] = count + 1, begin
        try:
            yield
        finally:
            with self._lock:
                count, begin = self._running.pop(what)
                if count > 1:
                    self._running[what] = count - 1, begin
                else:
                    self._add(what, begin, time.monotonic())

    def taken(self) -> list[Told]:
        """What was not told yet. Of what still goes on, the part until now."""
        with self._lock:
            now = time.monotonic()
            for what, (count, begin) in self._running.items():
                self._add(what, begin, now)
                self._running[what] = count, now
            done, self._done = self._done, []
        return [(what, now - begin, now - end) for what, begin, end in done]

    def _add(self, what: str, begin: float, end: float) -> None:
        last = next((place for place in reversed(range(len(self._done))) if self._done[place][0] == what), None)
        if last is not None and begin - self._done[last][2] <= NEIGHBOURS:
            begin = self._done.pop(last)[1]
        self._done.append((what, begin, end))


class TimeLine:
    """The file. Without a folder nothing is written."""

    def __init__(self, folder: Path | None = None, *, resume_from: int | None = None):
        """`resume_from`: the iteration of the checkpoint a run goes on from; rows after it are removed."""
        self._file: MetricsFile | None = None
        self._began = time.monotonic()
        if folder is not None:
            self._cannot_write = f"--save_path {folder}: cannot write there"
            with writing(self._cannot_write):
                self._file = MetricsFile(folder / FILE, resume_from=resume_from, key="iteration")
            self._began -= max((row["end"] for row in read_rows(folder / FILE, key="iteration")), default=0.0)

    @contextmanager
    def during(self, what: str, iteration: int) -> Iterator[None]:
        """What the trainer does inside; `iteration` counts from 1, like the steps of the metrics."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self._write(TRAINER, what, begin, time.monotonic(), iteration)

    def tell(self, process: int, spans: Sequence[Told], iteration: int) -> None:
        """What the process that has this engine told of itself just now, see `Spans.taken`."""
        now = time.monotonic()
        for what, began, ended in spans:
            self._write(f"{LANES[what]} {process}", what, now - began, now - ended, iteration)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, lane: str, what: str, begin: float, end: float, iteration: int) -> None:
        if self._file is not None:
            times = {"begin": round(begin - self._began, 3), "end": round(end - self._began, 3)}
            with writing(self._cannot_write):
                self._file.write({"lane": lane, "what": what, **times, "iteration": iteration})
