"""Everything a run says about itself while it works: the metrics file, other loggers, the progress bar."""

import math
from collections.abc import Callable
from pathlib import Path

from trimtab.config.groups import LoggingOptions
from trimtab.files import writing
from trimtab.progress import RunProgress
from trimtab.train.metrics import MetricsFile, open_logs


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
        shown: Callable[[dict], dict[str, str]] | None = None,
    ):
        """`start`: the step the run begins after; `resumed`: its earlier rows are kept; `shown`: what the progress bar
        tells of a row."""
        self.total, self.every = total, max(1, options.logging_steps)
        self._shown = shown or supervised_figures
        self._alarms: set[str] = set()
        self._cannot_write = f"--save_path {folder}: cannot write there"
        with writing(self._cannot_write):
            self._metrics = MetricsFile(folder / "metrics.jsonl", resume_from=start if resumed else None)
        self._logs = open_logs(options, manifest, folder)
        self._progress = RunProgress(verb, total, start, every=self.every)

    def write(self, row: dict) -> None:
        with writing(self._cannot_write):
            self._metrics.write(row)
        if row["step"] % self.every == 0 or row["step"] == self.total:
            for log in self._logs:
                log.write(row)
        self._progress.advance(row["step"], self._shown(row))
        alarms = row.get("alarms", [])
        for alarm in alarms:
            if _kind(alarm) not in self._alarms:  # told when it begins, not in every step
                self._progress.say(f"step {row['step']}: {alarm}")
        self._alarms = {_kind(alarm) for alarm in alarms}

    def close(self) -> None:
        self._progress.close()
        self._metrics.close()
        for log in self._logs:
            log.close()


def _kind(alarm: str) -> str:
    """The same alarm with other figures is the same alarm."""
    return "".join(letter for letter in alarm if not letter.isdigit())


def supervised_figures(row: dict) -> dict[str, str]:
    shown = {"loss": f"{row['loss']:.4f}"}
    if "eval_loss" in row:
        shown["eval"] = f"{row['eval_loss']:.4f}"
    shown |= {"tok/s": f"{row['tokens_per_second']:,.0f}", "mem": f"{row['memory_gib']:.1f} GiB"}
    if row["skipped_steps"] or not math.isfinite(row["grad_norm"]):
        shown["skipped"] = str(row["skipped_steps"])
    return shown
