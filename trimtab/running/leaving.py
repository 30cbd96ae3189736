"""What a training run leaves beside its model: answers before and after, its page, and a line that says where each
thing is."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from trimtab.config.jobs import TrainedOptions
from trimtab.config.training_options import AnswerOptions
from trimtab.running.speaking import say

Made = TypeVar("Made")


def show_what_is_left(options: TrainedOptions, finished: bool) -> None:
    """Write the run's page and say where everything is. No fault of the page may spoil a run that is done."""
    if os.environ.get("RANK", "0") != "0":
        return
    folder = Path(options.save_path)
    places: dict[str, Path | str] = {"metrics": folder / "metrics.jsonl"}
    if finished:
        places = {"adapter" if options.lora_rank else "model": f"{folder}/", **places}
        _attempt("samples were", lambda: _write_samples(options), options)
    written = _attempt("report was", lambda: _write_report(folder), options)
    if written is not None:
        places["report"] = written
    if finished and (memory := _attempt("memory was", lambda: _memory_line(folder), options)):
        places["memory"] = memory
    for name, place in places.items():
        print(f"{name:9}{place}", flush=True)


def _write_samples(options: TrainedOptions) -> Path | None:
    # Answers of an earlier run in this folder are not this run's.
    (Path(options.save_path) / "samples.json").unlink(missing_ok=True)
    if not isinstance(options, AnswerOptions) or not options.report_samples:
        return None
    from trimtab.evaluate.before_and_after import write_samples

    return write_samples(options)


def _write_report(folder: Path) -> Path:
    from trimtab.report.page import write_report

    return write_report(folder)


def _memory_line(folder: Path) -> str | None:
    """What a plan said and what was then measured."""
    from trimtab.report.run_data import read_run

    run = read_run(folder)
    planned = run.manifest.get("planned_memory_gib")
    measured = max((value for _, value in run.series("memory_gib")), default=None)
    if planned is None or measured is None:
        return None
    return f"{planned:.2f} GiB planned, {measured:.2f} GiB measured at the peak"


def _attempt(what: str, action: Callable[[], Made], options: TrainedOptions) -> Made | None:
    try:
        return action()
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        say(f"trimtab {options.verb}: warning: no {what} written: {reason}", options)
        return None
