"""Write a model as a Hugging Face folder that every other tool loads; with LoRA, the adapter."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from trimtab.distributed.mesh import Mesh
from trimtab.distributed.sharding import split_again, whole
from trimtab.files import flush, is_unfinished, mark_finished, mark_unfinished, move, remove, unfinished
from trimtab.models.packed import PackedModel
from trimtab.models.reward import HEAD, rename_head
from trimtab.models.sharded_save import SplitWeights, write_description

MAIN = ("config.json", "adapter_config.json")  # what makes a folder look like a model
WEIGHTS = ("adapter_*", "model*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "*.bin.index.json")


def save_model(model: PackedModel, tokenizer, folder: Path, *, mesh: Mesh | None = None, bf16: bool = False) -> None:
    """Every process takes part where the model is split; the first one writes what is not weights. A model that is not
    split may be without a tokenizer."""
    mesh = mesh or Mesh()
    if mesh.size == 1:
        _write(model, tokenizer, folder, model.model.save_pretrained)
    elif hasattr(model.model, "peft_config"):
        _save_split_adapters(model, tokenizer, folder, mesh, bf16)
    else:
        _save_split(model, tokenizer, folder, mesh, bf16)


def _save_split(model: PackedModel, tokenizer, folder: Path, mesh: Mesh, bf16: bool) -> None:
    weights = SplitWeights(model, mesh, bf16=bf16, head=_head_name(model))
    if not mesh.leads:
        weights.write(None)
        return
    told = []

    def write(beside: Path) -> None:
        beside.mkdir()
        told.append(beside)
        weights.write(beside)
        write_description(model.inner, beside, torch.bfloat16 if bf16 else torch.float32)

    try:
        write_folder(folder, write, tokenizer.save_pretrained)
    finally:
        if not told:
            weights.write(None)  # the others wait for a place


def _save_split_adapters(model: PackedModel, tokenizer, folder: Path, mesh: Mesh, bf16: bool) -> None:
    """Beside adapters, PEFT stores embeddings and heads that have some."""
    split_again(model)
    targets = model.model.peft_config["default"].target_modules
    stored = ["lora_", "modules_to_save", *(name for name in ("embed_tokens", "lm_head") if name in targets)]
    weights = {}
    for name, tensor in model.model.state_dict().items():
        if any(part in name for part in stored):
            tensor = whole(tensor)
            if mesh.leads:
                weights[name] = (tensor.bfloat16() if bf16 and tensor.is_floating_point() else tensor).cpu()
    if mesh.leads:
        _write(model, tokenizer, folder, partial(model.model.save_pretrained, state_dict=weights))


def _write(model: PackedModel, tokenizer, folder: Path, write: Callable[[Path], object]) -> None:
    head = _head_name(model)
    others = [] if tokenizer is None else [tokenizer.save_pretrained]
    write_folder(folder, write, *others, lambda beside: rename_head(beside, HEAD, head))


def _head_name(model: PackedModel) -> str:
    return getattr(model.config, "value_head_prefix", HEAD)


def write_folder(folder: Path, *writers: Callable[[Path], object]) -> None:
    """A model's files appear together: written beside, then moved in, config.json last. Until then the folder is marked
    as unfinished; a run that marked it before takes the mark away itself."""
    folder.mkdir(parents=True, exist_ok=True)
    with unfinished(folder) as beside:
        for write in writers:
            write(beside)
        flush(beside)
        written = sorted(beside.iterdir(), key=lambda p: (p.name in MAIN, p.name))
        marked = is_unfinished(folder)
        if not marked:
            mark_unfinished(folder)
        # Another run's adapter or shards beside these weights would be loaded with them.
        for old in {old for pattern in WEIGHTS for old in folder.glob(pattern)}:
            if old.name not in {path.name for path in written}:
                old.unlink()
        for path in written:
            if path.is_dir():
                remove(folder / path.name)
            move(path, folder / path.name)
        if not marked:
            mark_finished(folder)
