"""Rows in memory and on disk, and the options by which they are read."""

import json
from pathlib import Path
from types import SimpleNamespace

from trimtab.data.sources import load_rows

DEFAULTS = {
    **{"input_key": "input", "output_key": None, "label_key": None, "prompt_key": None},
    **{"chosen_key": "chosen", "rejected_key": "rejected", "input_template": None, "apply_chat_template": False},
    **{"multiturn": False, "pretrain_mode": False, "max_len": 512, "prompt_max_len": 512, "max_samples": 1000},
    **{"dataset_split": "train", "prompt_data_probs": None, "prompt_split": "train", "eval_dataset": None},
    **{"eval_split": "train", "eval_max_samples": None, "seed": 0},
}


def chosen(**changes) -> SimpleNamespace:
    """Options of every job."""
    return SimpleNamespace(**{**DEFAULTS, **changes})


def load(source, probabilities=None, split="train", max_samples=1000, seed=0, **more):
    return load_rows(str(source), probabilities=probabilities, split=split, max_samples=max_samples, seed=seed, **more)


def write_jsonl(path: Path, rows, blank_lines: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n" * blank_lines + "".join(json.dumps(row) + "\n" for row in rows))
    return path


def talk(*contents: str, system: str | None = None) -> list[dict]:
    """Turns of the user and the assistant, one after the other."""
    messages = [{"role": "system", "content": system}] if system else []
    return messages + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
