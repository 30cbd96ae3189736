"""Write a model as a Hugging Face folder that every other tool loads; with LoRA, the adapter."""

import os
import shutil
from pathlib import Path

from trimtab.models.policy import Policy


def save_model(policy: Policy, tokenizer, folder: Path) -> None:
    """Each file appears whole or not at all: written beside, then moved in, the description last."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f".writing-{os.getpid()}"
    shutil.rmtree(beside, ignore_errors=True)
    try:
        policy.model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        for path in sorted(beside.iterdir(), key=lambda p: (p.name.endswith("config.json"), p.name)):
            os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
