"""What a run is made of, written beside it and compared when it is resumed."""

import hashlib
import json
import os
import platform
from pathlib import Path

import torch
from torch import Tensor

from trimtab import __version__
from trimtab.distributed.device import Device
from trimtab.errors import UserError


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
    *, job: str, weights: str, data_order: str, seed: int, dtype: str, device: Device, path: str, **more
) -> dict:
    return {
        "job": job,
        "initial_weights": weights,
        "data_order": data_order,
        "seed": seed,
        "dtype": dtype,
        "device": device.name,
        "device_type": device.torch.type,
        "threads": torch.get_num_threads(),
        "fused_optimiser": device.fused_adam(),
        "attention_path": path,
        "versions": versions(),
        **more,
    }


def compare(saved: dict, current: dict, checkpoint: Path) -> list[str]:
    """Refuse what cannot be continued; return a line for each thing that only costs bit-for-bit equality."""
    named = {
        "job": "was written by another job",
        "initial_weights": "belongs to another model (its initial weights differ from --pretrain's)",
        "trainable": "belongs to another model (other trained parameters: check the LoRA options)",
        "data_order": "was trained on other data, or in another order (dataset, --train_batch_size or --seed changed)",
    }
    for key, problem in named.items():
        if saved.get(key) != current.get(key):
            raise UserError(
                f"--ckpt_path {checkpoint}: this checkpoint {problem}; give its own settings, or another --ckpt_path"
            )
    lines = []
    for key in ("seed", "dtype", "device_type", "threads", "fused_optimiser", "attention_path", "versions"):
        if saved.get(key) != current.get(key):
            was, now = json.dumps(saved.get(key)), json.dumps(current.get(key))
            lines.append(f"resumed with another {key} ({was} -> {now}): not bit for bit the uninterrupted run")
    return lines


def write_json(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}-{os.getpid()}")
    beside.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(beside, path)
