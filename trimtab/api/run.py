"""A run, finished or not, as its folder describes it: `trimtab.open(folder)`, and what every job returns."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from trimtab.api.arguments import FOLDER, Arguments, argument_names, as_arguments, job_arguments
from trimtab.config.data_options import listed
from trimtab.config.jobs import TRAINED, GenerateOptions, TrainedOptions
from trimtab.config.objective_options import GIVEN
from trimtab.config.parser import parse_values
from trimtab.config.resolved_config import redact
from trimtab.config.training_options import CallOptions, CheckpointOptions, PretrainOptions, checkpoints_in
from trimtab.data.hub import ADAPTER, trusting
from trimtab.errors import Error, Interrupted, RunFailed, UserError, error_chain
from trimtab.files import LOCK, locked, remove, writing
from trimtab.job import (
    installation_error,
    launches_others,
    on_a_cluster,
    prepared,
    rehearse_job,
    start_job,
    trusting_code,
)
from trimtab.report.charts import EVALUATION, objective_panels
from trimtab.report.findings import alarms
from trimtab.report.formatting import short_number
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
                arguments = dataclasses.replace(arguments, functions=self._functions)
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


# ---- a call from Python as a run: its options are checked and started as those of a command are

RUNS = Path("runs")
KILLED = re.compile(r"process \d+ was ended by signal")  # the launcher's line, followed by where to resume
KEPT_LINES = 40
Job = TypeVar("Job", bound=CallOptions)
Listener = Callable[[dict[str, Any]], object]


def train(verb: str, arguments: Arguments, on_iteration: Listener | None) -> Path:
    """Run a training job and return its folder."""
    from trimtab.train.metrics import row_listener

    if on_iteration is not None and not callable(on_iteration):
        raise UserError(f"on_iteration takes a function, not {type(on_iteration).__name__}")
    parse_values(TRAINED[verb], arguments.values)  # before a folder is made for it
    with run_folder(verb, arguments.values) as values, row_listener(on_iteration):
        options: TrainedOptions = prepared(parse_values(TRAINED[verb], values), arguments.given.folder)
        check_reachable(options, arguments)
        if launches_others(options) and on_iteration is not None:
            raise UserError(
                f"--nproc {options.nproc}: on_iteration would be called in another process; leave it out, and read "
                "metrics.jsonl"
            )
        try:
            run(options, values, arguments, options.save_path)
        except (Interrupted, RunFailed) as ended:
            resume = f"trimtab.open({options.save_path!r}).resume() goes on"
            ended.args = (str(ended).replace("add --load_checkpoint to go on", resume),)
            raise
    return Path(options.save_path)


def run(
    options: TrainedOptions | GenerateOptions, values: Mapping[str, Any], arguments: Arguments, folder: str
) -> None:
    """Start a job, or its dry run, with its objects as files in `folder`; no error tells a key."""
    from trimtab.rewards.functions import register_functions

    try:
        with trusting_code(options), register_functions(arguments.functions):
            if options.dry_run:
                with TemporaryDirectory(prefix="trimtab-dry-run-") as temporary:
                    for line in rehearse_job(with_paths(options, arguments.given.move_to(temporary))):
                        print(redact(line, options))
                return
            if arguments.given and not isinstance(options, GenerateOptions):
                from trimtab.train.run_directory import set_aside_finished_run

                set_aside_finished_run(options, print)  # before the run does, which would set these files aside too
                with writing(f"--save_path {folder}: cannot write there"), locked("save_path", Path(folder)):
                    moved = arguments.given.move_to(folder)
            else:
                moved = arguments.given.move_to(folder)
            output = ProcessOutput(options.verb)
            output.check(start_job(with_paths(options, moved), in_words(values, moved), output))
    except Error as error:
        error.args = (redact(str(error), options),)  # notebooks are shared
        raise


@contextmanager
def run_folder(verb: str, values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The options with a folder, a new one where none is named. Where no run began in it, it is left as it was."""
    if values.get("save_path") is not None:
        if not str(values["save_path"]):
            raise UserError("save_path is empty; name a folder, or leave it out")
        folder, made = Path(str(values["save_path"])).expanduser(), False
    elif values.get("config") is not None:
        yield values
        return
    elif values.get("load_checkpoint"):
        raise UserError("resume: say which run goes on, with save_path")
    else:
        folder, made = _new_folder(verb), True
    existed = folder.exists() and not made
    try:
        yield {**values, "save_path": str(folder)}
    finally:
        if folder.is_dir() and not (folder / "manifest.json").exists():
            remove(folder / FOLDER)
            if not existed:
                remove(folder / LOCK)
                for place in (folder, RUNS) if made else (folder,):
                    with suppress(OSError):  # it is not empty
                        place.rmdir()


