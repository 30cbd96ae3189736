import os

import pytest

from tests.cli.sft_job import STEP_END, Job, write_model, write_rows
from tests.train.job_run import labelled_rows, preference_rows
from trimtab.embedded.sort_task import make_rows, prompt_of, reference_of


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """model/ and other/ (dense), experts/ (a mixture), and rows for every job, made once."""
    folder = tmp_path_factory.mktemp("made")
    write_model(folder / "model")
    write_model(folder / "other", seed=1)
    write_model(folder / "experts", "mixtral")
    write_rows(folder / "train.jsonl", make_rows(16, seed=1))
    write_rows(folder / "pairs.jsonl", preference_rows(8))
    write_rows(folder / "judged.jsonl", labelled_rows(8))
    write_rows(folder / "steps.jsonl", judged_steps(8))
    return folder


def judged_steps(count: int) -> list[dict]:
    rows = []
    for row in make_rows(count, seed=1):
        digits = reference_of(row)
        text = prompt_of(row) + "".join(f" {digit} {STEP_END}" for digit in digits)
        rows.append({"input": text, "label": ["+" if int(digit) % 2 else "-" for digit in digits]})
    return rows


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    """The working folder of a command, empty but for links to what is in `made`."""
    for name in ("WORLD_SIZE", "HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for path in made.iterdir():
        os.symlink(path, tmp_path / path.name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def job(place, monkeypatch, capsys):
    """The command of a verb."""

    def command(verb: str) -> Job:
        command = Job(capsys, place, verb)
        command.watch(monkeypatch)
        return command

    return command


@pytest.fixture
def sft(job):
    return job("sft")
