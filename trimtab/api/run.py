"""A run, finished or not, as its folder describes it: `trimtab.open(folder)`, and what every job returns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.api.arguments import argument_names, job_arguments
from trimtab.api.call import Listener, call_errors, train
from trimtab.config.data_options import listed
from trimtab.config.jobs import TRAINED, TrainedOptions
from trimtab.config.objective_options import GIVEN
from trimtab.config.parser import parse_values
from trimtab.config.training_options import CheckpointOptions, PretrainOptions, checkpoints_in
from trimtab.data.hub import trusting
from trimtab.errors import UserError
from trimtab.models.folder import ADAPTER
from trimtab.report.findings import alarms
from trimtab.report.formatting import short_number
from trimtab.report.panels import EVALUATION, objective_panels
from trimtab.report.run_data import METRICS, OPTIONS, Point, RunData, read_run

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def open(folder: str | os.PathLike[str]) -> Run:
    """The run in this folder: the `save_path` of a function or a command, while it works or afterwards."""
    path = Path(folder).expanduser()
    with call_errors(CheckpointOptions, {}):
        read_run(path)  # which says what is wrong with a folder that is none
    return Run(path)


class Run:
    """A run as it is on disk; its files are read anew for every property."""

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
        file = self.path / OPTIONS
        if not file.is_file():
            raise UserError(f"{self.path}: no {OPTIONS} in this folder, so nobody knows what it was started with")
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
        from transformers import AutoModelForCausalLM

        from trimtab.models.pretrained import from_pretrained
        from trimtab.models.reward import AutoClassifier

        options = self._pretrain_options()
        kind = AutoClassifier if self.job == "rm" else AutoModelForCausalLM
        arguments.setdefault("dtype", "auto")
        with trusting(options.trust_remote_code):
            if not (self.path / ADAPTER).is_file():
                return from_pretrained(kind, str(self.path), flag="run", **arguments)
            from peft import PeftModel

            base = from_pretrained(kind, options.pretrain, flag="the base model of the run", **arguments)
            model = PeftModel.from_pretrained(base, str(self.path))
            return model.merge_and_unload() if merged else model

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the trained model."""
        from transformers import AutoTokenizer

        from trimtab.models.pretrained import from_pretrained

        with trusting(self._pretrain_options().trust_remote_code):
            return from_pretrained(AutoTokenizer, str(self.path), flag="run")

    def report(self) -> Path:
        """Write the run's page anew, and say where it is."""
        from trimtab.report.page import write_report

        return write_report(self.path)

    def resume(self, *, reward: Any = None, on_iteration: Listener | None = None, **options: Any) -> Run:
        """Go on from the newest checkpoint, with the run's own options and these in their place. `reward`: functions
        that it was given by another session."""
        from trimtab.train.checkpoint import Checkpoints

        before, job = self.options, TRAINED[self.job]
        for name in ("save_path", "load_checkpoint", "config"):
            if name in options:
                raise UserError(f"{name}: resume goes on in {self.path}; leave it out")
        kept = before.ckpt_path if before.ckpt_path != checkpoints_in(before.save_path) else None
        folder = str(options.get("ckpt_path") or kept or checkpoints_in(str(self.path)))
        if not Checkpoints(Path(folder), keep=1, keep_gib=0).has_sign():
            raise UserError(
                f"{self.path} has no checkpoint to go on from in {folder}: they are written when a run is stopped, and "
                "with save_steps"
            )
        for place in listed(getattr(before, "reward_func", None)) if reward is None else ():
            if place.startswith(GIVEN) and place.removeprefix(GIVEN) not in self._functions:
                raise UserError(
                    f"this run was rewarded by the function {place.removeprefix(GIVEN)} of an earlier session: give it "
                    "again, as resume(reward=...)"
                )
        named = {"config": self.path / OPTIONS, "save_path": self.path, "load_checkpoint": True}
        names = argument_names({}, reward)
        with call_errors(job, names), job_arguments(job, options, named, reward=reward, names=names) as arguments:
            if reward is None:
                arguments = replace(arguments, functions=self._functions)
            train(self.job, arguments, on_iteration)
        return Run(self.path, functions=arguments.functions)

    def _pretrain_options(self) -> PretrainOptions:
        """The options of a run that left a whole model."""
        if not self.finished:
            raise UserError(
                f"{self.path} has no whole model yet: the run is still going, or was stopped; "
                f"trimtab.open({str(self.path)!r}).resume() goes on"
            )
        options: Any = self.options
        return options

    @property
    def _started(self) -> bool:
        return (self.path / METRICS).is_file()

    def _read(self) -> RunData:
        return read_run(self.path)

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


