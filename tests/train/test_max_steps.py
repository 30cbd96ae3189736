"""--max_steps: a shorter run with a schedule of its own, which is resumed like any other."""

import json
import signal
from functools import partial

import pytest

from tests import warm
from tests.train.every_loop import signal_in_step, words
from tests.train.job_run import assert_same_model, rows


def stopped_and_resumed(tasks, tmp_path, loop, number, more):
    """The rows of a whole run; one that was stopped in this step and went on is the same."""
    whole, again = tmp_path / "whole", tmp_path / "again"
    assert warm.run(words(tasks, loop, whole, more)) == 0
    stopped = partial(signal_in_step, loop, number, signal.SIGINT)
    assert warm.run(words(tasks, loop, again, more), prepare=stopped) == 128 + signal.SIGINT
    assert warm.run(words(tasks, loop, again, more, "--load_checkpoint")) == 0
    assert rows(whole) == rows(again)
    assert_same_model(whole, again)
    return rows(whole)


def test_a_supervised_run_stops_there_with_its_schedule_and_a_last_evaluation_and_is_resumed(tasks, tmp_path):
    found = stopped_and_resumed(tasks, tmp_path, "sft", 2, "--max_steps 5 --save_steps 2")
    assert len(found) == 5 and "eval_loss" in found[-1]
    rates = [row["learning_rate"] for row in found]
    assert rates[0] == pytest.approx(1e-2) and rates[-1] < 3e-3, "the schedule is that of five steps, not of twelve"
    assert json.loads((tmp_path / "whole" / "manifest.json").read_text())["steps"] == 5


def test_an_rl_run_stops_after_so_many_iterations_and_is_resumed(tasks, tmp_path):
    found = stopped_and_resumed(tasks, tmp_path, "filtered", 1, "--max_steps 2 --eval_steps -1")
    assert [row["step"] for row in found] == [0, 1, 2] and "eval_reward" in found[-1]


def test_more_steps_than_the_data_give_change_nothing(tasks, finished, tmp_path):
    assert warm.run(words(tasks, "sft", tmp_path, "--max_steps 1000")) == 0
    assert rows(tmp_path) == rows(finished("sft"))
