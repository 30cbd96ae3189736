"""The mean gradient of each estimator, exactly: a language model so small that all its rollouts can be listed.

Three tokens, one of which ends an answer, and at most two of them: seven answers. The policy is a table of logits, a
row for each prefix. A rollout is one group of n answers; its probability times its gradient, summed over all 7^n
groups, is the estimator's mean. The loss of a rollout is the sum over its tokens divided by n.
"""

import itertools
import math
import statistics
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.algos.flat import flat
from tests.algos.tail_world import RAGGED
from trimtab.algos.advantages import discounted_sums, gae, token_rewards, whiten
from trimtab.algos.group_rewards import SHAPED_BY
from trimtab.algos.policy_losses import kl_estimate, ppo_loss
from trimtab.config.objective_options import ESTIMATORS

PREFIXES, ANSWERS = RAGGED.prefixes, RAGGED.answers
REWARDS = [1.0, -0.7, 4.0, 0.0, 1.0, -2.5, 0.3]
BETA = 0.4

TABLE = torch.tensor([[0.2, 0.7, -0.1], [-0.4, 0.3, 0.6], [0.5, -0.6, 0.1]], dtype=torch.float64, requires_grad=True)
REFERENCE = torch.tensor([[0.0, -0.5, 0.9], [0.3, 0.8, -1.0], [-0.7, 0.4, 0.2]], dtype=torch.float64).log_softmax(1)


def answer_log_probs() -> Tensor:
    return RAGGED.log_probs(TABLE)


def gradient(objective: Tensor) -> Tensor:
    return torch.autograd.grad(objective, TABLE)[0]


def policy_gradient() -> Tensor:
    """Of the mean reward, from the probabilities themselves."""
    return gradient((answer_log_probs().exp() * torch.tensor(REWARDS, dtype=torch.float64)).sum())


def kl_gradient() -> Tensor:
    """Of KL(pi || reference), over whole answers."""
    log_probs = answer_log_probs()
    return gradient((log_probs.exp() * (log_probs - RAGGED.log_probs(REFERENCE))).sum())


def exact_values(answers: list[int], beta: float = 0.0) -> Tensor:
    """V of the prefix before each token: the mean of what is still to come, reward less beta KL."""
    log_probs = TABLE.detach().log_softmax(1)
    token_kl = beta * (log_probs - REFERENCE)

    def value(prefix: tuple) -> float:
        if prefix in ANSWERS:
            return REWARDS[ANSWERS.index(prefix)]
        row = PREFIXES.index(prefix)
        tokens = range(3)
        return sum(log_probs[row, k].exp().item() * (value((*prefix, k)) - token_kl[row, k].item()) for k in tokens)

    return torch.tensor([value(ANSWERS[a][:t]) for a in answers for t in range(len(ANSWERS[a]))], dtype=torch.float64)


Advantages = Callable[[list[int]], Tensor]  # of all tokens of a rollout


def mean_gradient(advantages: Advantages, samples: int) -> Tensor:
    """Of minus the loss, over all rollouts: what a step climbs on average."""
    probabilities = answer_log_probs().exp().tolist()
    total = torch.zeros((), dtype=torch.float64)
    for rollout in itertools.product(range(len(ANSWERS)), repeat=samples):
        log_probs_N = RAGGED.token_log_probs(TABLE, list(rollout))
        loss_N, _ = ppo_loss(log_probs_N, log_probs_N.detach(), advantages(list(rollout)), 0.2, 0.2)
        weight = torch.tensor([probabilities[a] for a in rollout], dtype=torch.float64).prod()
        total = total - weight * loss_N.sum() / samples
    return gradient(total)


def estimated(
    estimator: str, beta: float = 0.0, values: Callable[[list[int]], Tensor] | None = None, lam: float = 1.0
) -> Advantages:
    """The way from rewards to advantages before whitening, through the functions under test."""

    def advantages(rollout: list[int]) -> Tensor:
        remaining_N, owners_N = flat([len(ANSWERS[a]) for a in rollout])
        rewards = torch.tensor([[REWARDS[a] for a in rollout]], dtype=torch.float64)
        shaped_S = SHAPED_BY[ESTIMATORS[estimator].group](rewards)[0]
        log_probs_N = RAGGED.token_log_probs(TABLE.detach(), rollout)
        kl_N = kl_estimate(log_probs_N, RAGGED.token_log_probs(REFERENCE, rollout), "k1") if beta else None
        rewards_N = token_rewards(shaped_S, kl_N, beta, remaining_N, owners_N)
        if values is None:
            return discounted_sums(rewards_N, remaining_N, 1.0)
        return gae(rewards_N, values(rollout), remaining_N, 1.0, lam)[0]

    return advantages


