"""A training job from its checked options: the job's module is imported late, and a run ends with its report.

By convention the job `trimtab VERB` has its options in trimtab.config.jobs, as a class that says which module of
trimtab.train is its trainer: `supervised`, `rl` or `tail`. That has `train_TRAINER(options)` and
`dry_run_TRAINER(options)`.
"""

import importlib
import os
import signal
from collections.abc import Sequence
from functools import partial
from types import ModuleType

from trimtab.config.jobs import TrainedOptions
from trimtab.config.training_options import CheckpointOptions
from trimtab.distributed.supervision import LAUNCHER_SOCKET, Hear, is_lost_connection, launch_processes, watch
from trimtab.errors import Interrupted, RunFailed, UserError
from trimtab.running.leaving import show_what_is_left
from trimtab.running.preparing import launches_others, on_a_cluster
from trimtab.train.alarms import last_checkpoint_line, newest_checkpoint_mark


def start_training(options: TrainedOptions, module: str, words: Sequence[str], hear: Hear | None = None) -> int:
    """Train, in this process or in several, and return the exit code. `module` and `words`: the command that each of
    several processes is started with; `hear`: who gets what they say, if not the terminal."""
    if on_a_cluster(options):
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise UserError("--ray starts the processes of a run by itself: leave the launcher out, or --ray")
    elif launches_others(options):
        before = newest_checkpoint_mark(options)
        go_on = partial(_where_to_go_on, options, before)
        return launch_processes(module, words, options.nproc, options.hang_timeout, hear, go_on)
    watch(options.hang_timeout)
    _train(options)
    return 0


def rehearse_training(options: TrainedOptions) -> list[str]:
    return getattr(_trainer(options), f"dry_run_{options.trainer}")(options)


def _train(options: TrainedOptions) -> None:
    trainer = _trainer(options)
    before = newest_checkpoint_mark(options)
    try:
        getattr(trainer, f"train_{options.trainer}")(options)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") != "0":
            raise
        raise Interrupted(signal.SIGINT, f"interrupted; {_where_to_go_on(options, before)}") from None
    except RuntimeError as error:
        # torch raises nothing more telling in a process whose connection to another one breaks.
        if int(os.environ.get("WORLD_SIZE", 1)) == 1 or not is_lost_connection(str(error)):
            raise
        found, _, _ = str(error).partition(". ")
        if LAUNCHER_SOCKET in os.environ:  # our launcher says which, and where to go on
            raise RunFailed(f"lost its connection to another process of this run ({found})") from error
        ended = f"another process of this run has ended, and its own output says why ({found})"
        raise RunFailed(f"{ended}; {_where_to_go_on(options, before)}") from error
    except (Interrupted, RunFailed):
        # The page is wanted most where something went wrong; there is no model to point to.
        show_what_is_left(options, finished=False)
        raise
    show_what_is_left(options, finished=True)


def _where_to_go_on(options: CheckpointOptions, before: tuple[str, int] | None) -> str:
    """For a run that could write no checkpoint for its end: the one that there is."""
    from trimtab.train.checkpoint import newest_of_run

    return last_checkpoint_line(newest_of_run(options, before))


def _trainer(options: TrainedOptions) -> ModuleType:
    return importlib.import_module(f"trimtab.train.{options.trainer}")
