"""What a run is made of, written beside it and compared when it is resumed."""

import dataclasses
import hashlib
import json
import platform
from pathlib import Path
from typing import Any

from torch import Tensor

from trimtab import __version__
from trimtab.config.data import DataOptions, RowOptions
from trimtab.config.dump import to_dict
from trimtab.config.groups import CheckpointOptions, LoggingOptions, RunOptions
from trimtab.config.sharding import ShardingOptions
from trimtab.errors import UserError
from trimtab.models.load import TrainedModelOptions
from trimtab.models.pretrained import same_kind


def names_fingerprint(tensors: dict[str, Tensor]) -> str:
    """Hash of which tensors there are: names and shapes."""
    listing = "\n".join(f"{name} {tuple(t.shape)}" for name, t in sorted(tensors.items()))
    return hashlib.blake2b(listing.encode(), digest_size=16).hexdigest()


def versions() -> dict[str, str]:
    import importlib.metadata as metadata

    found = {"trimtab": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "datasets", "peft", "numpy", "safetensors"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def make_manifest(
    *, job: str, weights: str, data_order: str, seed: int, dtype: str, device: dict[str, Any], path: str, **more
) -> dict:
    """`device`: Device.described()."""
    return {
        "job": job,
        "initial_weights": weights,
        "data_order": data_order,
        "seed": seed,
        "dtype": dtype,
        **device,
        "attention_path": path,
        "versions": versions(),
        **more,
    }


# Options that say where, when and how fast, and those whose effect has a fingerprint of its own. All others change
# what is learnt.
WITHOUT_EFFECT = {
    field.name
    for group in (CheckpointOptions, LoggingOptions, ShardingOptions, RowOptions, DataOptions, RunOptions)
    for field in dataclasses.fields(group)
}
WITHOUT_EFFECT |= {"micro_train_batch_size", "packing_samples", "train_max_tokens_per_gpu", "gradient_checkpointing"}
WITHOUT_EFFECT |= {"gradient_checkpointing_use_reentrant", "flash_attn", "bf16", "use_ms", "disable_fast_tokenizer"}
WITHOUT_EFFECT |= {"gradient_checkpointing_layers", "gradient_checkpointing_keep", "offload_activations", "compile"}
WITHOUT_EFFECT |= {"use_dynamic_batch", "fit_memory", "ray", "max_restarts", "restart_wait"}
WITHOUT_EFFECT |= {"ref_offload", "teacher_offload", "precompute_ref_log_probs", "report_samples", "pretrain"}

MEANING = ("lora_alpha", "proposal", "proposal_lora_rank")
"""Without these the numbers in a checkpoint cannot be read."""


def settings(options: TrainedModelOptions) -> dict[str, Any]:
    """The options that change what is learnt, as plain values."""
    return {name: value for name, value in to_dict(options).items() if name not in WITHOUT_EFFECT}


def compare(saved: dict, current: dict, checkpoint: Path) -> list[str]:
    """Refuse what cannot be continued; return a line for each thing that only costs bit-for-bit equality."""
    named = {
        "job": "was written by another job",
        "initial_weights": "belongs to another model (its initial weights differ from --pretrain's)",
        "trainable": "belongs to another model (other trained parameters: check the LoRA options)",
        "data_order": "was trained on other data, or in another order (dataset, --train_batch_size or --seed changed)",
    }
    lines = []
    if not same_kind(saved.get("initial_weights"), current.get("initial_weights")):
        lines.append("whether its initial weights are --pretrain's cannot be told: an earlier version wrote it")
        del named["initial_weights"]
    for key, problem in named.items():
        if saved.get(key) != current.get(key):
            raise UserError(
                f"--ckpt_path {checkpoint}: this checkpoint {problem}; give its own settings, or another --ckpt_path"
            )
    before, now = (manifest.get("settings", {}) for manifest in (saved, current))
    changed = [name for name in sorted(before.keys() & now.keys()) if before[name] != now[name]]
    for name in MEANING:
        if name in changed:
            raise UserError(
                f"--ckpt_path {checkpoint}: --{name} was {before[name]} there; what was learnt means something else "
                "under another one, so give the same"
            )
    for name in changed:
        lines.append(f"resumed with another --{name} ({json.dumps(before[name])} -> {json.dumps(now[name])})")
    if saved.get("environment") != current.get("environment"):
        lines.append("the environment's file has changed since: episodes that were under way may begin anew")
    for key in ("seed", "dtype", "device_type", "threads", "fused_optimiser", "attention_path", "layout", "versions"):
        noted = key != "layout" or key in saved  # earlier versions do not say it
        if noted and saved.get(key) != current.get(key):
            was, now = json.dumps(saved.get(key)), json.dumps(current.get(key))
            lines.append(f"resumed with another {key} ({was} -> {now}): not bit for bit the uninterrupted run")
    return lines