def _new_folder(verb: str) -> Path:
    for number in itertools.count(1):
        folder = RUNS / f"{verb}-{number}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"save_path: cannot make {folder} here ({error.strerror}); name a folder") from error
    raise AssertionError


class call_errors:
    """Inside, a known fault of the installation becomes a UserError, and messages name arguments instead of options
    (`names`: arguments by the options that they stand for). A trimtab.Error leaves without our traceback; its cause is
    the exception of the caller's own function, if that was the reason."""

    def __init__(self, job_class: type, names: Mapping[str, str]):
        self.job_class, self.names = job_class, names

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if not isinstance(error, Exception):
            return
        told = installation_error(error)
        if isinstance(told, Error):
            told.args = (as_arguments(str(told), self.job_class, self.names),)
            from trimtab.sandbox.calls import UserCodeError

            chain = error_chain(told, contexts=False)
            cause = next((link.__cause__ for link in chain if isinstance(link, UserCodeError)), None)
            raise told.with_traceback(None) from cause


def check_reachable(options: CallOptions, arguments: Arguments) -> None:
    """Refuse objects of this process in a run of several, which do not have them."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and arguments.given:
        raise UserError("under a launcher every process would write what was given: give files and folders instead")
    if not arguments.functions or not (on_a_cluster(options) or launches_others(options)):
        return
    name = next(iter(arguments.functions))
    how = "--ray" if on_a_cluster(options) else f"--nproc {getattr(options, 'nproc', 1)}"
    raise UserError(
        f"{how}: the reward {name} is a function of this process, and other processes do not have it: write it to a "
        f"file and give FILE.py:{name}"
    )


def with_paths(options: Job, moved: Callable[[Any], Any]) -> Job:
    """The options with the final paths of the objects' files."""
    changes = {
        known.name: moved(value)
        for known in dataclasses.fields(options)
        if isinstance(value := getattr(options, known.name), str)
    }
    return dataclasses.replace(options, **changes)


def in_words(values: Mapping[str, Any], moved: Callable[[Any], Any]) -> list[str]:
    """Options as the words of a command."""
    words: list[str] = []
    for name, value in values.items():
        if isinstance(value, list | tuple | range | set | frozenset):
            words += [f"--{name}", *map(str, value)]
        else:
            words.append(f"--{name}={moved(value)}")
    return words


class ProcessOutput:
    """The output of the first of several processes: passed on, and where they fail, raised as an error."""

    def __init__(self, verb: str):
        self.verb = verb
        self._lines: list[str] = []

    def __call__(self, line: str, error: bool) -> None:
        print(line, file=sys.stderr if error else sys.stdout, flush=True)
        if error:
            self._lines.append(line)
            del self._lines[:-KEPT_LINES]

    def check(self, code: int) -> None:
        """Raise what one process would have raised, if this exit code says that they failed."""
        if not code:
            return
        name = f"trimtab {self.verb}: "
        if killed := next((line for line in self._lines if KILLED.match(line)), None):
            raise RunFailed(f"{killed}; {self._lines[-1]}")
        kinds: list[tuple[str, type[Error]]] = [(f"{name}failed: ", RunFailed), (f"{name}error: ", UserError)]
        # A mistake ends one process with code 2, and others lose their connection to it: their lines may come later.
        for words, kind in reversed(kinds) if code == 2 else kinds:
            for line in reversed(self._lines):
                if words in line:
                    raise kind(line.partition(words)[2])
        if code > 128:
            said = next((line for line in reversed(self._lines) if line.startswith(name)), f"{name}stopped")
            raise Interrupted(code - 128, said.removeprefix(name))
        last = self._lines[-1] if self._lines else "it said nothing"
        raise RunFailed(f"a process ended with exit code {code}: {last}")
