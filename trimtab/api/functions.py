"""The functions of the jobs: `trimtab.sft`, `trimtab.grpo` and the others, `trimtab.generate`, `trimtab.options`.

A training job's function is one of five shapes. Each shape is written once, as a protocol: its `__call__` is what type
checkers, editors, `help()` and `inspect.signature` show.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from trimtab.api.arguments import argument_names, job_arguments
from trimtab.api.run import Listener, Run, call_errors, check_reachable, run, train
from trimtab.config.jobs import JOBS, TRAINED, GenerateOptions
from trimtab.config.option import Option, options_of
from trimtab.config.parser import parse_values
from trimtab.errors import UserError
from trimtab.job import prepared

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    Place: TypeAlias = str | os.PathLike[str]
    Model: TypeAlias = Place | PreTrainedModel
    Tokenizer: TypeAlias = PreTrainedTokenizerBase
    Rows: TypeAlias = Place | Dataset | Iterable[str | list[Mapping[str, Any]] | Mapping[str, Any]]
    Reward: TypeAlias = Callable[..., Any] | Place | PreTrainedModel


class SupervisedFunction(Protocol):
    """The function of a job that learns from fixed data."""

    def __call__(
        self,
        model: Model | None = None,
        data: Rows | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        save_path: Any = None,
        resume: bool = False,
        on_iteration: Listener | None = None,
        **options: Any,
    ) -> Run: ...


class ReferenceFunction(Protocol):
    """The function of a job that learns from fixed data and stays close to a reference model."""

    def __call__(
        self,
        model: Model | None = None,
        data: Rows | None = None,
        reference: Model | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        save_path: Any = None,
        resume: bool = False,
        on_iteration: Listener | None = None,
        **options: Any,
    ) -> Run: ...


class DistillationFunction(Protocol):
    """The function of a job that learns from a teacher model."""

    def __call__(
        self,
        model: Model | None = None,
        data: Rows | None = None,
        teacher: Model | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        save_path: Any = None,
        resume: bool = False,
        on_iteration: Listener | None = None,
        **options: Any,
    ) -> Run: ...


class RLFunction(Protocol):
    """The function of an RL job: prompts, rewards and environments may be objects."""

    def __call__(
        self,
        model: Model | None = None,
        prompts: Rows | None = None,
        reward: Reward | Sequence[Reward] | None = None,
        *,
        environment: Any = None,
        tools: Sequence[Callable[..., Any]] = (),
        tokenizer: Tokenizer | None = None,
        save_path: Any = None,
        resume: bool = False,
        on_iteration: Listener | None = None,
        **options: Any,
    ) -> Run: ...


class TailFunction(Protocol):
    """The function of an RL job without environments."""

    def __call__(
        self,
        model: Model | None = None,
        prompts: Rows | None = None,
        reward: Reward | Sequence[Reward] | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        save_path: Any = None,
        resume: bool = False,
        on_iteration: Listener | None = None,
        **options: Any,
    ) -> Run: ...


ARGUMENTS = {
    "model": "a folder, a hub name or a loaded PreTrainedModel.",
    "prompts": "paths or hub names; or rows: texts, lists of messages, dicts of columns, a datasets.Dataset.",
    "data": """paths or hub names; or rows: dicts of columns, lists of messages, a datasets.Dataset;
            {rows}.""",
    "reward": """a function (queries, prompts, labels), (prompts, completions, **columns) or verl's, called in this
            process; or "file.py:function" (apart, with limits), a verifier's name, a reward model or its folder, an
            address; or a list of these, weighed by ``reward_weights``.""",
    "environment": """what answers turn by turn: a class, "file.py:Class" or a name such as "trimtab:guess".""",
    "tools": "functions that the model may call.",
    "reference": "the model that is stayed close to; unset: the model as it is at the start.",
    "teacher": "the model to learn from, with the same vocabulary.",
    "tokenizer": "of a loaded model; a folder or a name brings its own.",
    "save_path": "folder of the run; unset: runs/{verb}-N, the next that is free.",
    "resume": "go on from the newest checkpoint in save_path, if there is one.",
    "on_iteration": "called with every row of metrics as it is written (a dict).",
}
DOCSTRING = """{about}

    Args:
        {arguments}

    Every other option of the command is a keyword, under the flag's name and checked by the same code:
    ``trimtab.options({verb!r})`` lists them, ``trimtab {verb} --help all`` and the documents explain them.

    Returns:
        A Run: metrics, alarms, model(), report(), resume().

    Raises:
        UserError: a mistake, in one line. Whatever ends a run on purpose is a trimtab.Error.
        RunFailed: training went wrong, or a reward did.
        Interrupted: Ctrl-C; everything is saved, and the message says how to go on.
