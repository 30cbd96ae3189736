import os

import pytest

from tests.cli.sft_job import Job, write_model, write_rows
from trimtab.embedded.sort_task import make_rows


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """model/ (dense), experts/ (a mixture) and train.jsonl, made once."""
    folder = tmp_path_factory.mktemp("made")
    write_model(folder / "model")
    write_model(folder / "experts", "mixtral")
    write_rows(folder / "train.jsonl", make_rows(16, seed=1))
    return folder


@pytest.fixture
def sft(made, tmp_path, monkeypatch, capsys):
    """The command, run in an empty folder with `model`, `experts` and `train.jsonl` in it."""
    for name in ("WORLD_SIZE", "HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for path in made.iterdir():
        os.symlink(path, tmp_path / path.name)
    monkeypatch.chdir(tmp_path)
    job = Job(capsys, tmp_path)
    job.watch(monkeypatch)
    return job
