"""From options as they were given to options that a run takes: settled, checked, and fit for this machine."""

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from trimtab.config.option import Options, options_of
from trimtab.config.placement_options import ClusterOptions
from trimtab.config.resolved_config import hardware_problems, places, settled_and_checked
from trimtab.config.training_options import (
    CallOptions,
    CheckpointOptions,
    LoadOptions,
    PrecisionOptions,
    ProcessOptions,
)
from trimtab.data.hub import trusting
from trimtab.distributed.supervision import STORE_SOCKET
from trimtab.errors import UserError
from trimtab.files import check_free
from trimtab.models.folder import check_looks_like_model
from trimtab.running.speaking import say

Job = TypeVar("Job", bound=CallOptions)


def prepared(options: Job, unwritten: Path | None = None) -> Job:
    """The options as a run takes them. Oddities are said; what cannot be meant, or not be done here, is a UserError
    (what a machine lacks is only said in a dry run). `unwritten`: a folder whose models are written later."""
    name = f"trimtab {options.verb}"
    options, warnings = settled_and_checked(options)
    check_folders(options, unwritten)
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
    """Refuse folders that are seen at a glance not to be models, and those that another run has locked, before anything
    imports torch. What is inside them is looked at when they are read."""
    for name, option in options_of(type(options)).items():
        for place in places(options, name) if option.place == "model" else ():
            if unwritten is None or unwritten not in Path(place).parents:
                check_looks_like_model(place, option.flag)
    # Of several processes, the first locks for all.
    if isinstance(options, CheckpointOptions) and not options.dry_run and os.environ.get("RANK", "0") == "0":
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
    """Whether nobody has said already what every process of a run could say."""
    return os.environ.get("RANK", "0") == "0" and STORE_SOCKET not in os.environ


def _only_launches(options: CallOptions) -> bool:
    """Whether this process starts others that do the work."""
    return launches_others(options) or on_a_cluster(options)


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
