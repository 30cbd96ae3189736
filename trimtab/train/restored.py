"""A policy as training left it: from a model folder, or from the newest resumable checkpoint in a folder of them."""

from pathlib import Path

import torch

from trimtab.config.groups import LoadOptions
from trimtab.distributed.device import Device
from trimtab.errors import UserError
from trimtab.models.folder import merging
from trimtab.models.load import load_frozen_policy
from trimtab.models.policy import Policy
from trimtab.train.checkpoint import Checkpoints, reading
from trimtab.train.tensor_parts import PATTERN, TensorParts

WEIGHT = "weight/"  # what the optimiser puts before the name of a parameter


def restored_policy(pretrain: str, checkpoint: str | None, options: LoadOptions, device: Device) -> Policy:
    """`pretrain`: where the architecture comes from, and the weights too without a `checkpoint`. Only to score with."""
    folder = Path(checkpoint).expanduser() if checkpoint else None
    if folder is not None and (folder / "config.json").exists():
        return load_frozen_policy(str(folder), options, device, "--ckpt_path").model
    policy = load_frozen_policy(pretrain, options, device, "--pretrain").model
    if folder is not None:
        tensors = _tensors_of(folder)
        print(f"weights of {tensors}", flush=True)
        _fill(policy, tensors)
    return policy


def _tensors_of(folder: Path) -> Path:
    """The folder with the policy's tensors, of the newest checkpoint."""
    if (folder / "adapter_config.json").exists():
        raise UserError(
            f"--ckpt_path {folder}: an adapter, not a model; merge it first: {merging(folder, '--ckpt_path')}"
        )
    loaded = Checkpoints(folder, keep=1, keep_gib=0).load()
    if loaded is None:
        raise UserError(f"--ckpt_path {folder}: neither a model nor a checkpoint of training is in this folder")
    newest, _ = loaded
    # RL keeps a folder for each model that learns.
    return next((place for place in (newest / "actor", newest) if any(place.glob(PATTERN))), newest)


def _fill(policy: Policy, folder: Path) -> None:
    with reading(folder):
        parts = TensorParts(folder)
        parameters = dict(policy.model.named_parameters())
        stored = {name.removeprefix(WEIGHT) for name in parts.names() if name.startswith(WEIGHT)}
        if stored != parameters.keys():
            odd = sorted(stored ^ parameters.keys())[0]
            raise UserError(
                f"--ckpt_path {folder}: its weights are not those of --pretrain (such as {odd}); name the model that "
                "training started from, or give the merged model of a LoRA run"
            )
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(parts.whole(f"{WEIGHT}{name}"))