def assert_same(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    assert expected.abs().max() > 0.1, "nothing to compare"
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("estimator, samples", [("rloo", 2), ("rloo", 3), ("reinforce", 1), ("reinforce", 2)])
def test_rloo_and_reinforce_before_whitening_give_the_policy_gradient(estimator, samples):
    assert_same(mean_gradient(estimated(estimator), samples), policy_gradient())


@pytest.mark.parametrize("lam", [0.0, 0.6, 1.0])
def test_gae_with_the_exact_value_function_gives_the_policy_gradient_for_every_lambda(lam):
    assert_same(mean_gradient(estimated("gae", values=exact_values, lam=lam), 1), policy_gradient())


def test_gae_with_wrong_values_gives_the_policy_gradient_for_lambda_one_only():
    def wrong(rollout: list[int]) -> Tensor:
        prefixes = [PREFIXES.index(ANSWERS[a][:t]) for a in rollout for t in range(len(ANSWERS[a]))]
        return torch.tensor([3.0, -1.0, 0.5], dtype=torch.float64)[prefixes]

    assert_same(mean_gradient(estimated("gae", values=wrong, lam=1.0), 1), policy_gradient())
    biased = mean_gradient(estimated("gae", values=wrong, lam=0.6), 1)
    assert (biased - policy_gradient()).abs().max() > 0.02


@pytest.mark.parametrize("estimator", ["dr_grpo", "reinforce_baseline"])
@pytest.mark.parametrize("samples", [2, 3])
def test_a_mean_that_includes_the_answer_itself_gives_its_share_of_the_policy_gradient(estimator, samples):
    expected = policy_gradient() * (samples - 1) / samples
    assert_same(mean_gradient(estimated(estimator), samples), expected)


@pytest.mark.parametrize(
    "advantages, samples",
    [
        (estimated("rloo", BETA), 2),
        (estimated("reinforce", BETA), 1),
        (estimated("gae", BETA, values=lambda rollout: exact_values(rollout, BETA), lam=0.6), 1),
    ],
    ids=["rloo", "reinforce", "gae"],
)
def test_kl_in_the_reward_gives_the_gradient_of_reward_less_beta_kl(advantages, samples):
    assert kl_gradient().abs().max() > 0.1
    expected = policy_gradient() - BETA * kl_gradient()
    assert_same(mean_gradient(advantages, samples), expected, tolerance=1e-6)  # KL is fp32


# ---- estimators that are no multiple of the policy gradient: the mean of their own formula, without torch's gradients


def mean_of_formula(token_weights: Callable[[list[int]], list[list[float]]], samples: int) -> Tensor:
    """Sum over rollouts of P(rollout) / n times each token's weight times its score, one_hot(token) - pi."""
    probabilities = TABLE.detach().softmax(1).tolist()

    def probability(answer: int) -> float:
        pairs = enumerate(ANSWERS[answer])
        return math.prod(probabilities[PREFIXES.index(ANSWERS[answer][:t])][token] for t, token in pairs)

    total = [[0.0] * 3 for _ in PREFIXES]
    for rollout in itertools.product(range(len(ANSWERS)), repeat=samples):
        share = math.prod(map(probability, rollout)) / samples
        for answer, weights in zip(rollout, token_weights(list(rollout)), strict=True):
            for t, weight in enumerate(weights):
                row = PREFIXES.index(ANSWERS[answer][:t])
                for k in range(3):
                    score = (k == ANSWERS[answer][t]) - probabilities[row][k]
                    total[row][k] += share * weight * score
    return torch.tensor(total, dtype=torch.float64)


def spread(weights: list[float], rollout: list[int]) -> list[list[float]]:
    """The same weight for every token of an answer."""
    return [[weight] * len(ANSWERS[answer]) for weight, answer in zip(weights, rollout, strict=True)]


@pytest.mark.parametrize("samples", [2, 3])
def test_group_norm_gives_the_mean_of_its_formula(samples):
    def formula(rollout: list[int]) -> list[list[float]]:
        rewards = [REWARDS[answer] for answer in rollout]
        mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
        return spread([(reward - mean) / (deviation + 1e-9) for reward in rewards], rollout)

    found = mean_gradient(estimated("group_norm"), samples)
    assert_same(found, mean_of_formula(formula, samples), tolerance=1e-7)  # next to 1e-9, rounding shows
    scale = (found * policy_gradient()).sum() / policy_gradient().square().sum()
    assert (found - scale * policy_gradient()).abs().max() > 0.01, "not a multiple of the policy gradient"


def whitened_formula(estimator: str, scale: bool) -> Callable[[list[int]], list[list[float]]]:
    def formula(rollout: list[int]) -> list[list[float]]:
        rewards = [REWARDS[answer] for answer in rollout]
        baseline = statistics.fmean(rewards) if estimator == "reinforce_baseline" else 0.0
        advantages = spread([reward - baseline for reward in rewards], rollout)
        if estimator == "gae":  # lambda is 1: the reward less the value before the token
            values = exact_values(rollout).split([len(ANSWERS[answer]) for answer in rollout])
            advantages = [
                [x - v for x, v in zip(row, row_values.tolist(), strict=True)]
                for row, row_values in zip(advantages, values, strict=True)
            ]
        tokens = [x for row in advantages for x in row]
        mean, variance = statistics.fmean(tokens), statistics.pvariance(tokens)
        divisor = max(variance, 1e-8) ** 0.5 if scale else 1.0
        return [[(x - mean) / divisor for x in row] for row in advantages]

    return formula


@pytest.mark.parametrize("scale", [True, False], ids=["scaled", "centred"])
@pytest.mark.parametrize("estimator", [name for name, known in ESTIMATORS.items() if known.whitened])
def test_whitened_estimators_give_the_mean_of_their_formulas(estimator, scale):
    samples = 2
    raw = estimated(estimator, values=exact_values if estimator == "gae" else None)
    found = mean_gradient(lambda rollout: whiten(raw(rollout), scale), samples)
    assert_same(found, mean_of_formula(whitened_formula(estimator, scale), samples), tolerance=1e-8)
