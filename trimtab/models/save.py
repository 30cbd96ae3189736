"""Saving a model or a LoRA adapter as a Hugging Face folder, and merging an adapter into its base model."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from trimtab.distributed.fsdp import reshard_model, whole
from trimtab.distributed.mesh import Mesh
from trimtab.errors import UserError
from trimtab.files import (
    flush,
    is_unfinished,
    locked,
    mark_finished,
    mark_unfinished,
    move,
    remove,
    remove_leftovers,
    unfinished,
    writing,
)
from trimtab.models.packed import PackedModel, cast_parameters
from trimtab.models.parallel.sharded_checkpoint import ShardedWriter, write_description
from trimtab.models.pretrained import check_model_folder, first_line, from_pretrained, quiet_transformers
from trimtab.models.reward import HEAD, REWARDS, AutoClassifier, rename_head

MAIN = ("config.json", "adapter_config.json")  # files that make a folder a model
WEIGHTS = ("adapter_*", "model*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "*.bin.index.json")


def save_model(model: PackedModel, tokenizer, folder: Path, *, mesh: Mesh | None = None, bf16: bool = False) -> None:
    """Save a model's weights or adapters, and its tokenizer. All processes of a sharded model must call it; rank 0
    writes everything but weights. Only an unsharded model may be saved without a tokenizer."""
    mesh = mesh or Mesh()
    head = getattr(model.config, "value_head_prefix", HEAD)
    write: Any = model.model.save_pretrained
    if mesh.size > 1:
        if not hasattr(model.model, "peft_config"):
            _save_sharded(model, tokenizer, folder, mesh, bf16, head)
            return
        write = partial(write, state_dict=_whole_adapters(model, mesh, bf16))
    if mesh.is_rank_zero:
        writers = [write] if tokenizer is None else [write, tokenizer.save_pretrained]
        if head != HEAD:
            writers.append(partial(rename_head, old=HEAD, new=head))
        write_folder(folder, *writers)


def _save_sharded(model: PackedModel, tokenizer, folder: Path, mesh: Mesh, bf16: bool, head: str) -> None:
    weights = ShardedWriter(model, mesh, bf16=bf16, head=head)
    if not mesh.is_rank_zero:
        weights.write(None)
        return
    announced = []  # the folder as sent to the other processes

    def write(temporary: Path) -> None:
        temporary.mkdir()
        announced.append(temporary)
        weights.write(temporary)
        write_description(model.inner, temporary, torch.bfloat16 if bf16 else torch.float32)

    try:
        write_folder(folder, write, tokenizer.save_pretrained)
    finally:
        if not announced:
            weights.write(None)  # the other processes wait for the folder


def _whole_adapters(model: PackedModel, mesh: Mesh, bf16: bool) -> dict[str, Tensor]:
    """The adapters gathered on rank 0. PEFT also saves embeddings and heads that have adapters."""
    reshard_model(model)
    targets = model.model.peft_config["default"].target_modules
    stored = ["lora_", "modules_to_save", *(name for name in ("embed_tokens", "lm_head") if name in targets)]
    weights = {}
    for name, tensor in model.model.state_dict().items():
        if any(part in name for part in stored):
            tensor = whole(tensor)
            if mesh.is_rank_zero:
                weights[name] = (tensor.bfloat16() if bf16 and tensor.is_floating_point() else tensor).cpu()
    return weights


def write_folder(folder: Path, *writers: Callable[[Path], object]) -> None:
    """Write a model's files to a temporary folder, then move them in, config.json last. Meanwhile the folder is marked
    unfinished; a run that has marked it before removes the mark itself."""
    folder.mkdir(parents=True, exist_ok=True)
    with unfinished(folder) as temporary:
        for write in writers:
            write(temporary)
        flush(temporary)
        written = sorted(temporary.iterdir(), key=lambda p: (p.name in MAIN, p.name))
        marked = is_unfinished(folder)
        if not marked:
            mark_unfinished(folder)
        # Another run's adapter or shards in the folder would be loaded with these weights.
        for old in {old for pattern in WEIGHTS for old in folder.glob(pattern)}:
            if old.name not in {path.name for path in written}:
                old.unlink()
        for path in written:
            if path.is_dir():
                remove(folder / path.name)
            move(path, folder / path.name)
        if not marked:
            mark_finished(folder)


def merge_adapter(
    model_path: str, lora_path: str, output_path: str, *, is_rm: bool = False, bf16: bool = False
) -> None:
    """Merge an adapter into its base model, in fp32; `bf16`: dtype of the saved model."""
    from peft import PeftModel, get_peft_model_state_dict, load_peft_weights
    from transformers import AutoModelForCausalLM, AutoTokenizer

    check_model_folder(model_path, "--model_path")
    folder = Path(lora_path).expanduser()
    if is_unfinished(folder):
        raise UserError(f"--lora_path {lora_path}: the run in this folder has not finished; finish it first")
    if not (folder / "adapter_config.json").exists():
        raise UserError(f"--lora_path {lora_path}: no adapter_config.json there; give the --save_path of a LoRA run")
    _check_kind(folder / "adapter_config.json", is_rm)
    quiet_transformers()
    loader, more = (AutoClassifier, {"num_labels": 1}) if is_rm else (AutoModelForCausalLM, {})
    base = from_pretrained(loader, model_path, flag="--model_path", dtype=torch.float32, **more)
    tokenizer_from = folder if (folder / "tokenizer_config.json").exists() else model_path
    tokenizer = from_pretrained(AutoTokenizer, str(tokenizer_from), flag="--lora_path")
    try:
        adapted = PeftModel.from_pretrained(base, str(folder))
        left_over = load_peft_weights(str(folder), device="cpu").keys() - get_peft_model_state_dict(adapted).keys()
    except UnpicklingError as error:
        raise UserError(f"--lora_path {lora_path}: pickled weights, which may run code; give safetensors") from error
    except (ValueError, RuntimeError, KeyError, OSError) as error:
        raise UserError(
            f"--lora_path {lora_path}: does not fit --model_path {model_path}: {first_line(error)}"
        ) from error
    if left_over:
        raise UserError(
            f"--lora_path {lora_path}: does not fit --model_path {model_path}, which has no place for {len(left_over)} "
            f"of its weights, such as {min(left_over)}; give the model it was trained on"
        )
    model = adapted.merge_and_unload()
    if is_rm:
        model.config.pad_token_id = tokenizer.pad_token_id
        if (folder / REWARDS).exists():
            facts = json.loads((folder / REWARDS).read_text())
            model.config.mean, model.config.std = facts["mean"], facts["std"]
    if bf16:
        cast_parameters(model, torch.bfloat16)
    place = Path(output_path).expanduser()
    with writing(f"--output_path {output_path}: cannot write the model"), locked("output_path", place):
        remove_leftovers(place)
        write_folder(place, model.save_pretrained, tokenizer.save_pretrained)


def _check_kind(path: Path, is_rm: bool) -> None:
    """Refuse a reward model's adapter for a language model and the reverse: the head would be untrained."""
    try:
        kind = json.loads(path.read_text(encoding="utf-8")).get("task_type")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"--lora_path {path}: not readable as JSON ({first_line(error)})") from error
    if kind == "SEQ_CLS" and not is_rm:
        raise UserError(f"--lora_path {path.parent}: the adapter of a reward model; add --is_rm")
    if kind == "CAUSAL_LM" and is_rm:
        raise UserError(f"--lora_path {path.parent}: the adapter of a language model; drop --is_rm")
