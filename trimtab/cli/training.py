"""The body of every training command: the job's module is imported late, and a run ends with its report.

By convention the job `trimtab VERB` has its options in trimtab.config.jobs, as a class that says which module of
trimtab.train is its trainer: VERB's own, or one that several jobs share. That has `train_TRAINER(options)` and
`rehearse_TRAINER(options)`.
"""

import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from trimtab.cli.run import on_a_cluster, run_job, say
from trimtab.config.groups import AnswerOptions, CheckpointOptions
from trimtab.config.jobs import TRAINED, TrainedOptions
from trimtab.distributed.launch import launch
from trimtab.distributed.watch import watch
from trimtab.errors import Interrupted, RunFailed, UserError
from trimtab.output import steady_output

Made = TypeVar("Made")


def main_of(verb: str) -> Callable[..., int]:
    """The `main` of the command `trimtab VERB`."""

    def main(argv: Sequence[str] | None = None) -> int:
        return training_main(verb, argv)

    return main


def training_main(verb: str, argv: Sequence[str] | None) -> int:
    """Run a training job and return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)

    def start(options: TrainedOptions) -> int:
        if on_a_cluster(options):
            if int(os.environ.get("WORLD_SIZE", 1)) > 1:
                raise UserError("--ray starts the processes of a run by itself: leave the launcher out, or --ray")
        elif options.nproc > 1 and "WORLD_SIZE" not in os.environ:
            return launch(f"trimtab.cli.train_{options.verb}", words, options.nproc, options.hang_timeout)
        watch(options.hang_timeout)
        _train(options)
        return 0

    with steady_output():
        return run_job(TRAINED[verb], argv, start, _rehearse)


def _rehearse(options: TrainedOptions) -> list[str]:
    return getattr(_trainer(options), f"rehearse_{options.trainer}")(options)


def _train(options: TrainedOptions) -> None:
    trainer = _trainer(options)
    from trimtab.train.checkpoint import mark_of_newest

    before = mark_of_newest(options)
    try:
        getattr(trainer, f"train_{options.trainer}")(options)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") != "0":
            raise
        raise Interrupted(signal.SIGINT, f"interrupted; {_where_to_go_on(options, before)}") from None
    except (Interrupted, RunFailed):
        # The page is wanted most where something went wrong; there is no model to point to.
        _show_what_is_left(options, finished=False)
        raise
    _show_what_is_left(options, finished=True)


def _where_to_go_on(options: CheckpointOptions, before: tuple[str, int] | None) -> str:
    """For who leaves at once, with a second Ctrl-C: the checkpoint that there is."""
    from trimtab.train.checkpoint import newest_of_run
    from trimtab.train.endings import last_checkpoint

    return last_checkpoint(newest_of_run(options, before))


def _trainer(options: TrainedOptions) -> ModuleType:
    return importlib.import_module(f"trimtab.train.{options.trainer}")


def _show_what_is_left(options: TrainedOptions, finished: bool) -> None:
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
    from trimtab.report.read import read_run

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