"""
STAND_FOR = {
    "model": "pretrain",
    "prompts": "prompt_data",
    "data": "dataset",
    "reference": "ref_pretrain",
    "teacher": "teacher_model",
    "save_path": "save_path",
    "resume": "load_checkpoint",
}
"""The options that arguments stand for."""
Shape = TypeVar("Shape")


def _function(verb: str, shape: type[Shape], about: str, rows: str = "") -> Shape:
    """The function of a training job; `rows`: what its data are."""
    written = inspect.signature(shape.__call__)
    signature = inspect.Signature([*written.parameters.values()][1:], return_annotation=written.return_annotation)
    described = [
        f"{name}: {ARGUMENTS[name].format(verb=verb, rows=rows)}" for name in signature.parameters if name != "options"
    ]

    def function(*positional: Any, **keywords: Any) -> Run:
        try:
            bound = signature.bind(*positional, **keywords)
        except TypeError as error:
            raise TypeError(f"{verb}(): {error}") from None
        bound.apply_defaults()
        return _start(verb, **bound.arguments)

    function.__name__ = function.__qualname__ = verb
    function.__doc__ = DOCSTRING.format(about=about, verb=verb, arguments="\n        ".join(described))
    vars(function)["__signature__"] = signature
    return function  # type: ignore[return-value]


def _start(
    verb: str,
    options: dict[str, Any],
    tokenizer: Tokenizer | None,
    on_iteration: Listener | None,
    reward: Any = None,
    environment: Any = None,
    tools: Sequence[Callable[..., Any]] = (),
    **named: Any,
) -> Run:
    """Train with the arguments of a function; `named`: the arguments that stand for options."""
    job = TRAINED[verb]
    values = {STAND_FOR[name]: value for name, value in named.items()}
    values["load_checkpoint"] = values["load_checkpoint"] or None
    names = argument_names({STAND_FOR[name]: name for name in named}, reward)
    objects = {"tokenizer": tokenizer, "reward": reward, "environment": environment, "tools": tools, "names": names}
    with call_errors(job, names), job_arguments(job, options, values, **objects) as arguments:
        path = train(verb, arguments, on_iteration)
    return Run(path, functions=arguments.functions)


CONVERSATIONS = "conversations, or prompts and answers in columns (``input_key``, ``output_key``)"
PAIRS = "rows with a chosen and a rejected answer"

sft = _function("sft", SupervisedFunction, "Supervised fine-tuning.", CONVERSATIONS)
rm = _function("rm", SupervisedFunction, "A reward model, from pairs of answers.", PAIRS)
prm = _function(
    "prm",
    SupervisedFunction,
    "A process reward model, from answers judged step by step.",
    "rows with answers in steps and their labels",
)
dpo = _function("dpo", ReferenceFunction, "Preference optimisation from pairs: DPO, IPO, cDPO, ORPO, SimPO.", PAIRS)
kto = _function(
    "kto",
    ReferenceFunction,
    "Preference optimisation from single judged answers.",
    "rows with an answer and whether it is good",
)
kd = _function("kd", DistillationFunction, "Distillation from a teacher model.", CONVERSATIONS)
ppo = _function("ppo", RLFunction, "RL with a critic (PPO).")
grpo = _function("grpo", RLFunction, "RL by comparing the answers to a prompt (GRPO).")
dapo = _function("dapo", RLFunction, "GRPO that clips higher and samples on past groups that teach nothing (DAPO).")
reinforce = _function("reinforce", RLFunction, "RL without a critic (REINFORCE++).")
rloo = _function("rloo", RLFunction, "RL against the mean of a prompt's other answers (RLOO).")
rl = _function("rl", RLFunction, "RL of any kind, as options or a ``config`` file say.")
tail = _function("tail", TailFunction, "RL that makes rare bad answers rarer (RePULSe and its baselines).")


def generate(
    model: Model | None = None,
    prompts: Rows | None = None,
    reward: Any = None,
    *,
    tokenizer: Tokenizer | None = None,
    output_path: Any = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Answers to many prompts, and their scores where a reward is given: a list of rows.

    Args:
        model: a folder, a hub name or a loaded PreTrainedModel.
        prompts: paths or hub names; or rows: texts, lists of messages, dicts of columns, a datasets.Dataset.
        reward: as in ``trimtab.grpo``.
        output_path: a JSONL file for the rows, which is made while they come; a call that was stopped goes on there.

    Every other option of the command is a keyword, under the flag's name and checked by the same code:
    ``trimtab.options("generate")`` lists them, such as ``best_of_n``, ``max_new_tokens`` and ``temperature``.
    """
    named = {"pretrain": model, "dataset": prompts, "output_path": output_path}
    names = argument_names({"pretrain": "model", "dataset": "prompts"}, reward)
    objects = {"tokenizer": tokenizer, "reward": reward, "names": names}
    with (
        call_errors(GenerateOptions, names),
        job_arguments(GenerateOptions, options, named, **objects) as arguments,
        TemporaryDirectory(prefix="trimtab-generate-", ignore_cleanup_errors=True) as folder,
    ):
        if output_path is None and not options.get("config"):
            arguments.values["output_path"] = f"{folder}/answers.jsonl"
        job = prepared(parse_values(GenerateOptions, arguments.values), arguments.given.folder)
        check_reachable(job, arguments)
        run(job, arguments.values, arguments, folder)
        if job.dry_run:
            return []
        with Path(job.output_path).open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]


