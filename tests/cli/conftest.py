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


@pytest.fixture
def refused_alike(job):
    """The one line that a refused command says, at its start and, unless told otherwise, in a dry run."""

    def refuse(verb: str, *words: object, dry: bool = True) -> str:
        before = sorted(os.listdir())
        lines = {job(verb)(*words, *more).mistake for more in ([], ["--dry_run"])[: 1 + dry]}
        assert len(lines) == 1, lines
        assert sorted(os.listdir()) == before, "something was left behind"
        return lines.pop()

    return refuse


@pytest.fixture
def wandb_at_home(place, monkeypatch):
    """wandb's settings and caches where they can be searched."""
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "NETRC"):
        monkeypatch.setenv(name, str(place / name.lower()))
    (place / "home").mkdir()
    monkeypatch.setenv("HOME", str(place / "home"))
    wandb = pytest.importorskip("wandb")
    yield
    wandb.teardown()  # the next test's environment is another
