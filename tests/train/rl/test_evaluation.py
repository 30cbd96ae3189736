"""Evaluation says what it measures: every part of the reward, intervals for new prompts, whether it is held out."""

import json

import numpy as np
import pytest

from tests.train.rl.rl_run import arguments, rows, without
from trimtab.cli.main import main
from trimtab.evaluate.tail_risk import share
from trimtab.train.rl.rollout_client import with_interval


def test_a_rate_has_the_interval_of_as_many_prompts_and_a_part_that_does_not_apply_is_left_out():
    found = with_interval("x", np.repeat([1.0, 0.0, 0.0, 0.0], 50), np.repeat(np.arange(4), 50))
    assert found["x"] == 0.25 and found["x_low"] < 0.05 and found["x_high"] > 0.65, "four prompts, not 200 answers"
    none = with_interval("x", np.zeros(120), np.repeat(np.arange(30), 4))
    two = np.array([0, 0, 1, 1])
    assert (none["x"], none["x_low"], none["x_high"]) == (0.0, 0.0, share(0, 30).high)
    assert with_interval("x", np.array([0.5, np.nan, np.nan, 1.5]), two)["x"] == 1.0
    assert with_interval("x", np.full(4, np.nan), two) == {}
    assert with_interval("x", np.array([0.5]), np.zeros(1, int)) == {"x": 0.5}


def test_a_summed_reward_is_no_success_and_every_part_is_logged(folder, tmp_path):
    words = without(arguments(folder, tmp_path, "grpo"), "--reward_verifier", "--num_episodes")
    words += ["--reward_verifier", "exact:1.0,length(0-20):0.5", "--num_episodes", "1"]
    assert main(words) == 0
    evaluated = [row for row in rows(tmp_path) if "eval_reward" in row]
    for row in evaluated:
        assert row["eval_binary"] is False and row["eval_pass_1"] == row["eval_reward"] >= 0.5
        assert row["eval_reward"] == pytest.approx(row["eval_reward/exact"] + 0.5 * row["eval_reward/length"])
        assert row["eval_reward_low"] <= row["eval_reward"] <= row["eval_reward_high"]
        assert row["eval_reward/exact_low"] == 0 < row["eval_reward/exact_high"]
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "Held-out score" in page and "success" not in page


def test_evaluating_on_the_training_file_is_told_at_the_start_in_the_manifest_and_in_the_report(
    folder, tmp_path, capsys
):
    words = without(arguments(folder, tmp_path, "grpo"), "--eval_dataset", "--num_episodes", "--reward_verifier")
    words += ["--eval_dataset", f"{folder}/prompts.jsonl", "--num_episodes", "1", "--reward_verifier", "regex([0-4])"]
    assert main(words) == 0
    told = "evaluation data: all of them have a prompt that is trained on too: not held out"
    assert capsys.readouterr().out.count(told) == 1
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["data"]["evaluation"]["rows_also_trained"] == 9
    assert manifest["data"]["train"]["rows_also_trained"] == 0
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "Evaluation success" in page and "Held-out" not in page and "9 of 9 prompts of the evaluation" in page
