"""Write a model as a Hugging Face folder that every other tool loads; with LoRA, the adapter."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from trimtab.models.packed import PackedModel
from trimtab.models.reward import HEAD, rename_head


def save_model(model: PackedModel, tokenizer, folder: Path) -> None:
    head = getattr(model.config, "value_head_prefix", HEAD)
    write_folder(folder, model.model.save_pretrained, tokenizer.save_pretrained, lambda f: rename_head(f, HEAD, head))


def write_folder(folder: Path, *writers: Callable[[Path], object]) -> None:
    """Each file appears whole or not at all: written beside, then moved in, the descriptions last."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f".writing-{os.getpid()}"
    shutil.rmtree(beside, ignore_errors=True)
    try:
        for write in writers:
            write(beside)
        for path in sorted(beside.iterdir(), key=lambda p: (p.name.endswith("config.json"), p.name)):
            os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
