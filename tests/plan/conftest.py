from pathlib import Path

import pytest

from tests.cli.sft_job import write_model, write_rows
from tests.tiny import tiny_model
from trimtab.cli.main import main
from trimtab.train.metrics import read_rows

LAYERS = 6


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    """A folder with a model of six layers."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", num_hidden_layers=LAYERS).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """The folder in which `train` finds its model and rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    write_model(tmp_path / "model", num_hidden_layers=LAYERS)
    write_rows(tmp_path / "rows.jsonl", [{"input": f"{i}?", "output": "yes " * (1 + i % 5)} for i in range(16)])
    return tmp_path


@pytest.fixture
def train(place):
    """A function that trains with these words, and gives the metrics if the run leaves a folder NAME."""

    def run(name: str, words: str = "", code: int = 0) -> list[dict]:
        fixed = f"--pretrain model --dataset rows.jsonl --output_key output --max_len 64 --save_path {name}"
        sizes = "--max_epochs 1 --train_batch_size 8 --learning_rate 1e-2"
        assert main(["sft", *f"{fixed} {sizes} {words}".split()]) == code
        return read_rows(place / name / "metrics.jsonl")

    return run
