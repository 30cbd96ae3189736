"""A run, finished or not, as its folder tells of it: `trimtab.open(folder)`, and what every job returns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.api.card import html_card, last_figures
from trimtab.api.starting import in_one_class
from trimtab.config.jobs import TRAINED, TrainedOptions
from trimtab.config.parser import parse_values
from trimtab.config.training_options import CheckpointOptions
from trimtab.errors import UserError
from trimtab.report import run_data
from trimtab.report.findings import alarms

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def open(folder: str | os.PathLike[str]) -> Run:
    """The run in this folder: the `save_path` of a function or a command, while it works or afterwards."""
    path = Path(folder).expanduser()
    with in_one_class(CheckpointOptions, {}):
        run_data.read_run(path)  # which says what is wrong with a folder that is none
    return Run(path)


class Run:
    """A run as it is on disk; what it tells is read anew whenever it is asked for."""

    def __init__(self, path: str | os.PathLike[str], *, functions: Mapping[str, Callable[..., Any]] | None = None):
        """`functions`: the rewards that it was given in Python, to go on with."""
        self.path = Path(path).expanduser().resolve()
        self._functions = dict(functions or {})

    @property
    def job(self) -> str:
        """The verb: sft, grpo and so on."""
        return self._read().job

    @property
    def options(self) -> TrainedOptions:
        """What it was started with, settled: `run.options.seed`."""
        verb = self.job
        if verb not in TRAINED:
            raise UserError(f"{self.path}: the job {verb!r} is none that this version trains")
        file = self.path / run_data.OPTIONS
        if not file.is_file():
            raise UserError(
                f"{self.path}: no {run_data.OPTIONS} in this folder, so nobody knows what it was started with"
            )
        return parse_values(TRAINED[verb], {"config": file})

    @property
    def finished(self) -> bool:
        """Whether it came to its end and left a whole model."""
        return self._started and self._read().has_saved_model

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A row for every step (RL: iteration), as it was written. `pandas.DataFrame(run.metrics)` takes them."""
        return self._read().rows if self._started else []

    @property
    def alarms(self) -> list[str]:
        """What looked wrong while it worked, in words."""
        return alarms(self._read()) if self._started else []

    def rollouts(self, step: int | None = None) -> Iterator[dict[str, Any]]:
        """Answers that the run kept, with prompt, reward and tokens; `step`: of this iteration alone."""
        found = self._read().rollouts if self._started else []
        return (row for row in found if step is None or row["step"] == step)

    def model(self, *, merged: bool = False, **arguments: Any) -> PreTrainedModel:
        """The trained model, loaded by transformers with these arguments of `from_pretrained`. An adapter comes on its
        base model, as PEFT has it and as it was trained; `merged`: as one model."""
        from trimtab.api.loading import load_model

        return load_model(self, merged=merged, **arguments)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        from trimtab.api.loading import load_tokenizer

        return load_tokenizer(self)

    def report(self) -> Path:
        """Write the run's page anew, and say where it is."""
        from trimtab.report.page import write_report

        return write_report(self.path)

    def resume(
        self,
        *,
        reward: Any = None,
        on_iteration: Callable[[dict[str, Any]], object] | None = None,
        **options: Any,
    ) -> Run:
        """Go on from the newest checkpoint, with the run's own options and these in their place. `reward`: functions
        that it was given by another session."""
        from trimtab.api.resuming import resume

        functions = resume(self, self._functions, reward, on_iteration, options)
        return Run(self.path, functions=functions)

    @property
    def _started(self) -> bool:
        return (self.path / run_data.METRICS).is_file()

    def _read(self) -> run_data.RunData:
        return run_data.read_run(self.path)

    def __repr__(self) -> str:
        shown = os.path.relpath(self.path) if self.path.is_relative_to(Path.cwd()) else str(self.path)
        if not self._started:
            return f"<trimtab run {shown}: no step yet>"
        run = self._read()
        state = "finished" if run.has_saved_model else "not finished"
        told = [f"{run.job}, {state} after {run.steps} {run.unit}{'s' * (run.steps != 1)}"]
        told += [f"{name} {value}" for name, value in last_figures(run)]
        found = alarms(run)
        told += [f"{len(found)} alarm{'s' * (len(found) > 1)}"] if found else []
        return f"<trimtab run {shown}: {', '.join(told)}>"

    def _repr_html_(self) -> str:
        return html_card(self._read(), alarms(self._read())) if self._started else f"<p>{self!r}</p>"