# ---- the options of a job


class OptionList(Mapping[str, Any]):
    """A job's options and their defaults: a mapping, which shows itself as a table."""

    def __init__(self, verb: str, containing: str = ""):
        self.verb = verb
        known = options_of(JOBS[verb]).values()
        self._options = {option.name: option for option in known if containing in f"{option.name} {option.help}"}

    def __getitem__(self, name: str) -> Any:
        return self._options[name].default

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)

    def help(self, name: str) -> str:
        """What the option does."""
        return self._options[name].help

    def __repr__(self) -> str:
        width = max(map(len, self._options), default=0)
        lines = [f"options of trimtab {self.verb}"]
        for section, found in groupby(self._options.values(), key=lambda option: option.section):
            lines += ["", section]
            lines += [f"  {option.name:<{width}}  {_default(option)}: {option.help}" for option in found]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = ""
        for section, found in groupby(self._options.values(), key=lambda option: option.section):
            rows += f"<tr><th colspan=3 style='text-align:left'>{escape(section)}</th></tr>"
            for option in found:
                cells = (f"<code>{option.name}</code>", f"<code>{escape(_default(option))}</code>", escape(option.help))
                rows += "<tr>" + "".join(f"<td style='text-align:left'>{cell}</td>" for cell in cells) + "</tr>"
        return f"<table>{rows}</table>"


def _default(option: Option) -> str:
    return "required" if option.required else repr(option.default)


def options(verb: str, containing: str = "") -> OptionList:
    """The options of a job, with their defaults and what they do; `containing`: only those with this word."""
    if verb not in JOBS:
        raise UserError(f"options: there is no job {verb!r}; the jobs are {', '.join(JOBS)}")
    return OptionList(verb, containing)
