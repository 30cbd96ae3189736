"""A tail run that was killed or stopped anywhere and resumed is the run that was not, bit for bit."""

import itertools
import os
import signal
import time
from functools import cache, partial

import pytest
from safetensors.torch import load_file

from tests import warm
from tests.train.rl.rl_run import assert_identical, at, result, rows, without
from tests.train.tail.tail_run import arguments, metric_files
from trimtab.sandbox import process as waiting
from trimtab.train.tail.tail_run import TailRun


@pytest.fixture
def straight(finished):
    """What the uninterrupted run of each method leaves."""
    return lambda method: everything(finished("tail" if method == "repulse" else f"tail {method}"))


def everything(out):
    return result(out), metric_files(out)


def assert_same(first, second):
    assert_identical(first[0], second[0])
    assert first[1] == second[1]


# Where the run ends: (iteration, what it is about to do, how often it has done that in this iteration).
KILLED = [("repulse", (3, "update", 0)), ("lora", (3, "update", 0)), ("repulse", (3, "update_proposal", 0))]
KILLED += [("rounds", (1, "update_proposal", 1)), ("repulse", (5, "conclude", 0)), ("base_proposal", (3, "update", 0))]
KILLED += [("linear_head", (3, "update_proposal", 0))]
STOPPED = [
    ("repulse", (3, "score_proposed", 0)),
    ("rounds", (3, "update_proposal", 1)),
    ("rounds", (1, "score_proposed", 0)),
]
STOPPED += [("repulse", (3, "sample_proposal", 0)), ("repulse", (5, "conclude", 0))]


def first_ones(moments, count):
    return [*moments[:count], *(pytest.param(*moment, marks=pytest.mark.long) for moment in moments[count:])]


@pytest.mark.short(1)
@pytest.mark.parametrize("method, moment", first_ones(KILLED, 2), ids=str)
def test_killed_and_resumed_equals_uninterrupted(tasks, straight, tmp_path, method, moment):
    words = arguments(tasks, tmp_path, method)
    assert warm.run(words, prepare=partial(at, moment, signal.SIGKILL, TailRun)) == -signal.SIGKILL
    assert warm.run([*words, "--load_checkpoint"]) == 0
    assert_same(everything(tmp_path), straight(method))


@pytest.mark.parametrize("method, moment", first_ones(STOPPED, 1), ids=str)
def test_stopped_by_a_signal_and_resumed_equals_uninterrupted(tasks, straight, tmp_path, method, moment):
    words = arguments(tasks, tmp_path, method)
    printed = warm.output(words, 128 + signal.SIGTERM, prepare=partial(at, moment, signal.SIGTERM, TailRun))
    assert "checkpoint saved in" in printed
    assert len(rows(tmp_path)) == moment[0]
    assert warm.run([*words, "--load_checkpoint"]) == 0
    found, expected = everything(tmp_path), straight(method)
    if moment[1] == "conclude":  # the run that was not stopped has no checkpoint of its end
        found, expected = (((*run[0][:2], {"model": run[0][2]["model"]}), run[1]) for run in (found, expected))
    assert_same(found, expected)


def test_what_is_annealed_goes_from_its_start_to_its_end_by_one_factor(straight):
    found = [(row["alpha"], row["kappa"], row["beta"]) for row in straight("rounds")[0][0]]
    assert found[0] == pytest.approx((5, 5 / 4, -1)) and found[-1] == pytest.approx((0.5, 0.5 / 4, -3))
    for column in zip(*found):
        factors = [after / before for before, after in itertools.pairwise(column)]
        assert factors == pytest.approx([factors[0]] * len(factors))


def test_what_the_proposal_has_learnt_and_said_is_in_the_checkpoint(tasks, tmp_path):
    words = arguments(tasks, tmp_path, "repulse")
    stopped = partial(at, (1, "score_proposed", 0), signal.SIGTERM, TailRun)
    assert warm.run(words, prepare=stopped) == 128 + signal.SIGTERM
    saved = tmp_path / "checkpoints" / "global_step1"
    assert (saved / "proposal").is_dir()
    assert "proposed/rewards_S" in load_file(saved / "experience" / "tensors.safetensors")
    updated = partial(at, (1, "update_proposal", 0), signal.SIGKILL, TailRun)
    assert warm.run([*words, "--load_checkpoint"], prepare=updated) == 0, "it must not be updated again"


@pytest.fixture(scope="module")
def stopped(tasks, tmp_path_factory):
    """Runs that were killed after their first checkpoint, one of each method."""

    @cache
    def make(method):
        out, killed = tmp_path_factory.mktemp(method), partial(at, (3, "update", 0), signal.SIGKILL, TailRun)
        assert warm.run(arguments(tasks, out, method), prepare=killed) == -signal.SIGKILL
        return out

    return make


@pytest.mark.short(2)
@pytest.mark.parametrize(
    "method, other, complaint",
    [
        ("repulse", "lora", "--proposal_lora_rank was 0 there"),
        ("repulse", "linear_head", "--proposal was model there"),
        ("repulse", "reinforce", "trained actor and proposal, and now it should be actor;"),
        ("reinforce", "repulse", "trained actor, and now it should be actor and proposal;"),
    ],
)
def test_a_checkpoint_of_another_method_or_proposal_is_refused_in_one_line(tasks, stopped, method, other, complaint):
    printed = warm.output(arguments(tasks, stopped(method), other, "--load_checkpoint"), 2)
    (line,) = [line for line in printed.splitlines() if "error" in line]
    assert complaint in line and (stopped(method) / "checkpoints").is_dir()


SLEEPS = """
import pathlib, time

def reward_func(queries, prompts, labels):
    if pathlib.Path({flag!r}).exists():
        pathlib.Path({flag!r} + ".slept").touch()
        time.sleep(1000)
    return [len(set(query)) / 10 for query in queries]
"""


@pytest.mark.long
def test_a_signal_while_the_proposals_reward_sleeps_is_obeyed_at_once_and_nothing_is_lost(tasks, tmp_path):
    flag, out, whole = tmp_path / "night", tmp_path / "out", tmp_path / "whole"
    (tmp_path / "reward.py").write_text(SLEEPS.format(flag=str(flag)))

    def words(place):
        return [*without(arguments(tasks, place, "repulse"), "--reward_verifier"), "--reward_func", *reward]

    reward = [f"{tmp_path}/reward.py"]
    log = tmp_path / "log"
    process = warm.start(words(out), prepare=partial(fall_asleep, flag), log=log)
    slept = tmp_path / "night.slept"  # on a busy machine it may have been waited for before, too
    warm.wait_until(lambda: slept.exists() and "waiting for" in log.read_text(), process)
    began = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 128 + signal.SIGTERM and time.monotonic() - began < 8.0
    flag.unlink()
    assert warm.run([*words(out), "--load_checkpoint"]) == 0 == warm.run(words(whole))
    assert_same(everything(out), everything(whole))


def fall_asleep(flag):
    """The reward sleeps from the proposal's second round of answers on."""
    plain, waiting.PATIENCE = TailRun.sample_proposal, 0.3

    def sampled(run, work):
        if run.counters.proposal_steps == 1:
            flag.touch()
        return plain(run, work)

    TailRun.sample_proposal = sampled
