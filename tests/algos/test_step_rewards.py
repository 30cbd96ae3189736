"""Rewards of steps: against definitions written out step by step, and the mean gradient of rloo by enumeration.

The enumerated model is that of test_policy_gradient_by_enumeration.py; every token of an answer is a step.
"""

import itertools
import math
import statistics

import pytest
import torch

from tests.algos.flat import flat
from tests.algos.test_policy_gradient_by_enumeration import (
    ANSWERS,
    answer_log_probs,
    assert_same,
    gradient,
    mean_gradient,
)
from trimtab.algos.advantages import discounted_sums
from trimtab.algos.group_rewards import SHAPED_BY, STEPS_SHAPED_BY
from trimtab.config.objective_options import ESTIMATORS

GROUPED = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")
# Two groups of three answers; the scores of each answer's steps.
GROUPS = [[[0.5, 0.5, 0.5, 0.5], [0.9, 0.9], [0.2]], [[0.1, 0.8], [0.4, 0.3, 0.95], [0.7, 0.6]]]


def shaped(estimator, groups):
    """The shaped rewards, in the groups' own nesting."""
    answers = [steps for group in groups for steps in group]
    owners = [i for i, steps in enumerate(answers) for _ in steps]
    scores = torch.tensor([score for steps in answers for score in steps], dtype=torch.float64)
    found = iter(
        STEPS_SHAPED_BY[ESTIMATORS[estimator].group](
            scores, torch.tensor(owners), torch.arange(len(answers)) // len(groups[0])
        ).tolist()
    )
    return [[[next(found) for _ in steps] for steps in group] for group in groups]


def defined(estimator, group, answer, step):
    score, n = group[answer][step], len(group)
    everything = [s for steps in group for s in steps]
    others = statistics.fmean(s for i, steps in enumerate(group) for s in steps if i != answer)
    return {
        "gae": score,
        "reinforce": score,
        "rloo": score - others,
        "reinforce_baseline": (score - others) * (n - 1) / n,
        "dr_grpo": (score - others) * (n - 1) / n,
        "group_norm": (score - statistics.fmean(everything)) / (statistics.stdev(everything) + 1e-9),
    }[estimator]


def test_what_the_table_says_of_steps_is_so():
    assert {estimator.group for estimator in ESTIMATORS.values() if estimator.steps} == STEPS_SHAPED_BY.keys()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_shaped_step_rewards_equal_their_definitions(estimator):
    for group, found in zip(GROUPS, shaped(estimator, GROUPS), strict=True):
        for i, steps in enumerate(group):
            expected = [defined(estimator, group, i, j) for j in range(len(steps))]
            assert found[i] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("estimator", GROUPED)
def test_many_middling_steps_do_not_beat_a_few_good_ones(estimator):
    ((many, few),) = shaped(estimator, [[[0.5] * 4, [0.9] * 2]])
    assert sum(many) < 0 < sum(few)


@pytest.mark.parametrize("estimator", GROUPED)
@pytest.mark.parametrize("score", [0.1, 1 / 3])
def test_steps_that_are_all_scored_alike_leave_exactly_nothing(estimator, score):
    ((first, second, third),) = shaped(estimator, [[[score] * 3, [score], [score] * 7]])
    assert {*first, *second, *third} == {0.0}


@pytest.mark.parametrize("estimator", ["rloo", "dr_grpo"])
def test_where_no_other_answer_has_a_step_there_is_nothing_to_compare_with(estimator):
    assert shaped(estimator, [[[0.3, 0.9], [], []]]) == [[[0.0, 0.0], [], []]]


@pytest.mark.parametrize("estimator", ["rloo", "group_norm"])
def test_whole_answers_are_shaped_as_answers_of_one_step(estimator):
    rewards = torch.tensor([[0.3, 0.9, 0.1]], dtype=torch.float64)
    found = STEPS_SHAPED_BY[ESTIMATORS[estimator].group](rewards[0], torch.arange(3), torch.zeros(3, dtype=torch.int64))
    torch.testing.assert_close(found, SHAPED_BY[ESTIMATORS[estimator].group](rewards)[0])


# Of each answer; as a process reward model's, a step's score depends on what is written up to its end alone.
STEP_SCORES = [[1.0, -0.7], [1.0, 0.2], [1.0, 2.1], [-0.4, 1.5], [-0.4, 1.0], [-0.4, -0.6], [0.3]]


@pytest.mark.parametrize("estimator", ["rloo", "dr_grpo"])
@pytest.mark.parametrize("samples", [2, 3])
def test_the_mean_gradient_is_that_of_the_sum_less_a_fixed_baseline_for_each_step(estimator, samples):
    def advantages(rollout):
        remaining_N, owners_N = flat([len(ANSWERS[a]) for a in rollout])
        scores = torch.tensor([score for a in rollout for score in STEP_SCORES[a]], dtype=torch.float64)
        one_group = torch.zeros(samples, dtype=torch.int64)
        return discounted_sums(
            STEPS_SHAPED_BY[ESTIMATORS[estimator].group](scores, owners_N, one_group), remaining_N, 1.0
        )

    probabilities = answer_log_probs().exp()
    chances, baseline = probabilities.tolist(), 0.0
    for others in itertools.product(range(len(ANSWERS)), repeat=samples - 1):
        mean = statistics.fmean(score for a in others for score in STEP_SCORES[a])
        baseline += mean * math.prod(chances[a] for a in others)
    worth = torch.tensor([sum(score - baseline for score in steps) for steps in STEP_SCORES], dtype=torch.float64)
    scale = 1.0 if estimator == "rloo" else (samples - 1) / samples
    assert_same(mean_gradient(advantages, samples), scale * gradient((probabilities * worth).sum()))
