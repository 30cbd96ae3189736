"""Write a model as a Hugging Face folder that every other tool loads; with LoRA, the adapter."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from trimtab.distributed.mesh import Mesh
from trimtab.distributed.sharding import whole
from trimtab.files import flush, is_unfinished, mark_finished, mark_unfinished, move, remove, unfinished
from trimtab.models.packed import PackedModel
from trimtab.models.reward import HEAD, rename_head

MAIN = ("config.json", "adapter_config.json")  # what makes a folder look like a model
WEIGHTS = ("adapter_*", "model*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "*.bin.index.json")


def save_model(model: PackedModel, tokenizer, folder: Path, *, mesh: Mesh | None = None, bf16: bool = False) -> None:
    """Every process takes part where the model is split; the first one writes."""
    mesh = mesh or Mesh()
    gathered = {"state_dict": _gathered(model.model, mesh, bf16)} if mesh.size > 1 else {}
    if not mesh.leads:
        return
    if bf16:
        model.config.dtype = torch.bfloat16
    head = getattr(model.config, "value_head_prefix", HEAD)
    write_folder(
        folder,
        lambda beside: model.model.save_pretrained(beside, **gathered),
        tokenizer.save_pretrained,
        lambda beside: rename_head(beside, HEAD, head),
    )


def _gathered(model: nn.Module, mesh: Mesh, bf16: bool) -> dict[str, Tensor]:
    """All weights on the first process, one gathered at a time."""
    weights = {}
    for name, tensor in model.state_dict().items():
        tensor = whole(tensor)
        if mesh.leads:
            weights[name] = (tensor.bfloat16() if bf16 and tensor.is_floating_point() else tensor).cpu()
    return weights


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
