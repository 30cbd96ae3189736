"""Rewards within a group against their definitions, written out for each answer."""

import statistics

import pytest
import torch

from trimtab.algos.group_rewards import SHAPED_BY, equal_groups, within
from trimtab.config.objective_options import ESTIMATORS

GROUPS = [[1.0, 0.0, 0.0, 0.5], [-3.0, 7.0, 2.0, 2.5], [0.25, 0.25, 0.25, 1.0]]


def others_mean(group, i):
    others = group[:i] + group[i + 1 :]
    return sum(others) / len(others)


DEFINITIONS = {
    "gae": lambda group, i: group[i],
    "reinforce": lambda group, i: group[i],
    "rloo": lambda group, i: group[i] - others_mean(group, i),
    "reinforce_baseline": lambda group, i: group[i] - statistics.fmean(group),
    "dr_grpo": lambda group, i: group[i] - statistics.fmean(group),
    "group_norm": lambda group, i: (group[i] - statistics.fmean(group)) / (statistics.stdev(group) + 1e-9),
}


def test_every_estimator_is_shaped_and_three_are_whitened():
    assert ESTIMATORS.keys() == DEFINITIONS.keys()
    assert {estimator.group for estimator in ESTIMATORS.values()} == SHAPED_BY.keys()
    whitened = {name for name, estimator in ESTIMATORS.items() if estimator.whitened}
    assert whitened == {"gae", "reinforce", "reinforce_baseline"}


@pytest.mark.parametrize("estimator", DEFINITIONS)
@pytest.mark.parametrize("samples", [2, 3, 4])
def test_shaped_rewards_equal_their_definitions(estimator, samples):
    groups = [group[-samples:] for group in GROUPS]
    found = SHAPED_BY[ESTIMATORS[estimator].group](torch.tensor(groups))
    for row, group in zip(found, groups, strict=True):
        expected = [DEFINITIONS[estimator](group, i) for i in range(samples)]
        assert row.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("estimator", ["rloo", "reinforce_baseline", "group_norm", "dr_grpo"])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7, 1e4 / 7])
@pytest.mark.parametrize("samples", [3, 5, 7])
def test_equal_rewards_leave_exactly_nothing(estimator, reward, samples):
    """Also where the mean of n equal floats rounds to another float."""
    assert SHAPED_BY[ESTIMATORS[estimator].group](torch.full((1, samples), reward)).tolist() == [[0.0] * samples]


@pytest.mark.parametrize("estimator", ["rloo", "group_norm", "dr_grpo", "reinforce_baseline"])
def test_one_answer_alone_gets_nothing(estimator):
    assert SHAPED_BY[ESTIMATORS[estimator].group](torch.full((2, 1), 7.7)).tolist() == [[0.0], [0.0]]


def test_groups_of_equal_rewards_are_found():
    rewards = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    assert equal_groups(rewards).tolist() == [True, False, True, False]


def test_filtering_keeps_groups_whose_mean_lies_strictly_inside():
    scores = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.2, 0.2, 0.2], [0.7, 0.7, 0.7]])
    assert within(scores, 0.0, 1.0).tolist() == [False, True, False, True, True]
    assert within(scores, 0.2, 0.7).tolist() == [False, True, False, False, False]
