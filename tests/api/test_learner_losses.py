"""Advantages of rewards, against those that a run gives its answers."""

import dataclasses

import numpy as np
import pytest
import torch

import trimtab
from trimtab.config.rl_jobs import AnyRLOptions
from trimtab.rewards.types import RewardResult
from trimtab.rollout.trajectory import Trajectory
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.token_advantages import compute_advantages

ALL_DRAWN = [3, 1, 2, 5, 4, 4]
SOME_EMPTY = [3, 0, 2, 0, 0, 4]
REWARDS = [0.5, 1.0, -1.0, 0.25, 2.0, 0.0]


@pytest.mark.parametrize("estimator", ["group_norm", "dr_grpo", "rloo", "reinforce", "reinforce_baseline"])
@pytest.mark.parametrize("no_std", [False, True])
@pytest.mark.parametrize("lengths", [ALL_DRAWN, SOME_EMPTY], ids=["all", "some"])
def test_they_are_those_of_a_run(estimator, no_std, lengths):
    if no_std and not estimator.startswith("reinforce"):
        pytest.skip("it does not whiten")
    rollouts = [
        Trajectory(i // 3, i % 3, [1, 2], [3] * length, np.zeros(length, np.float32), "stop")
        for i, length in enumerate(lengths)
    ]
    experience = Experience.of([i // 3 for i in range(6)], rollouts, RewardResult(REWARDS, REWARDS))
    options = dataclasses.replace(
        AnyRLOptions(), advantage_estimator=estimator, no_advantage_std_norm=no_std, reward_clip_range=(-10.0, 10.0)
    )
    compute_advantages(experience, options, 0.0)
    found = torch.tensor(trimtab.advantages(REWARDS, 3, estimator, lengths=lengths, no_advantage_std_norm=no_std))
    torch.testing.assert_close(found[experience.owners_N], experience.advantages_N, rtol=0, atol=0)
    assert all(advantage == 0 for advantage, length in zip(found, lengths) if not length)


def test_a_sample_without_tokens_makes_no_other_better():
    for estimator in ("group_norm", "dr_grpo", "rloo", "reinforce_baseline"):
        assert trimtab.advantages([0, 1.5, 1.5, 1.5], 4, estimator, lengths=[0, 6, 6, 6]) == [0, 0, 0, 0]
    assert trimtab.advantages([9, 0, 1, 2], 4, "rloo", lengths=[0, 1, 1, 1]) == [0, -1.5, 0, 1.5]


@pytest.mark.parametrize(
    "words, rewards, group, config",
    [
        ("did you mean 'group_norm'", [1, 2], 2, {"estimator": "group_nrm"}),
        ("needs a critic", [1, 2], 2, {"estimator": "gae"}),
        ("give a number that divides them", [1, 2, 3], 2, {}),
        ("group must be above 1", [1, 2], 1, {}),
        (r"rewards\[1\] is nan", [1, float("nan")], 2, {}),
        ("rewards must be a list of numbers", ["a", "b"], 2, {}),
        ("rewards is empty", [], 2, {}),
        ("no_advantage_std_norm has no effect", [1, 2], 2, {"no_advantage_std_norm": True}),
        ("at least 0 for each reward", [1, 2], 2, {"estimator": "reinforce", "lengths": [1]}),
        ("at least 0 for each reward", [1, 2], 2, {"lengths": [1, -1]}),
        ("lengths are all 0", [1, 2], 2, {"lengths": [0, 0]}),
    ],
)
def test_a_mistake_is_told(words, rewards, group, config):
    with pytest.raises(trimtab.UserError, match=words):
        trimtab.advantages(rewards, group, **config)


def test_one_answer_to_each_prompt_is_enough_where_nothing_is_compared():
    assert trimtab.advantages([1, 2, 3], 1, "reinforce") == pytest.approx([-1.2247449, 0, 1.2247449])
