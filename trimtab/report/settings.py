"""Which options of a run somebody chose, and which are as the job has them anyway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trimtab.config import jobs
from trimtab.config.catalogue import options_of
from trimtab.report.read import Run

PLACES = {"save_path", "ckpt_path", "wandb_run_name"}
"""Where a run puts things and what it is called: different in every run, and no reason for a different result."""


def defaults_of(job: str) -> dict[str, Any]:
    """The job's defaults, as options.yaml writes them; empty for a job that this version does not know."""
    for known in vars(jobs).values():
        if isinstance(known, type) and getattr(known, "verb", None) == job:
            described = options_of(known)
            return {name: _as_written(option.default) for name, option in described.items()}
    return {}


def chosen_options(run: Run) -> dict[str, Any]:
    """The options that are not at the job's default, in their order; also those the job does not know."""
    defaults = defaults_of(run.job)
    return {
        name: value
        for name, value in run.options.items()
        if name not in PLACES and (name not in defaults or not _equal(defaults[name], value))
    }


def differing_options(runs: Sequence[Run]) -> list[str]:
    """Names of the options in which the runs differ, in their order: those that all of them have, as presets of one
    job do, and of the others those that somebody chose."""
    chosen = {name for run in runs for name in chosen_options(run)}
    first, *others = [run for run in runs if run.options] or runs
    shared = set(first.options).intersection(*(other.options for other in others)) - PLACES
    return [
        name
        for name in dict.fromkeys(name for run in runs for name in run.options)
        if name in chosen | shared
        and any(not _equal(first.options.get(name), other.options.get(name)) for other in others)
    ]


def _as_written(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _equal(one: Any, other: Any) -> bool:
    # YAML reads 1 where 1.0 was meant, and 1 is not True.
    return one == other and isinstance(one, bool) == isinstance(other, bool)
