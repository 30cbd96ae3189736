"""Read what a run left in its folder, forgiving everything a crash or a curious editor can do to it.

A report is wanted most when something went wrong, so a cut last line, a missing key or a NaN is noted and passed
over. Only a folder that is no run at all (no metrics.jsonl) is the user's mistake.

A metrics row describes one optimiser step, of RL one iteration: `samples`, `tokens`, `trained_tokens` and `seconds`
belong to that step alone and add up over the run, also over a resumed one; `skipped_steps` counts from the start. Step
0 is the evaluation before training.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, BinaryIO

import yaml

from trimtab.errors import UserError
from trimtab.files import is_unfinished
from trimtab.report.formatting import plural

METRICS, OPTIONS, MANIFEST = "metrics.jsonl", "options.yaml", "manifest.json"
SAMPLES, REWARDS, ROLLOUTS, TIME_LINE = "samples.json", "rewards.json", "rollouts.jsonl", "time_line.jsonl"
RL_JOBS = ("ppo", "grpo", "dapo", "reinforce", "rloo", "rl", "tail")

Point = tuple[int, float]
LARGEST = 1e200
"""No metric is that large; JSON allows integers no float can hold, and sums must stay finite."""


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

    def non_finite_steps(self, name: str) -> list[int]:
        """Steps at which the metric was written but is NaN or infinite."""
        return [row["step"] for row in self.rows if not math.isfinite(_number(row.get(name), otherwise=0.0))]

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
    run = RunData(Path(folder))
    if not run.folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the --save_path of a run")
    if not (run.folder / METRICS).is_file():
        raise UserError(f"{folder}: no {METRICS} in this folder; give the --save_path of a run")
    rows = _read_lines(run, METRICS)
    read_description(run)
    run.rows = by_step(rows, run.job)
    if run.is_rl and (run.folder / ROLLOUTS).is_file():
        run.rollouts = sorted(_read_lines(run, ROLLOUTS), key=lambda row: row["step"])
    # Of an earlier run in this folder one may be left.
    if run.options.get("async_staleness") and (run.folder / TIME_LINE).is_file():
        run.spans = spans_of(_read_lines(run, TIME_LINE, "iteration"))
    return run


def read_description(run: RunData) -> None:
    """All but what grows with every step."""
    run.options = _read_mapping(run, OPTIONS, yaml.safe_load)
    run.manifest = _read_mapping(run, MANIFEST, json.loads)
    run.samples = _read_samples(run)
    run.job = _job(run)
    if run.job == "rm" and (run.folder / REWARDS).is_file():
        run.rewards = _read_mapping(run, REWARDS, json.loads)


def by_step(rows: Iterable[dict[str, Any]], job: str) -> list[dict[str, Any]]:
    """Rows of metrics by ascending step. A later one for the same step is the one that counts: the run went back and
    did it again."""
    latest = {row["step"]: row for row in rows}
    ordered = [latest[step] for step in sorted(latest)]
    if job == "kto":
        _add_margins(ordered)
    return ordered


def parsed(line: str, key: str = "step") -> dict[str, Any] | None:
    """The row in a line of a file that has one with a step in every line; `key`: what it calls it."""
    row = _parse(line, json.loads)
    step = finite(row.get(key)) if isinstance(row, dict) else None
    return None if step is None else {**row, key: int(step)}


def spans_of(rows: Iterable[dict[str, Any]]) -> list[TimeSpan]:
    """Rows of time_line.jsonl by their beginning."""
    found = []
    for row in rows:
        begin, end = finite(row.get("begin")), finite(row.get("end"))
        if begin is not None and end is not None and begin <= end:
            found.append(TimeSpan(str(row.get("lane")), str(row.get("what")), begin, end, row["iteration"]))
    return sorted(found, key=lambda span: span.begin)


def finite(value: Any) -> float | None:
    """The value as a float, or None when it is not a finite number."""
    if type(value) is float:  # of long runs millions are looked at
        return value if -LARGEST <= value <= LARGEST else None
    number = _number(value, otherwise=math.nan)
    return number if math.isfinite(number) else None


def _number(value: Any, otherwise: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return otherwise
    return math.inf if abs(value) > LARGEST else float(value)


def _read_lines(run: RunData, name: str, key: str = "step") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    unreadable: list[int] = []
    lines = _read_text(run, name).splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = parsed(line, key)
        if row is None:
            unreadable.append(number)
        else:
            rows.append(row)
    if unreadable == [len(lines)]:
        run.problems.append(f"The last line of {name} is cut off; it was left out.")
    elif unreadable:
        shown = ", ".join(map(str, unreadable[:5])) + (", ..." if len(unreadable) > 5 else "")
        run.problems.append(f"{name}: {len(unreadable)} unreadable lines were left out (line {shown}).")
    return rows


def _job(run: RunData) -> str:
    """As the manifest says, else as the first line of the options does."""
    if "job" in run.manifest:
        return str(run.manifest["job"])
    comment = _read_text(run, OPTIONS).partition("\n")[0] if (run.folder / OPTIONS).is_file() else ""
    return comment.removeprefix("# trimtab ").strip() if comment.startswith("# trimtab ") else "sft"


def _add_margins(rows: list[dict[str, Any]]) -> None:
    """KTO has no pairs, so it records no margin; the difference of its two means is the nearest thing."""
    for row in rows:
        for kind in ("", "eval_"):
            chosen, rejected = finite(row.get(f"{kind}chosen_reward")), finite(row.get(f"{kind}rejected_reward"))
            if chosen is not None and rejected is not None:
                row.setdefault(f"{kind}reward_margin", chosen - rejected)


def _read_mapping(run: RunData, name: str, parse: Any) -> dict[str, Any]:
    if not (run.folder / name).is_file():
        run.problems.append(f"There is no {name} in the run's folder.")
        return {}
    content = _parse(_read_text(run, name), parse)
    if not isinstance(content, dict):
        run.problems.append(f"{name} could not be read.")
        return {}
    return content


def _read_samples(run: RunData) -> list[dict[str, Any]]:
    if not (run.folder / SAMPLES).is_file():
        return []
    content = _parse(_read_text(run, SAMPLES), json.loads)
    if not isinstance(content, list):
        run.problems.append(f"{SAMPLES} could not be read.")
        return []
    return [sample for sample in content if isinstance(sample, dict)]


def _read_text(run: RunData, name: str) -> str:
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


# ---- A growing file of rows, of which only the new ones are read.


AT_ONCE = 1 << 20
REMEMBERED = 256
"""Bytes before the place reached that must still be the same, for the rest to be what follows them."""


class FollowedLines:
    def __init__(self, path: Path, key: str = "step"):
        """`key`: what a row calls its step."""
        self.path, self.key = path, key
        self.unreadable = 0
        """How many whole lines were no row."""
        self.written: float | None = None
        """When the file was last written to; None: it is not there."""
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._file_number: tuple[int, int] | None = None
        self._place, self._before, self._half = 0, b"", b""
        self.unreadable = 0

    def news(self) -> tuple[bool, Iterator[dict[str, Any]]]:
        """Whether all earlier rows are void, and the rows to add. They are read as they are asked for; take all."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            void = self._place > 0
            self.written = None
            self._begin_anew()
            return void, iter(())
        except OSError:
            return False, iter(())  # a disk that is away for a moment; a folder that may not be read was refused before
        status = os.fstat(file.fileno())
        number = status.st_dev, status.st_ino
        self.written = status.st_mtime
        void = self._place > 0 and not (number == self._file_number and self._continues(file, status.st_size))
        if void:
            self._begin_anew()
        self._file_number = number
        return void, self._rows(file, status.st_size)

    def _continues(self, file: BinaryIO, size: int) -> bool:
        if size < self._place:
            return False
        if size == self._place:
            return True
        file.seek(self._place - len(self._before))
        return file.read(len(self._before)) == self._before

    def _rows(self, file: BinaryIO, size: int) -> Iterator[dict[str, Any]]:
        with file:
            file.seek(self._place)
            while self._place < size and (block := file.read(min(AT_ONCE, size - self._place))):
                self._place += len(block)
                self._before = (self._before + block)[-REMEMBERED:]
                *lines, self._half = (self._half + block).split(b"\n")
                for line in lines:
                    row = parsed(line.decode(errors="replace"), self.key)
                    if row is not None:
                        yield row
                    elif line.strip():
                        self.unreadable += 1


# ---- A run that is followed.


DESCRIPTION = (OPTIONS, MANIFEST, SAMPLES, REWARDS)
MOST_ITERATIONS = 200
"""Of whose answers are in memory: the first, and the newest."""


class FollowedRun:
    def __init__(self, folder: Path):
        self.folder = folder
        self.run = RunData(folder)
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
