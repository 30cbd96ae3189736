"""From what a Learner is given, a folder, a name or a module, to what it works with."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trimtab.api.samples import OF_TOKENS, Sample
from trimtab.api.suggesting import suggested
from trimtab.config.aliases import advice
from trimtab.config.jobs import LearnerOptions
from trimtab.config.option import options_of as described
from trimtab.config.parser import value_of
from trimtab.config.resolved_config import hardware_problems, settled_and_checked
from trimtab.data.hub import trusting
from trimtab.data.tokenizer import load_tokenizer
from trimtab.distributed.device import Device, count_accelerators, find_device
from trimtab.distributed.fsdp import GRADIENT_DTYPES
from trimtab.distributed.random_state import preserve_rng_state
from trimtab.errors import UserError
from trimtab.models.load import Loaded, load_policy, wrap_policy
from trimtab.models.policy import Policy
from trimtab.models.pretrained import quiet_transformers
from trimtab.running.speaking import say
from trimtab.train.optimizer import Optimizer


@dataclass
class Built:
    options: LearnerOptions
    name: str
    loaded: Loaded
    policy: Policy
    optimizer: Optimizer
    tokenizer: Any
    device: Device


def options_of(model: Any, bf16: bool | None, given: dict[str, Any]) -> LearnerOptions:
    """Checked as those of a command are."""
    taken = LearnerOptions.taken()
    if strange := [name for name in given if name not in taken]:
        told = ((name, advice(name, taken, in_python=True) or suggested(name, taken)) for name in strange)
        raise UserError("; ".join(f"Learner has no option {name!r}; {hint}" for name, hint in told))
    known = described(LearnerOptions)
    values = {name: value_of(known[name], value, name) for name, value in given.items()}
    device = find_device()
    if bf16 is not None:
        bf16 = value_of(known["bf16"], bf16, "bf16")
    else:
        bf16 = device.is_accelerator and device.has_fast_bf16() and device.bf16_fault() is None
    if isinstance(model, str | Path):
        if not str(model):
            raise UserError("model is empty; give a folder, a name or a loaded model")
        values["pretrain"] = os.path.expanduser(model)
    wished = frozenset(name for name, value in values.items() if value != known[name].default)
    options, warnings = settled_and_checked(LearnerOptions(**values, bf16=bf16, given=wished))
    problems = hardware_problems(options, count_accelerators, device.kind.lacking)
    if problems:
        raise UserError(problems[0])
    if bf16 and (fault := device.bf16_fault()):
        raise UserError(f"bf16: bfloat16 does not work on this device ({fault}); leave it out")
    for line in warnings:
        say(f"trimtab Learner: warning: {line}", options)
    return options


def build(model: Any, tokenizer: Any, options: LearnerOptions) -> Built:
    quiet_transformers()
    device = find_device()
    with trusting(options.trust_remote_code), preserve_rng_state():
        torch.manual_seed(options.seed)  # of fresh adapters
        if options.pretrain is not None:
            name = options.pretrain
            tokenizer = tokenizer or load_tokenizer(
                name, disable_fast=options.disable_fast_tokenizer, chat_template=options.tokenizer_chat_template
            )
            loaded = load_policy(options, device)
        else:
            name = _checked(model, options)
            loaded = wrap_policy(model, options, device)
    for line in loaded.notes:
        print(line)
    policy = loaded.model
    assert isinstance(policy, Policy)
    optimizer = Optimizer(
        policy.model,
        options,
        learning_rate=options.learning_rate,
        fused=device.fused_adam(),
        gradient_dtype=GRADIENT_DTYPES[options.grad_accum_dtype],
        offload=options.adam_offload,
    )
    return Built(options, name, loaded, policy, optimizer, tokenizer, device)


def _checked(model: Any, options: LearnerOptions) -> str:
    """What a loaded model is called; a UserError: it cannot be trained here."""
    from transformers import PreTrainedModel

    kind = type(model).__name__
    if hasattr(model, "peft_config"):
        raise UserError("model has adapters already: give the model without them and lora_rank, or merge them first")
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"model is of type {kind}; give a folder, a name or a causal LM of transformers")
    if model.config.is_encoder_decoder or not model.can_generate() or model.get_output_embeddings() is None:
        raise UserError(
            f"model is a {kind}, which is no causal language model; give one that writes text from the left"
        )
    if getattr(model, "is_quantized", False) or options.load_in_4bit:
        raise UserError("a model that is loaded with quantised weights is not taken: give its name, and load_in_4bit")
    return model.config._name_or_path or kind


def set_names(data: Sequence[Sample]) -> list[str]:
    """The columns that all of the samples have."""
    return [name for name in OF_TOKENS if all(getattr(sample, name) is not None for sample in data)]
