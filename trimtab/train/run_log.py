"""Everything a run says about itself while it works: the metrics file, other loggers, the progress bar."""

import math
from typing import TYPE_CHECKING

from trimtab.train.disk import writing
from trimtab.train.metrics import MetricsFile, open_logs
from trimtab.train.progress import RunProgress

if TYPE_CHECKING:
    from trimtab.train.supervised import SupervisedRun


class RunLog:
    def __init__(self, run: "SupervisedRun", resumed: bool):
        options, step, self.total = run.options, run.counters.step, run.order.steps
        self.every = max(1, options.logging_steps)
        self._cannot_write = f"--save_path {run.folder}: cannot write there"
        with writing(self._cannot_write):
            self._metrics = MetricsFile(run.folder / "metrics.jsonl", resume_from=step if resumed else None)
        self._logs = open_logs(options, run.manifest, run.folder)
        self._progress = RunProgress(run.task.verb, self.total, step, every=self.every)

    def write(self, row: dict) -> None:
        with writing(self._cannot_write):
            self._metrics.write(row)
        if row["step"] % self.every == 0 or row["step"] == self.total:
            for log in self._logs:
                log.write(row)
        self._progress.advance(row["step"], _shown(row))

    def close(self) -> None:
        self._progress.close()
        self._metrics.close()
        for log in self._logs:
            log.close()


def _shown(row: dict) -> dict[str, str]:
    shown = {"loss": f"{row['loss']:.4f}"}
    if "eval_loss" in row:
        shown["eval"] = f"{row['eval_loss']:.4f}"
    shown |= {"tok/s": f"{row['tokens_per_second']:,.0f}", "mem": f"{row['memory_gib']:.1f} GiB"}
    if row["skipped_steps"] or not math.isfinite(row["grad_norm"]):
        shown["skipped"] = str(row["skipped_steps"])
    return shown
