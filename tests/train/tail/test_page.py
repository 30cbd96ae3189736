"""The commands of docs/repulse.md run, on few rows; the toy experiment's parts fit together."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import commands
from tests.embedded.test_docs_commands import folder, quickstarted  # noqa: F401
from trimtab.cli.main import main
from trimtab.embedded.bad_word_task import BAD_TOKENS, REWARD, WORDS, make_tokenizer

SCRIPT = Path(__file__).parents[3] / "examples" / "repulse_toy.sh"


@pytest.mark.long
def test_every_command_of_the_page_runs(folder, capsys):  # noqa: F811
    (first, *others) = commands("repulse")
    assert first == ["trimtab", "quickstart"] and len(others) == 3
    for _, *words in others:
        assert main([*words, "--max_samples", "10"]) == 0, capsys.readouterr().err
    for name in ("my-repulse/proposal/config.json", "my-repulse-adapters/proposal/adapter_config.json"):
        assert (folder / name).is_file()
    (summary,) = (folder / "my-repulse").glob("info_eval_*.json")
    assert {"below", "cvar", "rare_events"} <= json.loads(summary.read_text()).keys()


def test_the_toy_s_reward_reads_the_toy_s_words():
    tokenizer, known = make_tokenizer(), {}
    exec(REWARD, known)
    answers = [[7, 8], [8, 9], [8, BAD_TOKENS[0]], [1]]
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    rewards = known["reward_func"]([f"word7{text}" for text in texts], ["word7"] * 4, [None] * 4)
    worth = [known["worth"](WORDS[token]) for token in (7, 8, 9)]
    assert rewards == pytest.approx([(worth[0] + worth[1]) / 2, (worth[1] + worth[2]) / 2, -3.0, 0.0])
    assert tokenizer("word7 bad3").input_ids == [WORDS.index("word7"), BAD_TOKENS[3]]


@pytest.mark.long
def test_the_toy_experiment_ends_when_a_run_fails(tmp_path):
    settings = {"PYTHON": sys.executable, "OUT": str(tmp_path / "toy"), "SEEDS": "1"}
    done = subprocess.run(
        ["bash", str(SCRIPT), "--nonsense"], env=os.environ | settings, capture_output=True, timeout=120
    )
    assert done.returncode == 1 and b"a run has failed" in done.stderr and b"--nonsense" in done.stdout
    assert not (tmp_path / "toy" / "figures.yaml").exists()


@pytest.mark.long
def test_the_toy_experiment_ends_in_figures(tmp_path):
    settings = {"PYTHON": sys.executable, "OUT": str(tmp_path / "toy"), "SEEDS": "1 2", "FIT_STEPS": "1"}
    done = subprocess.run(["bash", str(SCRIPT)], env=os.environ | settings, capture_output=True, timeout=500)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    for name in ("figures_curves.png", "figures_frontier_bad_reward.png", "figures_page.html"):
        assert (tmp_path / "toy" / name).is_file()
