"""A run's data, read from its folder once, or followed while the run writes.

A report is wanted most when something went wrong, so a cut last line, a missing key or a NaN is noted and passed
over. Only a folder without metrics.jsonl is the user's mistake.

A metrics row describes one optimiser step, of RL one iteration: `samples`, `tokens`, `trained_tokens` and `seconds`
belong to that step alone and add up over the run, also over a resumed one; `skipped_steps` counts from the start. Step
0 is the evaluation before training.
"""

from __future__ import annotations

import difflib
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Any, BinaryIO

import yaml

from trimtab.errors import UserError
from trimtab.files import is_locked, is_unfinished
from trimtab.report.formatting import duration, plural

METRICS, OPTIONS, MANIFEST = "metrics.jsonl", "options.yaml", "manifest.json"
SAMPLES, REWARDS, ROLLOUTS, TIME_LINE = "samples.json", "rewards.json", "rollouts.jsonl", "time_line.jsonl"
RL_JOBS = ("ppo", "grpo", "dapo", "reinforce", "rloo", "rl", "tail")

Point = tuple[int, float]
LARGEST = 1e200
"""No metric is that large; JSON allows integers no float can hold, and sums must stay finite."""
DESCRIPTION = (OPTIONS, MANIFEST, SAMPLES, REWARDS)
"""Files that do not grow."""
MOST_ITERATIONS = 200
"""Of a run that is followed, answers of the first and of the newest iterations are in memory."""
AT_ONCE = 1 << 20
REMEMBERED = 256
"""Bytes before the place reached that must still be the same, for the rest to be what follows them."""


@dataclass(frozen=True)
class TimeSpan:
    """What somebody did, in seconds since the run began."""

    lane: str
    what: str
    begin: float
    end: float
    iteration: int


@dataclass
class RunData:
    """One run as it is on disk."""

    folder: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Metrics by ascending step, one row a step."""
    options: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    rewards: dict[str, Any] = field(default_factory=dict)
    """What a reward model gave to the two answers of each pair."""
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    """Some answers of every iteration of RL, by ascending step."""
    spans: list[TimeSpan] = field(default_factory=list)
    """What trainer and engines did at the same time, by their beginning."""
    job: str = "sft"
    problems: list[str] = field(default_factory=list)
    """What could not be read, in words."""

    @property
    def is_rl(self) -> bool:
        return self.job in RL_JOBS

    @property
    def steps(self) -> int:
        """How many steps are recorded."""
        return sum(row["step"] != 0 for row in self.rows)

    @property
    def unit(self) -> str:
        """What a step is called."""
        return "iteration" if self.is_rl else "step"

    @property
    def metrics(self) -> dict[str, None]:
        """Names of what was recorded as a finite number, in their order."""
        return {str(name): None for row in self.rows for name in row if finite(row[name]) is not None}

    def series(self, name: str) -> list[Point]:
        """(step, value) where the metric is there and finite."""
        points = ((row["step"], finite(row.get(name))) for row in self.rows)
        return [(step, value) for step, value in points if value is not None]

    def total(self, name: str) -> float:
        return sum(value for _, value in self.series(name))

    def last(self, name: str) -> float | None:
        points = self.series(name)
        return points[-1][1] if points else None

    def tenth(self, name: str) -> int:
        """How many steps count as the beginning, or the end: a tenth of them, one to ten."""
        return max(1, min(10, len(self.series(name)) // 10))

    def change(self, name: str) -> tuple[float, float] | None:
        """What it was at first, and its mean over the last tenth of the steps."""
        ends = self.ends(name)
        return None if ends is None else (self.series(name)[0][1], ends[1])

    @property
    def held_out(self) -> str:
        """What figures of an evaluation may be called: held-out only if none of its prompts is trained on."""
        evaluation = self.data.get("evaluation")
        seen = finite(evaluation.get("rows_also_trained")) if isinstance(evaluation, dict) else None
        return "evaluation" if seen else "held-out"

    def ends(self, name: str) -> tuple[float, float] | None:
        """Mean over the first and over the last tenth of the steps."""
        values = [value for _, value in self.series(name)]
        if not values:
            return None
        window = self.tenth(name)
        return fmean(values[:window]), fmean(values[-window:])

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """Rewards of the chosen and of the rejected answer."""
        listed = self.rewards.get("chosen_rejected")
        found = []
        for pair in listed if isinstance(listed, list) else []:
            if isinstance(pair, list) and len(pair) == 2:
                chosen, rejected = map(finite, pair)
                if chosen is not None and rejected is not None:
                    found.append((chosen, rejected))
        return found

    @property
    def noun(self) -> str:
        """What a row of the data is called."""
        if self.is_rl:
            return "prompts"
        return "pairs" if self.job in ("rm", "dpo") else "rows"

    @property
    def data(self) -> dict[str, Any]:
        """The data report of the manifest."""
        report = self.manifest.get("data")
        if not isinstance(report, dict):
            return {}
        # RL names its sets; in the other jobs what is told of training is at the top.
        training = report.get("train")
        rest = {name: value for name, value in report.items() if name != "train"}
        return {**training, **rest} if isinstance(training, dict) else report

    @property
    def has_saved_model(self) -> bool:
        if is_unfinished(self.folder):
            return False
        return any((self.folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def read_run(folder: str | Path) -> RunData:
    """Everything readable in a run's folder."""
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"{folder}: no such folder; give the --save_path of a run")
    if not (path / METRICS).is_file():
        raise UserError(f"{folder}: no {METRICS} in this folder; give the --save_path of a run")
    followed = FollowedRun(path, live=False)
    followed.refresh()
    return followed.run


