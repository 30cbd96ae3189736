"""A run, finished or not, as its folder describes it: `trimtab.open(folder)`, and what every job returns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.api.arguments import argument_names, resolved
from trimtab.api.call import call_errors, train
from trimtab.config.data_options import listed
from trimtab.config.jobs import TRAINED, TrainedOptions
from trimtab.config.objective_options import GIVEN
from trimtab.config.parser import parse_values
from trimtab.config.training_options import CheckpointOptions, PretrainOptions, checkpoints_in
from trimtab.data.hub import trusting
from trimtab.errors import UserError
from trimtab.models.folder import ADAPTER
from trimtab.models.pretrained import from_pretrained
from trimtab.models.reward import AutoClassifier
from trimtab.report import run_data
from trimtab.report.findings import alarms
from trimtab.report.formatting import short_number
from trimtab.report.panels import EVALUATION, objective_panels
from trimtab.report.run_data import OPTIONS, Point

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


CURVES = 4
POINTS = 160
WIDTH, HEIGHT = 150, 36
MOST_ALARMS = 5


def html_card(run: run_data.RunData, alarms: list[str]) -> str:
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


def last_figures(run: run_data.RunData, most: int = 3) -> list[tuple[str, str]]:
    """The newest values of what matters most to the job."""
    found = [(name, run.last(name)) for name, _ in _main_figures(run)[:most]]
    return [(name, short_number(value)) for name, value in found if value is not None]


def _main_figures(run: run_data.RunData) -> list[tuple[str, str]]:
    """(metric, title) of the first pictures of the run's report; of each what was evaluated, where that was."""
    chosen: dict[str, str] = {}
    for picture in objective_panels([run]):
        metric = next(iter(picture.metrics))
        for name in (metric, f"{EVALUATION}{metric}"):
            if run.series(name):
                told = f"{picture.title}, evaluated" if name.startswith(EVALUATION) else picture.title
                chosen.setdefault(name, told)
    return list(chosen.items())[:CURVES]


def _figure(run: run_data.RunData, name: str, title: str) -> str:
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


# ---- the trained model


def load_model(run: Run, *, merged: bool = False, **arguments: Any) -> Any:
    import transformers

    _check_whole(run)
    options = _options(run)
    kind = AutoClassifier if run.job == "rm" else transformers.AutoModelForCausalLM
    arguments.setdefault("dtype", "auto")
    with trusting(options.trust_remote_code):
        if not (run.path / ADAPTER).is_file():
            return from_pretrained(kind, str(run.path), flag="run", **arguments)
        from peft import PeftModel

        base = from_pretrained(kind, options.pretrain, flag="the base model of the run", **arguments)
        model = PeftModel.from_pretrained(base, str(run.path))
        return model.merge_and_unload() if merged else model


def load_tokenizer(run: Run) -> Any:
    import transformers

    _check_whole(run)
    with trusting(_options(run).trust_remote_code):
        return from_pretrained(transformers.AutoTokenizer, str(run.path), flag="run")


def _options(run: Run) -> PretrainOptions:
    options: Any = run.options
    return options


def _check_whole(run: Run) -> None:
    if not run.finished:
        raise UserError(
            f"{run.path} has no whole model yet: the run is still going, or was stopped; "
            f"trimtab.open({str(run.path)!r}).resume() goes on"
        )


# ---- resume

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
    with call_errors(job, names), resolved(job, dict(options), named, reward=reward, names=names) as arguments:
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


# ---- the run


def open(folder: str | os.PathLike[str]) -> Run:
    """The run in this folder: the `save_path` of a function or a command, while it works or afterwards."""
    path = Path(folder).expanduser()
    with call_errors(CheckpointOptions, {}):
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

        return load_model(self, merged=merged, **arguments)

    def tokenizer(self) -> PreTrainedTokenizerBase:

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
