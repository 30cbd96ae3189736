"""Learning from fixed data, from Python: a function for every supervised job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.api.calls import documented, start
from trimtab.api.run import Run

if TYPE_CHECKING:
    from trimtab.api.types import Listener, Model, Rows, Tokenizer


@documented
def sft(
    model: Model | None = None,
    data: Rows | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    save_path: Any = None,
    resume: bool = False,
    on_iteration: Listener | None = None,
    **options: Any,
) -> Run:
    """Supervised fine-tuning.

    Args:
        model: a folder, a hub name or a loaded PreTrainedModel.
        data: paths or hub names; or rows: dicts of columns, lists of messages, a datasets.Dataset;
            conversations, or prompts and answers in columns (``input_key``, ``output_key``).
    """
    return _start("sft", locals())


@documented
def rm(
    model: Model | None = None,
    data: Rows | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    save_path: Any = None,
    resume: bool = False,
    on_iteration: Listener | None = None,
    **options: Any,
) -> Run:
    """A reward model, from pairs of answers.

    Args:
        model: a folder, a hub name or a loaded PreTrainedModel.
        data: paths or hub names; or rows: dicts of columns, lists of messages, a datasets.Dataset;
            rows with a chosen and a rejected answer.
    """
    return _start("rm", locals())


@documented
def prm(
    model: Model | None = None,
    data: Rows | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    save_path: Any = None,
    resume: bool = False,
    on_iteration: Listener | None = None,
    **options: Any,
) -> Run:
    """A process reward model, from answers judged step by step.

    Args:
        model: a folder, a hub name or a loaded PreTrainedModel.
        data: paths or hub names; or rows: dicts of columns, lists of messages, a datasets.Dataset;
            rows with answers in steps and their labels.
    """
    return _start("prm", locals())


@documented
def dpo(
    model: Model | None = None,
    data: Rows | None = None,
    reference: Model | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    save_path: Any = None,
    resume: bool = False,
    on_iteration: Listener | None = None,
    **options: Any,
) -> Run:
    """Preference optimisation from pairs: DPO, IPO, cDPO, ORPO, SimPO.

    Args:
        model: a folder, a hub name or a loaded PreTrainedModel.
        data: paths or hub names; or rows: dicts of columns, lists of messages, a datasets.Dataset;
            rows with a chosen and a rejected answer.
        reference: the model that is stayed close to; unset: the model as it is at the start.
    """
    return _start("dpo", locals(), ref_pretrain="reference")


@documented
def kto(
    model: Model | None = None,
    data: Rows | None = None,
    reference: Model | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    save_path: Any = None,
    resume: bool = False,
    on_iteration: Listener | None = None,
    **options: Any,
) -> Run:
    """Preference optimisation from single judged answers.

    Args:
        model: a folder, a hub name or a loaded PreTrainedModel.
        data: paths or hub names; or rows: dicts of columns, lists of messages, a datasets.Dataset;
            rows with an answer and whether it is good.
        reference: the model that is stayed close to; unset: the model as it is at the start.
    """
    return _start("kto", locals(), ref_pretrain="reference")


@documented
def kd(
    model: Model | None = None,
    data: Rows | None = None,
    teacher: Model | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    save_path: Any = None,
    resume: bool = False,
    on_iteration: Listener | None = None,
    **options: Any,
) -> Run:
    """Distillation from a teacher model.

    Args:
        model: a folder, a hub name or a loaded PreTrainedModel.
        data: paths or hub names; or rows: dicts of columns, lists of messages, a datasets.Dataset;
            conversations, or prompts and answers in columns (``input_key``, ``output_key``).
        teacher: the model to learn from, with the same vocabulary.
    """
    return _start("kd", locals(), teacher_model="teacher")


def _start(verb: str, arguments: dict[str, Any], **others: str) -> Run:
    """`others`: further arguments that stand for options of other names."""
    options = arguments.pop("options")
    places = {"pretrain": "model", "dataset": "data", "save_path": "save_path", **others}
    named = {option: arguments.pop(name) for option, name in places.items()}
    return start(verb, options, named, places, **arguments)
