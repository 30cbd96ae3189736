"""What is told of a rollout's rewards: sums that discounting does not touch."""

import pytest
import torch

from tests.train.rl.test_experience import make
from trimtab.config.jobs import PPOOptions
from trimtab.train.rl.shaping import shape


@pytest.mark.parametrize("estimator", ["gae", "reinforce", "rloo"])
def test_the_return_is_the_plain_sum_of_token_rewards(estimator):
    steps = [[(0, 0.5)] for _ in range(9)]
    experience = make(steps=steps)
    experience.old_N = experience.sampled_N
    experience.reference_N = experience.sampled_N - 0.5
    experience.values_N = torch.zeros_like(experience.sampled_N)
    options = PPOOptions(advantage_estimator=estimator, gamma=0.3, lambd=0.5, n_samples_per_prompt=3)
    figures = shape(experience, options, kl_coefficient=0.1)
    kl = 0.1 * 0.5 * float(experience.lengths_S.float().mean())
    rewards = 0.0 if estimator == "rloo" else float(experience.rewards_S.mean()) + 0.5
    assert figures["return"] == pytest.approx(rewards - kl, abs=1e-6)