class FollowedRun:
    """The `RunData` of a folder, kept up to date by reading only what is new."""

    def __init__(self, folder: Path, live: bool = True):
        """`live`: the run may still write, so an unfinished last line waits, and answers of old iterations are dropped
        from memory."""
        self.folder, self.live = folder, live
        self.run = RunData(folder)
        self._metrics, self._rollouts = FollowedLines(folder / METRICS, live), FollowedLines(folder / ROLLOUTS, live)
        self._spans = FollowedLines(folder / TIME_LINE, live, "iteration")
        self._rows: dict[FollowedLines, list[dict[str, Any]]] = {self._metrics: [], self._rollouts: [], self._spans: []}
        self._described: list[Any] = []
        self._undescribed: list[str] = []  # problems of the description

    def refresh(self) -> bool:
        """Read what is new; whether anything was."""
        changed = [self._describe(), self._follow(self._metrics)]
        if self.run.is_rl:
            changed.append(self._follow(self._rollouts))
        # Without the option, the file is left by an earlier run in this folder.
        if self.run.options.get("async_staleness"):
            changed.append(self._follow(self._spans))
        if any(changed):
            self.run.rows = _by_step(self._rows[self._metrics], self.run.job)
            self.run.rollouts = self._rows[self._rollouts]
            self.run.rollouts.sort(key=lambda row: row["step"])
            if self.live:
                steps = sorted({row["step"] for row in self.run.rollouts})
                kept = {*steps[:1], *steps[1 - MOST_ITERATIONS :]} if len(steps) > MOST_ITERATIONS else steps
                self.run.rollouts[:] = [row for row in self.run.rollouts if row["step"] in kept]
            self.run.spans = _time_spans(self._rows[self._spans])
            self.run.problems = [*self._undescribed, *filter(None, (file.problem() for file in self._rows))]
        return any(changed)

    @property
    def begun(self) -> bool:
        """Whether there is anything of a run in the folder."""
        return bool(self._rows[self._metrics]) or bool(self.run.manifest)

    @property
    def written(self) -> float | None:
        """When the run last wrote to a file that grows or is replaced; None: not yet."""
        times = [file.written for file in self._rows if file.written is not None]
        times += [status.st_mtime for name in (MANIFEST, OPTIONS) if (status := _status(self.folder / name))]
        return max(times, default=None)

    def _describe(self) -> bool:
        """Read the files that do not grow, if they have changed."""
        found = [
            status and (status.st_ino, status.st_mtime_ns, status.st_size)
            for status in (_status(self.folder / name) for name in DESCRIPTION)
        ]
        if found == self._described:
            return False
        self._described, run = found, self.run
        run.problems = []
        run.options = _read(run, OPTIONS, dict, yaml.safe_load)
        run.manifest = _read(run, MANIFEST, dict)
        run.samples = [one for one in _read(run, SAMPLES, list, optional=True) if isinstance(one, dict)]
        first_line = _text(run, OPTIONS).partition("\n")[0] if (run.folder / OPTIONS).is_file() else ""
        named = first_line.removeprefix("# trimtab ").strip() if first_line.startswith("# trimtab ") else "sft"
        run.job = str(run.manifest.get("job", named))
        run.rewards = _read(run, REWARDS, dict, optional=True) if run.job == "rm" else {}
        self._undescribed = run.problems
        return True

    def _follow(self, file: FollowedLines) -> bool:
        void, rows = file.new_rows()
        known = self._rows[file]
        if void:
            known.clear()
        before = len(known)
        known.extend(rows)
        return void or len(known) > before


