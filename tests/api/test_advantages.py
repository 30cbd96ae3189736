"""Advantages of rewards, against those that a run gives its answers."""

import dataclasses

import numpy as np
import pytest
import torch

import trimtab
from trimtab.config.rl_jobs import AnyRLOptions
from trimtab.rewards.types import RewardResult
from trimtab.rollout.types import Rollout
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.shaping import shape

LENGTHS = [3, 1, 2, 5, 4, 4]
REWARDS = [0.5, 1.0, -1.0, 0.25, 2.0, 0.0]


@pytest.mark.parametrize("estimator", ["group_norm", "dr_grpo", "rloo", "reinforce", "reinforce_baseline"])
@pytest.mark.parametrize("no_std", [False, True])
def test_they_are_those_of_a_run(estimator, no_std):
    if no_std and not estimator.startswith("reinforce"):
        pytest.skip("it does not whiten")
    rollouts = [
        Rollout(i // 3, i % 3, [1, 2], [3] * length, np.zeros(length, np.float32), "stop")
        for i, length in enumerate(LENGTHS)
    ]
    experience = Experience.of([i // 3 for i in range(6)], rollouts, RewardResult(REWARDS, REWARDS))
    options = dataclasses.replace(
        AnyRLOptions(), advantage_estimator=estimator, no_advantage_std_norm=no_std, reward_clip_range=(-10.0, 10.0)
    )
    shape(experience, options, 0.0)
    config = {"lengths": LENGTHS, "no_advantage_std_norm": no_std} if estimator.startswith("reinforce") else {}
    found = torch.tensor(trimtab.advantages(REWARDS, 3, estimator, **config))
    torch.testing.assert_close(found[experience.owners_N], experience.advantages_N, rtol=0, atol=0)


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
        ("lengths has no effect", [1, 2], 2, {"lengths": [1, 2]}),
        ("a number above 0 for each reward", [1, 2], 2, {"estimator": "reinforce", "lengths": [1]}),
    ],
)
def test_a_mistake_is_told(words, rewards, group, config):
    with pytest.raises(trimtab.UserError, match=words):
        trimtab.advantages(rewards, group, **config)


def test_one_answer_to_each_prompt_is_enough_where_nothing_is_compared():
    assert trimtab.advantages([1, 2, 3], 1, "reinforce") == pytest.approx([-1.2247449, 0, 1.2247449])
