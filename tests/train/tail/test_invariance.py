"""How a tail update is cut or dealt out to processes changes nothing but rounding."""

from functools import cache

import pytest

from tests import warm
from tests.train.rl.rl_run import rows
from tests.train.tail.tail_run import arguments, metric_files

# So that rounding is not amplified into other samples.
QUIET = "--actor_learning_rate 1e-5 --critic_learning_rate 1e-5 --proposal_learning_rate 1e-5"
LOUD = ("alarms", "seconds", "memory", "tokens_per_second")


@pytest.fixture(scope="module")
def usual(folder, tmp_path_factory):
    @cache
    def make(method):
        out = tmp_path_factory.mktemp("usual")
        assert warm.run(arguments(folder, out, method, QUIET)) == 0
        return out

    return make


def flat(value):
    """All numbers in it, in order."""
    if isinstance(value, dict):
        return [x for name in sorted(value) for x in flat(value[name])]
    if isinstance(value, list):
        return [x for entry in value for x in flat(entry)]
    return [value] if isinstance(value, int | float) else []


def assert_same(first, second):
    mine, theirs = rows(first), rows(second)
    assert [row["step"] for row in mine] == [1, 2, 3, 4, 5]
    for name in mine[0].keys() | theirs[0].keys():
        if not name.startswith(LOUD):
            found, expected = (flat([row[name] for row in some]) for some in (mine, theirs))
            assert found == pytest.approx(expected, abs=1e-5, rel=1e-4), name
    mine, theirs = metric_files(first), metric_files(second)
    assert mine["texts"] == theirs["texts"]
    for name in ("info", "summary", "f"):
        assert flat(mine[name]) == pytest.approx(flat(theirs[name]), abs=1e-5, rel=1e-4), name


@pytest.mark.short(1)
@pytest.mark.parametrize("cut", ["--micro_train_batch_size 16", "--packing_samples --micro_train_batch_size 1"])
def test_cutting_changes_nothing(folder, usual, tmp_path, cut):
    assert warm.run(arguments(folder, tmp_path, "repulse", QUIET, cut)) == 0
    assert_same(tmp_path, usual("repulse"))


LONG = [
    pytest.param(method, 0, marks=pytest.mark.long)
    for method in ("ppo", "reinforce_transform", "rounds", "twist_model", "two_loras")
]


SHORT = [("repulse", 2), ("base_proposal", 3), ("lora", 3), ("linear_head", 2)]


@pytest.mark.short(1)
@pytest.mark.parametrize("method, stage", SHORT + LONG)
def test_two_processes_learn_and_measure_what_one_does(folder, usual, tmp_path, method, stage):
    words = arguments(folder, tmp_path, method, QUIET, f"--zero_stage {stage}")
    assert warm.run_world(words, 2) == [0, 0]
    assert_same(tmp_path, usual(method))
