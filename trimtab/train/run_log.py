"""Everything a run says about itself while it works: the metrics file, other loggers, the progress bar."""

import math
import re
from collections.abc import Callable
from pathlib import Path

from trimtab.config.groups import LoggingOptions
from trimtab.files import writing
from trimtab.progress import RunProgress
from trimtab.train.alarms import Watch
from trimtab.train.listening import tell
from trimtab.train.metrics import MetricsFile, open_logs, read_rows
from trimtab.train.space import SpaceWatch

FIGURE = re.compile(r"-?\d[\d.,]*(e[-+]?\d+)?")


class RunLog:
    def __init__(
        self,
        options: LoggingOptions,
        manifest: dict,
        folder: Path,
        *,
        verb: str,
        total: int,
        start: int,
        resumed: bool,
        space: SpaceWatch,
        shown: Callable[[dict], dict[str, str]] | None = None,
    ):
        """`start`: the step the run begins after, -1: before what is measured at the start; `resumed`: its earlier rows
        are kept; `shown`: what the progress bar tells of a row."""
        self.total, self.every = total, max(1, options.logging_steps)
        self._shown = shown or supervised_figures
        self._watch, self._told = Watch(), set[str]()
        self._cannot_write = f"--save_path {folder}: cannot write there"
        with writing(self._cannot_write):
            self._metrics = MetricsFile(folder / "metrics.jsonl", resume_from=start if resumed else None)
            earlier = read_rows(folder / "metrics.jsonl")
        for row in earlier:
            self._watch.see(row)
        self._logs = open_logs(options, manifest, folder, list(filter(self._is_told, earlier)))
        self._progress = RunProgress(verb, total, max(0, start), every=self.every)
        self._space = space
        self._tell_of_space()

    def write(self, row: dict) -> None:
        if alarms := [*row.get("alarms", []), *self._watch.see(row)]:
            row["alarms"] = alarms
        with writing(self._cannot_write):
            written = self._metrics.write(row)
        if self._is_told(row):
            for log in self._logs:
                log.write(row)
        self._progress.advance(row["step"], self._shown(row))
        for alarm in alarms:
            if (kind := _kind(alarm)) not in self._told:  # when it begins, not in every step
                self._told.add(kind)
                self._progress.say(f"step {row['step']}: {alarm}")
        self._tell_of_space()
        tell(written)

    def show(self, answers: list[dict]) -> None:
        """Answers of the step whose row comes next, for loggers that have a place for them."""
        for log in self._logs:
            log.show(answers)

    def _is_told(self, row: dict) -> bool:
        return row["step"] % self.every == 0 or row["step"] == self.total

    def _tell_of_space(self) -> None:
        if warning := self._space.warning():
            self._progress.say(warning)

    def close(self) -> None:
        self._progress.close()
        self._metrics.close()
        for log in self._logs:
            log.close()


def _kind(alarm: str) -> str:
    """The same alarm with other figures is the same alarm."""
    return FIGURE.sub("0", alarm)


def supervised_figures(row: dict) -> dict[str, str]:
    shown = {"loss": f"{row['loss']:.4f}"}
    if "eval_loss" in row:
        shown["eval"] = f"{row['eval_loss']:.4f}"
    shown |= {"tok/s": f"{row['tokens_per_second']:,.0f}", "mem": f"{row['memory_gib']:.1f} GiB"}
    if row["skipped_steps"] or not math.isfinite(row["grad_norm"]):
        shown["skipped"] = str(row["skipped_steps"])
    return shown
