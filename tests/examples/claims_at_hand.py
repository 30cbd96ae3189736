"""For tests of examples/claims: its files can be imported, its jobs run in this process, and a model to run them on."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

CLAIMS = Path(__file__).parents[2] / "examples" / "claims"
sys.path.insert(0, str(CLAIMS))

import grid  # noqa: E402


def here(monkeypatch: pytest.MonkeyPatch, work: ModuleType) -> None:
    """Jobs of a grid are calls of `work.main`, one after another: to import torch costs seconds in every process."""

    def run(jobs, folder, *, at_once=1, limit=0.0):
        results = Path(folder) / "results.jsonl"
        for job in jobs:
            if any(row["job"] == job.name for row in grid.read(results)):
                continue
            told = Path(folder) / "told"
            monkeypatch.setenv(grid.ROWS, str(told))
            work.main(job.command[2:])
            with results.open("a") as file:
                file.writelines(json.dumps({"job": job.name, "state": "done", **row}) + "\n" for row in grid.read(told))
            told.unlink()
        return []

    monkeypatch.setattr(grid, "run", run)


def write_pairs(path: Path, count: int, asked: Callable[[int], str]) -> Path:
    """Spoken dialogues of two answers; `asked`: the question of a row."""
    spoken = [f"\n\nHuman: {asked(number)}\n\nAssistant: " for number in range(count)]
    rows = [{"chosen": f"{before}it is {i}", "rejected": f"{before}no {i}"} for i, before in enumerate(spoken)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def small_model(folder: Path) -> Path:
    """A model of bytes with random weights, whose tokenizer can pad."""
    from trimtab.data.tokenizer import byte_tokenizer
    from trimtab.embedded.tiny_recipes import AGENT_TEMPLATE, make_model

    tokenizer = byte_tokenizer(AGENT_TEMPLATE)
    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    make_model("llama", len(tokenizer), max_position_embeddings=1024, **ends).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
