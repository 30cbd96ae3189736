"""An RL run that was killed or stopped anywhere and resumed is the run that was not, bit for bit."""

import json
import os
import random
import signal
from functools import partial

import pytest

from tests import warm
from tests.train.rl.rl_run import ESTIMATORS, ITERATIONS, arguments, assert_identical, at, result, rows
from trimtab.models.compile import CompileResult
from trimtab.train import layer_compilation as compiling

# Where the run ends: (iteration, what it is about to do, how often it has done that in this iteration).
DURING = [(2, "sample", 0), (3, "update", 1), (1, "write", 0), (0, "score", 0)]
WHATS = [("sample", 0), ("score", 0), ("update", 0), ("update", 1), ("evaluate", 0), ("write", 0)]
drawn = random.Random(6)
ANYWHERE = [(drawn.choice(list(ESTIMATORS)), drawn.randrange(4), *drawn.choice(WHATS)) for _ in range(20)]
STOPPED = [(2, "sample", 0), (3, "update", 0), (1, "score", 0), (0, "evaluate", 0), (1, "evaluate", 0)]
STOPPED += [(4, "evaluate", 0), (0, "sample", 0)]


@pytest.mark.short(1)
@pytest.mark.parametrize("moment", DURING, ids=str)
@pytest.mark.parametrize("estimator", ["ppo", pytest.param("lora", marks=pytest.mark.long)])
def test_killed_and_resumed_equals_uninterrupted(tasks, finished, tmp_path, estimator, moment):
    check_killed(tasks, finished, tmp_path, estimator, moment)


def test_killed_and_resumed_with_muon_and_an_average_equals_uninterrupted(tasks, finished, tmp_path):
    check_killed(tasks, finished, tmp_path, "muon", (3, "update", 1))


@pytest.mark.long
@pytest.mark.parametrize("estimator, iteration, what, done", ANYWHERE)
def test_killed_at_twenty_random_moments(tasks, finished, tmp_path, estimator, iteration, what, done):
    check_killed(tasks, finished, tmp_path, estimator, (iteration, what, done))


def check_killed(tasks, finished, out, estimator, moment):
    code = warm.run(arguments(tasks, out, estimator), prepare=partial(at, moment, signal.SIGKILL))
    seldom = estimator == "filtered" or moment[1] == "evaluate"  # out of prompts before, or not due in that iteration
    assert code == -signal.SIGKILL or (code == 0 and seldom)
    assert warm.run(arguments(tasks, out, estimator, "--load_checkpoint")) == 0
    assert_identical(result(out), result(finished(estimator)))


@pytest.mark.short(1)
@pytest.mark.parametrize(
    "moment",
    [*STOPPED[::3], *(pytest.param(m, marks=pytest.mark.long) for m in STOPPED if m not in STOPPED[::3])],
    ids=str,
)
def test_stopped_by_a_signal_and_resumed_equals_uninterrupted(tasks, finished, tmp_path, moment):
    words = arguments(tasks, tmp_path, "ppo")
    printed = warm.output(words, 128 + signal.SIGTERM, prepare=partial(at, moment, signal.SIGTERM))
    assert "checkpoint saved in" in printed
    started = moment != (0, "evaluate", 0)
    assert len(rows(tmp_path)) == moment[0] + started  # one is of the evaluation before training
    assert warm.run([*words, "--load_checkpoint"]) == 0
    found, expected = result(tmp_path), result(finished("ppo"))
    if moment[0] == ITERATIONS - 1:  # no checkpoint comes after the one that was written when the run stopped
        found, expected = ((*run[:2], {"model": run[2]["model"]}) for run in (found, expected))
    assert_identical(found, expected)


@pytest.mark.long
def test_what_is_measured_at_the_start_is_told_once_however_often_it_is_measured(tasks, finished, tmp_path):
    words = arguments(tasks, tmp_path, "ppo")
    stopped = partial(at, (0, "measure_start", 0), signal.SIGTERM)
    assert warm.run(words, prepare=stopped) == 128 + signal.SIGTERM
    killed = partial(at, (0, "update", 0), signal.SIGKILL)
    assert warm.run([*words, "--load_checkpoint"], prepare=killed) == -signal.SIGKILL
    assert warm.run([*words, "--load_checkpoint"]) == 0
    assert rows(tmp_path) == rows(finished("ppo"))


def test_a_compiler_that_failed_while_the_run_was_told_to_stop_is_asked_again(tasks, tmp_path):
    words = arguments(tasks, tmp_path, "grpo", "--compile on")
    assert warm.run(words, prepare=failing_under_a_signal) == 128 + signal.SIGTERM
    state = json.loads((tmp_path / "checkpoints" / "global_step0" / "state.json").read_text())
    assert state["compiled"] is None


def failing_under_a_signal():
    def fail(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)
        return CompileResult("the compiler fails")

    compiling.compile_layers = fail
    compiling.require_compiler = lambda device: None


def test_what_was_sampled_is_not_sampled_again_after_a_signal(tasks, tmp_path):
    words = arguments(tasks, tmp_path, "grpo")
    moment = (1, "update", 1)
    assert warm.run(words, prepare=partial(at, moment, signal.SIGTERM)) == 128 + signal.SIGTERM
    saved = tmp_path / "checkpoints" / "global_step1" / "experience" / "tensors.safetensors"
    assert saved.exists(), "the rollout in hand is part of the checkpoint"
    assert warm.run([*words, "--load_checkpoint"], prepare=partial(at, (1, "sample", 0), signal.SIGKILL)) == 0


def test_a_checkpoint_of_other_prompts_is_refused(tasks, tmp_path):
    words = arguments(tasks, tmp_path, "grpo")
    assert warm.run(words, prepare=partial(at, (2, "sample", 0), signal.SIGKILL)) == -signal.SIGKILL
    other = [word.replace("prompts.jsonl", "test.jsonl") for word in words]
    assert "other data" in warm.output([*other, "--load_checkpoint"], 2)
