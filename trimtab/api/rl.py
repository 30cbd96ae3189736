"""RL from Python: a function for every RL job, with prompts, rewards and environments that may be objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from trimtab.api.calls import documented, start
from trimtab.api.run import Run

if TYPE_CHECKING:
    from trimtab.api.types import Listener, Model, Reward, Rows, Tokenizer


@documented
def ppo(
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
) -> Run:
    """RL with a critic (PPO).

    Args:
        model: a folder, a hub name or a loaded PreTrainedModel.
        prompts: paths or hub names; or rows: texts, lists of messages, dicts of columns, a datasets.Dataset.
        reward: a function (queries, prompts, labels), (prompts, completions, **columns) or verl's, called in this
            process; or "file.py:function" (apart, with limits), a verifier's name, a reward model or its folder, an
            address; or a list of these, weighed by ``reward_weights``.
        environment: what answers turn by turn: a class, "file.py:Class" or a name such as "trimtab:guess".
        tools: functions that the model may call.
    """
    return _start("ppo", locals())


@documented
def grpo(
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
) -> Run:
    """RL by comparing the answers to a prompt (GRPO).

    Args:
        model: a folder, a hub name or a loaded PreTrainedModel.
        prompts: paths or hub names; or rows: texts, lists of messages, dicts of columns, a datasets.Dataset.
        reward: a function (queries, prompts, labels), (prompts, completions, **columns) or verl's, called in this
            process; or "file.py:function" (apart, with limits), a verifier's name, a reward model or its folder, an
            address; or a list of these, weighed by ``reward_weights``.
        environment: what answers turn by turn: a class, "file.py:Class" or a name such as "trimtab:guess".
        tools: functions that the model may call.
    """
    return _start("grpo", locals())


@documented
def dapo(
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
) -> Run:
    """GRPO that clips higher and samples on past groups that teach nothing (DAPO).

    Args:
        model: a folder, a hub name or a loaded PreTrainedModel.
        prompts: paths or hub names; or rows: texts, lists of messages, dicts of columns, a datasets.Dataset.
        reward: a function (queries, prompts, labels), (prompts, completions, **columns) or verl's, called in this
            process; or "file.py:function" (apart, with limits), a verifier's name, a reward model or its folder, an
            address; or a list of these, weighed by ``reward_weights``.
        environment: what answers turn by turn: a class, "file.py:Class" or a name such as "trimtab:guess".
        tools: functions that the model may call.
    """
    return _start("dapo", locals())


@documented
def reinforce(
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
) -> Run:
    """RL without a critic (REINFORCE++).

    Args:
        model: a folder, a hub name or a loaded PreTrainedModel.
        prompts: paths or hub names; or rows: texts, lists of messages, dicts of columns, a datasets.Dataset.
        reward: a function (queries, prompts, labels), (prompts, completions, **columns) or verl's, called in this
            process; or "file.py:function" (apart, with limits), a verifier's name, a reward model or its folder, an
            address; or a list of these, weighed by ``reward_weights``.
        environment: what answers turn by turn: a class, "file.py:Class" or a name such as "trimtab:guess".
        tools: functions that the model may call.
    """
    return _start("reinforce", locals())


@documented
def rloo(
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
) -> Run:
    """RL against the mean of a prompt's other answers (RLOO).

    Args:
        model: a folder, a hub name or a loaded PreTrainedModel.
        prompts: paths or hub names; or rows: texts, lists of messages, dicts of columns, a datasets.Dataset.
        reward: a function (queries, prompts, labels), (prompts, completions, **columns) or verl's, called in this
            process; or "file.py:function" (apart, with limits), a verifier's name, a reward model or its folder, an
            address; or a list of these, weighed by ``reward_weights``.
        environment: what answers turn by turn: a class, "file.py:Class" or a name such as "trimtab:guess".
        tools: functions that the model may call.
    """
    return _start("rloo", locals())


@documented
def rl(
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
) -> Run:
    """RL of any kind, as options or a ``config`` file say.

    Args:
        model: a folder, a hub name or a loaded PreTrainedModel.
        prompts: paths or hub names; or rows: texts, lists of messages, dicts of columns, a datasets.Dataset.
        reward: a function (queries, prompts, labels), (prompts, completions, **columns) or verl's, called in this
            process; or "file.py:function" (apart, with limits), a verifier's name, a reward model or its folder, an
            address; or a list of these, weighed by ``reward_weights``.
        environment: what answers turn by turn: a class, "file.py:Class" or a name such as "trimtab:guess".
        tools: functions that the model may call.
    """
    return _start("rl", locals())


@documented
def tail(
    model: Model | None = None,
    prompts: Rows | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    save_path: Any = None,
    resume: bool = False,
    on_iteration: Listener | None = None,
    **options: Any,
) -> Run:
    """RL that makes rare bad answers rarer (RePULSe and its baselines).

    Args:
        model: a folder, a hub name or a loaded PreTrainedModel.
        prompts: paths or hub names; or rows: texts, lists of messages, dicts of columns, a datasets.Dataset.
        reward: a function (queries, prompts, labels), (prompts, completions, **columns) or verl's, called in this
            process; or "file.py:function" (apart, with limits), a verifier's name, a reward model or its folder, an
            address; or a list of these, weighed by ``reward_weights``.
    """
    return _start("tail", locals())


def _start(verb: str, arguments: dict[str, Any]) -> Run:
    options = arguments.pop("options")
    places = {"pretrain": "model", "prompt_data": "prompts", "save_path": "save_path"}
    named = {option: arguments.pop(name) for option, name in places.items()}
    return start(verb, options, named, places, **arguments)
