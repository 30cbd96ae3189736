"""The experiment in miniature: two tokens of a vocabulary of 200, a few of which are rare and bad.

REINFORCE and RePULSe get the same number of sampled answers. Policy and proposal are tables, so P(bad) is exact.
"""

import math

import pytest
import torch
from torch import Tensor

from trimtab.algos.group_rewards import token_scale
from trimtab.algos.policy_losses import reinforce_loss
from trimtab.algos.tail import (
    ctl_advantages,
    log_ratios,
    push_down_advantages,
    reinforce_advantages,
    tilted_weights,
    twist_step_weights,
)

VOCABULARY, BAD, GROUP, SAMPLED = 200, 4, 250, 200_000
KAPPA, BETA = 0.02, -10.0


class Table:
    """A model of answers of two tokens: logits of the first, and of the second after each first."""

    def __init__(self, first: Tensor, second: Tensor, rate: float):
        self.parameters = [tensor.clone().requires_grad_() for tensor in (first, second)]
        self.optimizer = torch.optim.Adam(self.parameters, lr=rate)

    def sample(self, generator: torch.Generator) -> Tensor:
        first, second = (tensor.detach().softmax(-1) for tensor in self.parameters)
        firsts = torch.multinomial(first, GROUP, replacement=True, generator=generator)
        return torch.stack([firsts, torch.multinomial(second[firsts], 1, generator=generator)[:, 0]], 1)

    def log_probs(self, answers_S2: Tensor) -> Tensor:
        """[N] of the tokens, one answer after another."""
        first, second = (tensor.log_softmax(-1) for tensor in self.parameters)
        return torch.stack([first[answers_S2[:, 0]], second[answers_S2[:, 0], answers_S2[:, 1]]], 1).flatten()

    def step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def joint(self) -> Tensor:
        """Log-prob of every answer: [first, second]."""
        first, second = (tensor.detach().double().log_softmax(-1) for tensor in self.parameters)
        return first[:, None] + second


def run(seed: int, with_proposal: bool) -> tuple[float, float]:
    """log P(bad) and mean reward at the end."""
    generator = torch.Generator().manual_seed(seed)
    start = [torch.randn(VOCABULARY, generator=generator), torch.randn(VOCABULARY, VOCABULARY, generator=generator)]
    for logits in start:
        logits[..., :BAD] -= 3.0
    worth_V = torch.rand(VOCABULARY, generator=generator)
    worth_V[:BAD] = -3.0
    lower_VV = torch.minimum(worth_V[:, None], worth_V)
    rewards_VV = torch.where(lower_VV < 0, lower_VV, (worth_V[:, None] + worth_V) / 2)
    policy, proposal = Table(*start, rate=0.1), Table(*start, rate=0.3)
    owners_N, one_group = torch.arange(GROUP).repeat_interleave(2), torch.zeros(GROUP, dtype=torch.int64)
    scale_N = token_scale(owners_N, GROUP, "token_mean")

    def reward(answers_S2: Tensor) -> Tensor:
        return rewards_VV[answers_S2[:, 0], answers_S2[:, 1]]

    for _ in range(SAMPLED // (GROUP * (1 + with_proposal))):
        own = policy.sample(generator)
        advantages_N = reinforce_advantages(reward(own)[None]).flatten()[owners_N]
        loss = reinforce_loss(policy.log_probs(own), advantages_N * scale_N).sum() / GROUP
        if with_proposal:
            drawn = proposal.sample(generator)
            policy_N, proposal_N = policy.log_probs(drawn), proposal.log_probs(drawn)
            fixed_N, old_N = policy_N.detach(), proposal_N.detach()
            ratios_S = log_ratios(fixed_N, old_N, owners_N, GROUP)
            weights_GA = tilted_weights(reward(drawn)[None], BETA, ratios_S[None])
            steps_N = twist_step_weights(fixed_N - old_N, old_N - fixed_N, owners_N, one_group)
            learnt_N = ctl_advantages(weights_GA.flatten(), steps_N, owners_N) * scale_N
            proposal.step(reinforce_loss(proposal_N - fixed_N, learnt_N).sum() / GROUP)
            pushed_N = push_down_advantages(weights_GA.flatten(), KAPPA, GROUP)[owners_N] * scale_N
            loss = loss + reinforce_loss(policy_N, pushed_N).sum() / GROUP
        policy.step(loss)
    joint = policy.joint()
    bad = (rewards_VV < 0).double().log() + joint
    return bad.flatten().logsumexp(0).item(), (joint.exp() * rewards_VV).sum().item()


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)])
def test_repulse_ends_nats_below_reinforce_with_about_the_same_mean_reward(seed):
    plain, plain_reward = run(seed, with_proposal=False)
    pushed, pushed_reward = run(seed, with_proposal=True)
    assert -math.inf < pushed < plain - 5
    assert abs(pushed_reward - plain_reward) < 0.15
