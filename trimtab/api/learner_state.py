"""What a Learner consists of, made from a folder, a name or a module, and written to disk.

A saved Learner is a folder that is whole or absent:

state.json             options, counters, random numbers, and checksums of the tensors
tensors.safetensors    weights, Adam's moments, and gradients accumulated since the last step
model/, tokenizer/     where they were given as objects; a model that was named is read again from its place
"""

import contextlib
import copy
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

import trimtab
from trimtab.api.arguments import suggested
from trimtab.api.samples import OF_TOKENS, Sample
from trimtab.config.aliases import advice
from trimtab.config.jobs import LearnerOptions
from trimtab.config.option import options_of as described
from trimtab.config.parser import value_of
from trimtab.config.resolved_config import hardware_problems, settled_and_checked
from trimtab.data.hub import trusting
from trimtab.data.tokenizer import load_tokenizer
from trimtab.distributed.device import Device, count_accelerators, find_device
from trimtab.distributed.fsdp import GRADIENT_DTYPES
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.random_state import preserve_rng_state
from trimtab.errors import UserError
from trimtab.files import replacing, writing
from trimtab.job import say
from trimtab.models.load import Loaded, load_frozen_policy, load_policy, wrap_policy
from trimtab.models.lora import adapters_off
from trimtab.models.policy import Policy
from trimtab.models.pretrained import quiet_transformers
from trimtab.train.checkpoint import (
    PARTS,
    ShardedTensors,
    collect_checksums,
    find_damage,
    seal_state,
    unseal_state,
    write_sharded,
)
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


# ---- the reference model


class Reference:
    def __init__(self, options: LearnerOptions, loaded: Loaded, device: Device, name: str | None):
        """`name`: of another model."""
        self.options, self.loaded, self.device, self.name = options, loaded, device, name
        self._frozen: Policy | None = None

    @property
    def is_adapted(self) -> bool:
        """Whether it is the policy itself, without its adapters."""
        return self.name is None and self.options.lora_rank > 0

    @contextlib.contextmanager
    def at_work(self) -> Iterator[Policy]:
        """The reference, ready to score."""
        policy: Policy = self.loaded.model
        if self.is_adapted:
            with adapters_off(policy.model):
                yield policy
        else:
            yield self._found()

    def before_update(self) -> None:
        """The weights are about to change."""
        if self.name is None and self.options.pretrain is None and not self.is_adapted:
            self._found()

    @property
    def kept(self) -> Policy | None:
        """A copy of what the policy was, where there is one."""
        return self._frozen if self.name is None else None

    def _found(self) -> Policy:
        if self._frozen is None:
            self._frozen = self._copied() if self.name is None and self.options.pretrain is None else self._read()
        return self._frozen

    def _copied(self) -> Policy:
        policy: Policy = self.loaded.model
        model = copy.deepcopy(policy.inner)
        return Policy(model.requires_grad_(False), policy.path).eval()

    def _read(self) -> Policy:
        name = self.name or self.options.pretrain
        found = load_frozen_policy(name, self.options, self.device, flag="reference")
        if self.name is None and found.weights != self.loaded.weights:
            raise UserError(f"reference: {name} has other weights than when the Learner was made from it; name another")
        if found.model.head.out_features != self.loaded.model.head.out_features:
            raise UserError(f"reference: {name} has another vocabulary than the model; name one that shares it")
        return found.model


# ---- on disk

STATE, MODEL, TOKENIZER = "state.json", "model", "tokenizer"
GRADIENT = "gradient/"


def write_state(folder: Path, optimizer: Optimizer, state: dict[str, Any], model: Any, tokenizer: Any) -> None:
    """`model`: what weights it began with, if they lie nowhere else; `tokenizer`: likewise."""
    is_other = folder.exists() and not (folder / STATE).is_file()
    if is_other and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"save: {folder} is there and holds something else; give another folder")
    tensors = optimizer.state()
    tensors |= {f"{GRADIENT}{name}": gradient for name, gradient in optimizer.gradients().items()}
    step = state["counters"]["step"]
    with writing(f"save: cannot write {folder}"), replacing(folder) as beside:
        write_sharded(beside, tensors, Mesh(), step)
        parts = collect_checksums(beside)
        if model is not None:
            _write_model(model, beside / MODEL)
        if tokenizer is not None:
            tokenizer.save_pretrained(beside / TOKENIZER)
        (beside / STATE).write_text(seal_state(state | {"manifest": {"trimtab": trimtab.__version__}}, step, parts))


def _write_model(policy: Policy, folder: Path) -> None:
    """A model's own weights: of one that has adapters, without them."""
    weights = {
        name.replace(".base_layer.", "."): value
        for name, value in policy.inner.state_dict().items()
        if ".lora_" not in name
    }
    policy.inner.save_pretrained(folder, state_dict=weights)


def read_state(folder: Path) -> dict[str, Any]:
    if not (folder / STATE).is_file():
        raise UserError(f"load: {folder} holds no saved Learner ({STATE} is not there)")
    try:
        text = (folder / STATE).read_text()
        state = unseal_state(text, _step(text))
        broken = find_damage(folder, state[PARTS].items())
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(f"load: {folder} cannot be read: {error}") from error
    if broken:
        raise UserError(f"load: {folder} is damaged: {broken}")
    return state


def _step(text: str) -> int:
    return json.loads(text)["counters"]["step"]


def read_model(folder: Path, state: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """The model, named or as a module, the tokenizer, if it was given, and the options."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = dict(state["options"])
    model = options.pop("pretrain", None)
    tokenizer = None
    try:
        if model is None:
            model = AutoModelForCausalLM.from_pretrained(folder / MODEL, dtype="auto")
        if (folder / TOKENIZER).is_dir():
            tokenizer = AutoTokenizer.from_pretrained(folder / TOKENIZER)
    except (OSError, ValueError) as error:
        raise UserError(f"load: {folder} cannot be read: {str(error).splitlines()[0]}") from error
    return model, tokenizer, options | {name: tuple(options[name]) for name in options if type(options[name]) is list}


def restore_optimizer(folder: Path, optimizer: Optimizer) -> None:
    saved = ShardedTensors(folder)
    try:
        optimizer.restore(saved)
    except ValueError as error:
        raise UserError(f"load: {folder} does not fit the model: {error}") from error
    found = [name for name in saved.names() if name.startswith(GRADIENT)]
    optimizer.restore_gradients({name.removeprefix(GRADIENT): saved.whole(name) for name in found})


def plain_options(options: LearnerOptions) -> dict[str, Any]:
    """Those that were set, as JSON holds them; a folder by its whole path."""
    found = {
        known.name: list(value) if isinstance(value := getattr(options, known.name), tuple) else value
        for known in fields(options)
        if "no_option" not in known.metadata and options.changed(known.name)
    }
    if options.pretrain and os.path.isdir(options.pretrain):
        found["pretrain"] = os.path.abspath(options.pretrain)
    return found
