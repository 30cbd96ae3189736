"""A Learner on disk: everything needed to go on exactly, in a folder that is whole or absent.

state.json             options, counters, random numbers, and checksums of the tensors
tensors.safetensors    weights, Adam's moments, and what was gathered since the last step
model/, tokenizer/     where they were given as objects; a model that was named is read again from where it was
"""

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import trimtab
from trimtab.config.jobs import LearnerOptions
from trimtab.distributed.mesh import Mesh
from trimtab.errors import UserError
from trimtab.files import replacing, writing
from trimtab.models.policy import Policy
from trimtab.train.checkpoint_files import (
    PARTS,
    ShardedTensors,
    collect_checksums,
    find_damage,
    seal_state,
    unseal_state,
    write_sharded,
)
from trimtab.train.optimizer import Optimizer

STATE, MODEL, TOKENIZER = "state.json", "model", "tokenizer"
GRADIENT = "gradient/"


def write(folder: Path, optimizer: Optimizer, state: dict[str, Any], model: Any, tokenizer: Any) -> None:
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


def read_given(folder: Path, state: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
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


def restore(folder: Path, optimizer: Optimizer) -> None:
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
