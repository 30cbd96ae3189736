"""The commands and the code of docs/agents.md run, on few episodes; what the embedded game promises is kept."""

import io
import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.docs.pages import blocks, runnable
from trimtab.cli.main import main
from trimtab.embedded.sort_task import make_model, make_tokenizer
from trimtab.envs.types import Task, Turn
from trimtab.train.metrics import read_rows

GAME, TOOLS = runnable("agents", "bash")
FEW = {"grpo": ["--env_rows", "8", "--rollout_batch_size", "4", "--train_batch_size", "16"], "play": []}


def learnt(folder, seed: int, monkeypatch) -> list[float]:
    """The share of games that were won, by iteration, in the run that the page shows."""
    monkeypatch.chdir(folder)
    make, *others = GAME.commands()
    run_module(make)
    (words,) = [command[1:] for command in others if command[1] == "grpo"]
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
    make, *others = GAME.commands()
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
    code, _ = blocks("agents", "python")
    exec(compile(code, "agents.md", "exec"), known)
    game = known["Doubling"]()
    assert game.reset(Task(0, 0, 3)) == "What is 4 + 4?"
    assert game.step(Turn("7", {}, [], "stop", 0, 9)).reward < 0
    right = game.step(Turn(" 8", {}, [], "stop", 1, 9))
    assert right.reward == 1 and right.done


def test_the_tools_of_the_page_work_on_the_model_of_the_quickstart(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _, code = blocks("agents", "python")
    Path("hidden.py").write_text(code)
    make_model().save_pretrained("quickstart/grpo")
    make_tokenizer().save_pretrained("quickstart/grpo")
    quickstart, by_hand, demonstrate, sft, grpo, play = TOOLS.commands()
    assert quickstart == ["trimtab", "quickstart"]

    (label,) = [row["label"] for row in runpy.run_path("hidden.py")["rows"](1, 42)]
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"/look\n{''.join(sorted(label))}\n"))
    assert main([*by_hand[1:], "--seed", "42"]) == 0
    shown = capsys.readouterr().out
    assert "over: reward 1  2 turns" in shown and "tool_calls 1" in shown and "<unk>" not in shown
    assert f"[c|a|l|l| |l|o|o|k|>|<eos>]<user>result {label}><assistant>[" in shown

    program, script, into, file = demonstrate
    assert (program, into) == ("python", ">")
    runpy.run_path(script, run_name="__main__")
    Path(file).write_text(capsys.readouterr().out)
    for words, few in ((sft, ["--max_samples", "32"]), (grpo, [*FEW["grpo"], "--env_rows", "4"]), (play, [])):
        assert main([*words[1:], *few]) == 0, capsys.readouterr().err
    (first, *_) = read_rows(Path("my-tool-user/metrics.jsonl"))
    assert first["turns"] >= 1 and "tool_calls" in first


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_game_is_learnt(seed, tmp_path, monkeypatch):
    won = learnt(tmp_path, seed, monkeypatch)
    assert len(won) == 50 and won[0] < 0.4
    assert sum(won[-5:]) / 5 > 0.75, "who does not listen wins 3 of 7"
