"""Runs of a second, by options that functions and commands share."""

from pathlib import Path

import torch
from safetensors.torch import load_file

BATCHES = {"train_batch_size": 4, "micro_train_batch_size": 4}
SMALL = {"max_len": 64, "max_epochs": 1, **BATCHES}
CHAT = {"apply_chat_template": True, "seed": 3}
SFT = {"learning_rate": 1e-2, "input_key": "messages", **SMALL, **CHAT}
RL = {
    **{"rollout_batch_size": 2, "n_samples_per_prompt": 2, "prompt_max_len": 40, "generate_max_len": 6},
    **{"actor_learning_rate": 1e-2, "label_key": "label", **BATCHES, **CHAT},
}


def words_of(options: dict) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def same_weights(one: Path, other: Path) -> bool:
    first, second = (load_file(Path(folder) / "model.safetensors") for folder in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