# ---- a run in a few lines, as a notebook shows it

CURVES = 4
POINTS = 160
WIDTH, HEIGHT = 150, 36
MOST_ALARMS = 5


def html_card(run: RunData, alarms: list[str]) -> str:
    """Small curves, last figures and alarms as one piece of HTML."""
    state = "finished" if run.has_saved_model else "not finished"
    steps = f"{run.steps} {run.unit}{'s' * (run.steps != 1)}"
    head = f"<b>trimtab {escape(run.job)}</b> {escape(str(run.folder))} · {state}, {steps}"
    curves = "".join(_figure(run, name, title) for name, title in _main_figures(run))
    told = "".join(f"<li>{escape(alarm)}</li>" for alarm in alarms[:MOST_ALARMS])
    more = f"<li>and {len(alarms) - MOST_ALARMS} more</li>" if len(alarms) > MOST_ALARMS else ""
    listed = f"<ul style='margin:4px 0 0 18px'>{told}{more}</ul>" if alarms else ""
    page = run.folder / "report.html"
    where = f"<div style='opacity:.7'>report: {escape(str(page))}</div>" if page.is_file() else ""
    return (
        f"<div style='font:13px system-ui,sans-serif'><div>{head}</div>"
        f"<div style='display:flex;flex-wrap:wrap;gap:18px;margin-top:6px'>{curves}</div>{listed}{where}</div>"
    )


def last_figures(run: RunData, most: int = 3) -> list[tuple[str, str]]:
    """The newest values of what matters most to the job."""
    found = [(name, run.last(name)) for name, _ in _main_figures(run)[:most]]
    return [(name, short_number(value)) for name, value in found if value is not None]


def _main_figures(run: RunData) -> list[tuple[str, str]]:
    """(metric, title) of the first panels of the run's report, each also as evaluated, where it was."""
    chosen: dict[str, str] = {}
    for panel in objective_panels([run]):
        metric = next(iter(panel.metrics))
        for name in (metric, f"{EVALUATION}{metric}"):
            if run.series(name):
                told = f"{panel.title}, evaluated" if name.startswith(EVALUATION) else panel.title
                chosen.setdefault(name, told)
    return list(chosen.items())[:CURVES]


def _figure(run: RunData, name: str, title: str) -> str:
    points = run.series(name)
    return (
        f"<div><div style='opacity:.7'>{escape(title)}</div>{_sparkline(points)}"
        f"<div>{short_number(points[0][1])} → <b>{short_number(points[-1][1])}</b></div></div>"
    )


def _sparkline(points: list[Point]) -> str:
    kept = points[:: -(-len(points) // POINTS)]
    kept = kept if kept[-1] == points[-1] else [*kept, points[-1]]
    steps, values = [step for step, _ in kept], [value for _, value in kept]
    width, height = steps[-1] - steps[0] or 1, max(values) - min(values) or 1.0
    places = " ".join(
        f"{2 + (WIDTH - 4) * (step - steps[0]) / width:.1f},"
        f"{2 + (HEIGHT - 4) * (1 - (value - min(values)) / height):.1f}"
        for step, value in kept
    )
    return (
        f"<svg width={WIDTH} height={HEIGHT} role=img aria-hidden=true><polyline points='{places}' fill=none "
        "stroke=currentColor stroke-width=1.5 stroke-linejoin=round /></svg>"
    )
