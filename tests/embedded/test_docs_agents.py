"""The commands and the code of docs/agents.md run, on few episodes; what the embedded game promises is kept."""

import json
import re
import runpy
import sys

import pytest

from tests.config.every_job import EVERY_JOB
from tests.docs.pages import DOCS, blocks, commands
from trimtab.cli.main import main
from trimtab.config.catalogue import find
from trimtab.envs.types import Task, Turn

FEW = {"grpo": ["--env_rows", "8", "--rollout_batch_size", "4", "--train_batch_size", "16"], "play": []}


def learnt(folder, seed: int, monkeypatch) -> list[float]:
    """The share of games that were won, by iteration, in the run that the page shows."""
    monkeypatch.chdir(folder)
    make, *_ = commands("agents")
    run_module(make)
    (words,) = [command[1:] for command in commands("agents") if command[1] == "grpo"]
    assert main([*words, "--seed", str(seed)]) == 0
    return [json.loads(line)["reward"] for line in (folder / "my-player" / "metrics.jsonl").read_text().splitlines()]


def run_module(words: list[str]) -> None:
    assert words[:2] == ["python", "-m"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", words[2:])
        runpy.run_module(words[2], run_name="__main__")


@pytest.mark.long
def test_every_command_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make, *others = commands("agents")
    run_module(make)
    assert [words[1] for words in others] == ["play", "grpo", "play"]
    for _, verb, *words in others:
        assert main([verb, *words, *FEW[verb]]) == 0, capsys.readouterr().err
    assert (tmp_path / "my-player" / "report.html").is_file()
    rows = [json.loads(line) for line in (tmp_path / "my-player" / "rollouts.jsonl").read_text().splitlines()]
    said = [turn["text"] for row in rows for turn in row["turns"] if not turn["drawn"]]
    assert said and set(said) <= {"higher", "lower", "only a number, please"}


def test_the_environment_that_the_page_writes_works():
    known: dict = {}
    (code,) = blocks("agents", "python")
    exec(compile(code, "agents.md", "exec"), known)
    game = known["Doubling"]()
    assert game.reset(Task(0, 0, 3)) == "What is 4 + 4?"
    assert game.step(Turn("7", {}, [], "stop", 0, 9)).reward < 0
    right = game.step(Turn(" 8", {}, [], "stop", 1, 9))
    assert right.reward == 1 and right.done


def test_every_option_of_the_page_exists_and_every_link_leads_somewhere():
    text = (DOCS / "agents.md").read_text()
    unknown = {name for name in re.findall(r"--(\w+)", text) if not any(find(job, name) for job in EVERY_JOB)}
    assert unknown <= {"model"}
    for target in re.findall(r"\]\(([\w./]+)\)", text):
        assert (DOCS / target).exists(), target


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_game_is_learnt(seed, tmp_path, monkeypatch):
    won = learnt(tmp_path, seed, monkeypatch)
    assert len(won) == 50 and won[0] < 0.4
    assert sum(won[-5:]) / 5 > 0.75, "who does not listen wins 3 of 7"
