"""A run that goes on from its newest checkpoint, with the options of its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.api.arguments import resolved
from trimtab.api.rewards import argument_names
from trimtab.api.starting import in_one_class, train
from trimtab.config.data_options import listed
from trimtab.config.jobs import TRAINED
from trimtab.config.objective_options import GIVEN
from trimtab.config.training_options import checkpoints_in
from trimtab.errors import UserError
from trimtab.report.run_data import OPTIONS

if TYPE_CHECKING:
    from trimtab.api.run import Run

Functions = Mapping[str, Callable[..., Any]]


def resume(
    run: Run,
    functions: Functions,
    reward: Any,
    on_iteration: Callable[[dict[str, Any]], object] | None,
    options: Mapping[str, Any],
) -> Functions:
    """Go on, and return the functions that it has as rewards."""
    from trimtab.train.checkpoint import Checkpoints

    before = run.options
    for name in ("save_path", "load_checkpoint", "config"):
        if name in options:
            raise UserError(f"{name}: resume goes on in {run.path}; leave it out")
    kept = before.ckpt_path if before.ckpt_path != checkpoints_in(before.save_path) else None
    folder = str(options.get("ckpt_path") or kept or checkpoints_in(str(run.path)))
    if not Checkpoints(Path(folder), keep=1, keep_gib=0).has_sign():
        raise UserError(
            f"{run.path} has no checkpoint to go on from in {folder}: they are written when a run is stopped, and with "
            "save_steps"
        )
    named = {"config": run.path / OPTIONS, "save_path": run.path, "load_checkpoint": True}
    if reward is None:
        _check_functions(getattr(before, "reward_func", None), functions)
    job, names = TRAINED[run.job], argument_names({}, reward)
    with in_one_class(job, names), resolved(job, dict(options), named, reward=reward, names=names) as arguments:
        if reward is None:
            arguments = replace(arguments, functions=dict(functions))
        train(run.job, arguments, on_iteration=on_iteration)
    return arguments.functions


def _check_functions(places: str | None, functions: Functions) -> None:
    for place in listed(places):
        if place.startswith(GIVEN) and place.removeprefix(GIVEN) not in functions:
            raise UserError(
                f"this run was rewarded by the function {place.removeprefix(GIVEN)} of an earlier session: give it "
                "again, as resume(reward=...)"
            )
