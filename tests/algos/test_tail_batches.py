"""Losses, weights and gradients of a fixed batch against the formulas written out in plain Python, answer by answer.

Two groups of three answers, of equal and of different lengths. Gradients are those of the tokens' log-probs: what is
held fixed in a loss must not appear in them.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from trimtab.algos.group_rewards import token_scale
from trimtab.algos.policy_losses import kl_estimate, reinforce_loss
from trimtab.algos.tail import (
    answer_returns,
    ctl_advantages,
    effective_samples,
    log_ratios,
    minus_exponential,
    minus_indicator,
    push_down_advantages,
    push_down_factor,
    reinforce_advantages,
    tilted_weights,
    twist_step_weights,
)

GROUP = 3
REWARDS = [0.4, -2.1, 1.3, -0.6, 0.2, -3.0]
BETA, ALPHA, LAMBDA = -1.5, 0.3, 0.25


@dataclass
class Batch:
    lengths: list[int]

    def column(self, seed: int) -> list[list[float]]:
        """Log-probs of the tokens of every answer."""
        drawn = torch.rand(sum(self.lengths), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return [piece.log().tolist() for piece in drawn.split(self.lengths)]

    @property
    def owners(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))

    def scale(self, reduction: str) -> list[float]:
        return [1 / length if reduction == "token_mean" else 1.0 for length in self.lengths]


BATCHES = pytest.mark.parametrize("batch", [Batch([2] * 6), Batch([1, 3, 2, 2, 4, 1])], ids=["equal", "different"])
REDUCTIONS = pytest.mark.parametrize("reduction", ["token_mean", "token_sum"])


def flat(column: list[list[float]], trained: bool = False) -> Tensor:
    return torch.tensor([x for row in column for x in row], dtype=torch.float64, requires_grad=trained)


def rewards_S() -> Tensor:
    return torch.tensor(REWARDS, dtype=torch.float64)


def softmax(scores: list[float]) -> list[float]:
    top = max(scores)
    shares = [math.exp(score - top) for score in scores]
    return [share / sum(shares) for share in shares]


def groups_of(values: list) -> list[list]:
    return [values[i : i + GROUP] for i in range(0, len(values), GROUP)]


def expected_weights(policy: list[list[float]], proposal: list[list[float]] | None) -> list[float]:
    scores = [BETA * reward for reward in REWARDS]
    if proposal is not None:
        scores = [score + sum(p) - sum(q) for score, p, q in zip(scores, policy, proposal)]
    return [weight for group in groups_of(scores) for weight in softmax(group)]


def found_weights(batch: Batch, policy_N: Tensor, proposal_N: Tensor | None) -> Tensor:
    ratios_GA = None
    if proposal_N is not None:
        ratios_GA = log_ratios(policy_N, proposal_N, batch.owners, len(batch.lengths)).view(-1, GROUP)
    return tilted_weights(rewards_S().view(-1, GROUP), BETA, ratios_GA)


def check(loss: Tensor, trained_N: Tensor, column: list[list[float]], coefficients: list[list[float]]) -> None:
    """Of a loss that is the sum of coefficients times log-probs."""
    expected = math.fsum(c * x for cs, xs in zip(coefficients, column) for c, x in zip(cs, xs))
    assert loss.item() == pytest.approx(expected, abs=1e-6)  # the KL and the scales are fp32
    (gradient,) = torch.autograd.grad(loss, trained_N)
    torch.testing.assert_close(gradient, flat(coefficients), atol=1e-6, rtol=0)
    assert gradient.abs().max() > 1e-3


@BATCHES
def test_weights_are_the_softmax_of_p_times_the_potential_over_q(batch):
    policy, proposal = batch.column(1), batch.column(2)
    weights_GA = found_weights(batch, flat(policy), flat(proposal))
    torch.testing.assert_close(weights_GA.flatten().tolist(), expected_weights(policy, proposal))
    sizes = [1 / sum(weight**2 for weight in group) for group in groups_of(expected_weights(policy, proposal))]
    torch.testing.assert_close(effective_samples(weights_GA).tolist(), sizes)


def test_weights_stay_finite_however_unlikely_the_answers_are():
    weights_GA = tilted_weights(torch.tensor([[-9.0, 7.0, -8.9]]), -30.0, torch.tensor([[-900.0, 4000.0, -901.0]]))
    assert weights_GA.isfinite().all() and weights_GA.sum().item() == pytest.approx(1)


def expected_returns(policy: list[list[float]], start: list[list[float]], rewards: list[float]) -> list[float]:
    return [r - LAMBDA * math.fsum(p - s for p, s in zip(ps, ss)) for r, ps, ss in zip(rewards, policy, start)]


def leave_one_out(values: list[float]) -> list[float]:
    return [value - (sum(group) - value) / (GROUP - 1) for group in groups_of(values) for value in group]


TRANSFORMS = {
    "none": (lambda r: r, lambda r: r),
    "exponential": (lambda r: minus_exponential(r, 0.7, -0.5), lambda r: r - 0.7 * math.exp(-0.5 * r)),
    "indicator": (lambda r: minus_indicator(r, 0.7, -1.0), lambda r: r - 0.7 if r < -1 else r),
}


@BATCHES
@REDUCTIONS
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("baseline", [None, 0.0, 1.5])
def test_reinforce_with_and_without_a_transform(batch, reduction, transform, baseline):
    policy, start = batch.column(1), batch.column(3)
    policy_N, owners_N = flat(policy, trained=True), batch.owners
    ours, plain = TRANSFORMS[transform]
    kl_N = kl_estimate(policy_N.detach(), flat(start), "k1").double()
    returns_S = answer_returns(ours(rewards_S()), kl_N, LAMBDA, owners_N)
    advantages_N = reinforce_advantages(returns_S.view(-1, GROUP), baseline).flatten()[owners_N]
    scale_N = token_scale(owners_N, 6, reduction).double()
    loss = reinforce_loss(policy_N, advantages_N * scale_N).sum() / 6

    returns = expected_returns(policy, start, [plain(reward) for reward in REWARDS])
    advantages = leave_one_out(returns) if baseline is None else [value - baseline for value in returns]
    coefficients = [
        [-advantage * scale / 6] * length
        for advantage, scale, length in zip(advantages, batch.scale(reduction), batch.lengths)
    ]
    check(loss, policy_N, policy, coefficients)


@BATCHES
@REDUCTIONS
@pytest.mark.parametrize("second_term", [True, False])
@pytest.mark.parametrize("family", ["model", "modulation"])
def test_contrastive_twist_learning(batch, reduction, second_term, family):
    policy, proposal = batch.column(1), batch.column(2)
    if family == "model":
        twist = [[q - p for q, p in zip(qs, ps)] for qs, ps in zip(proposal, policy)]
    else:
        twist = [[5 * x for x in row] for row in batch.column(4)]  # any numbers
    owners_N, policy_N, proposal_N = batch.owners, flat(policy), flat(proposal)
    twist_N = flat(twist, trained=True)
    weights_GA = found_weights(batch, policy_N, proposal_N)
    steps_N = None
    if second_term:
        steps_N = twist_step_weights(policy_N - proposal_N, twist_N.detach(), owners_N, torch.arange(6) // GROUP)
    scale_N = token_scale(owners_N, 6, reduction).double()
    loss = reinforce_loss(twist_N, ctl_advantages(weights_GA.flatten(), steps_N, owners_N) * scale_N).sum() / 6

    weights = expected_weights(policy, proposal)
    coefficients = []
    for i, length in enumerate(batch.lengths):
        row = []
        for t in range(length):
            nu = 0.0
            if second_term:
                members = range(i - i % GROUP, i - i % GROUP + GROUP)
                scores = []
                for j in members:
                    last = min(t, batch.lengths[j] - 1)
                    prefix = math.fsum(policy[j][u] - proposal[j][u] for u in range(last + 1))
                    scores.append(prefix + twist[j][last])
                nu = softmax(scores)[i % GROUP]
            row.append((nu - weights[i]) * batch.scale(reduction)[i] / 6)
        coefficients.append(row)
    check(loss, twist_N, twist, coefficients)


@BATCHES
@REDUCTIONS
@pytest.mark.parametrize("scale, multiplier", [("per_sample", ALPHA / GROUP), ("per_group", ALPHA)])
@pytest.mark.parametrize("own_samples", [True, False], ids=["base_proposal", "repulse"])
def test_the_push_down_term_with_the_proposal_s_answers_and_with_the_policy_s_own(
    batch, reduction, scale, multiplier, own_samples
):
    policy, proposal = batch.column(1), None if own_samples else batch.column(2)
    owners_N, policy_N = batch.owners, flat(policy, trained=True)
    weights_GA = found_weights(batch, policy_N.detach(), None if own_samples else flat(proposal))
    advantages_N = push_down_advantages(weights_GA.flatten(), push_down_factor(ALPHA, GROUP, scale), GROUP)[owners_N]
    loss = reinforce_loss(policy_N, advantages_N * token_scale(owners_N, 6, reduction).double()).sum() / 6

    groups = len(REWARDS) / GROUP
    weights = expected_weights(policy, proposal)
    coefficients = [
        [multiplier / groups * weight * share] * length
        for weight, share, length in zip(weights, batch.scale(reduction), batch.lengths)
    ]
    check(loss, policy_N, policy, coefficients)