class FollowedLines:
    """A file of rows that another process writes, of which only new lines are read.

    A resumed run takes rows back and writes the file anew, and a new run replaces it: then everything is read again.
    """

    def __init__(self, path: Path, live: bool = True, key: str = "step"):
        """`live`: an unfinished last line waits for its end. `key`: the row's name for its step."""
        self.path, self.live, self.key = path, live, key
        self.written: float | None = None
        """When the file was last written to; None: there is no file."""
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._file_number: tuple[int, int] | None = None
        self._place, self._before, self._half = 0, b"", b""
        self._lines = 0
        self.unreadable: list[int] = []
        """Numbers of the lines that are no rows."""

    def new_rows(self) -> tuple[bool, Iterator[dict[str, Any]]]:
        """Whether all earlier rows are void, and the rows to add. They are read as they are asked for; take all."""
        void, lines = self.new_lines()
        return void, self._rows(lines)

    def new_lines(self) -> tuple[bool, Iterator[tuple[int, bytes]]]:
        """The same with each line's place in the file and its bytes."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            void = self._place > 0
            self.written = None
            self._begin_anew()
            return void, iter(())
        except OSError:
            return False, iter(())  # a disk that is away for a moment; an unreadable folder was refused before
        status = os.fstat(file.fileno())
        number = status.st_dev, status.st_ino
        self.written = status.st_mtime
        void = self._place > 0 and not (number == self._file_number and self._continues(file, status.st_size))
        if void:
            self._begin_anew()
        self._file_number = number
        return void, self._read(file, status.st_size)

    def problem(self) -> str:
        """Which lines were left out, in words."""
        if not self.unreadable:
            return ""
        if self.unreadable == [self._lines] and not self.live:
            return f"The last line of {self.path.name} is cut off; it was left out."
        shown = ", ".join(map(str, self.unreadable[:5])) + (", ..." if len(self.unreadable) > 5 else "")
        return f"{self.path.name}: {plural(len(self.unreadable), 'unreadable line')} left out (line {shown})."

    def _continues(self, file: BinaryIO, size: int) -> bool:
        if size <= self._place:
            return size == self._place
        file.seek(self._place - len(self._before))
        return file.read(len(self._before)) == self._before

    def _read(self, file: BinaryIO, size: int) -> Iterator[tuple[int, bytes]]:
        with file:
            file.seek(self._place)
            while self._place < size and (block := file.read(min(AT_ONCE, size - self._place))):
                start = self._place - len(self._half)
                self._place += len(block)
                self._before = (self._before + block)[-REMEMBERED:]
                *lines, self._half = (self._half + block).split(b"\n")
                for line in lines:
                    yield start, line
                    start += len(line) + 1
            if self._half and not self.live:
                yield self._place - len(self._half), self._half

    def _rows(self, lines: Iterable[tuple[int, bytes]]) -> Iterator[dict[str, Any]]:
        for _, line in lines:
            self._lines += 1
            row = _parse(line.decode(errors="replace"), json.loads)
            step = finite(row.get(self.key)) if isinstance(row, dict) else None
            if step is not None:
                yield {**row, self.key: int(step)}
            elif line.strip():
                self.unreadable.append(self._lines)


def finite(value: Any) -> float | None:
    """The value as a float, or None when it is not a finite number."""
    if type(value) is float:  # of long runs millions are looked at
        return value if -LARGEST <= value <= LARGEST else None
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > LARGEST:
        return None
    return float(value)


def _by_step(rows: Iterable[dict[str, Any]], job: str) -> list[dict[str, Any]]:
    """Rows of metrics by ascending step. A later one for the same step is the one that counts: the run went back and
    did it again."""
    latest = {row["step"]: row for row in rows}
    ordered = [latest[step] for step in sorted(latest)]
    # KTO has no pairs, so it records no margin; the difference of its two means is the nearest thing.
    for row in ordered if job == "kto" else ():
        for kind in ("", "eval_"):
            chosen, rejected = finite(row.get(f"{kind}chosen_reward")), finite(row.get(f"{kind}rejected_reward"))
            if chosen is not None and rejected is not None:
                row.setdefault(f"{kind}reward_margin", chosen - rejected)
    return ordered


def _time_spans(rows: Iterable[dict[str, Any]]) -> list[TimeSpan]:
    """Rows of time_line.jsonl by their beginning."""
    found = []
    for row in rows:
        begin, end = finite(row.get("begin")), finite(row.get("end"))
        if begin is not None and end is not None and begin <= end:
            found.append(TimeSpan(str(row.get("lane")), str(row.get("what")), begin, end, row["iteration"]))
    return sorted(found, key=lambda span: span.begin)


def _read(run: RunData, name: str, kind: type, parse: Any = json.loads, optional: bool = False) -> Any:
    """The content of a file that does not grow; empty, with a problem noted, where it is missing or no `kind`."""
    if not (run.folder / name).is_file():
        run.problems += [] if optional else [f"There is no {name} in the run's folder."]
        return kind()
    content = _parse(_text(run, name), parse)
    if not isinstance(content, kind):
        run.problems.append(f"{name} could not be read.")
        return kind()
    return content


def _text(run: RunData, name: str) -> str:
    try:
        return (run.folder / name).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        run.problems.append(f"{name} could not be opened: {error.strerror}.")
        return ""


def _parse(text: str, parse: Any) -> Any:
    """None for anything that does not parse; a deep nesting bomb counts as unreadable too."""
    try:
        return parse(text)
    except (ValueError, RecursionError, yaml.YAMLError):
        return None


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


# ---- How a run is doing, by its files alone
#
# A run locks its folder while it works, and the system lets go of the lock when its process ends, however that comes;
# and until its model is whole it leaves a mark. So a run that was killed is told from one that is slow. Where a lock of
# another machine cannot be seen, the time since the last row has to do.

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
