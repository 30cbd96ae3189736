"""What a policy minimises: PPO, GSPO, CISPO, SAPO, GMPO, clip-cov, KL-cov and REINFORCE, off-policy correction, KL and
entropy coefficients; and what a critic minimises.

    PPO         rho = pi / pi_old,   L = -min(rho A, clip(rho, 1 - low, 1 + high) A)          Schulman et al. 2017
                low < high: DAPO's "clip higher" (Yu et al. 2025)
                dual clip c > 1: for A < 0 the surrogate is at least c A                      Ye et al. 2020
    GSPO        PPO with one ratio for a whole answer,                                        Zheng et al. 2025
                rho = exp(mean over the answer's tokens of log pi - log pi_old)
    CISPO       L = -stop_gradient(min(rho, 1 + high)) A log pi                               MiniMax 2025
    SAPO        L = -4 / tau sigmoid(tau (rho - 1)) A,   tau by the sign of A                 Gao et al. 2025
    GMPO        L = -exp(mean over the answer's tokens of d) A,   d = log rho, but           Zhao et al. 2025
                d = min(d, high) where A > 0, and max(d, -low) where A < 0
    clip-cov    PPO, without the tokens chosen at random from those with                      Cui et al. 2025
                low < (log pi_old - mean)(A - mean) < high
    KL-cov      L = -rho A, for the tokens with the largest such covariance + beta |log rho|  Cui et al. 2025
    REINFORCE   L = -A log pi                                                                 Williams 1992

GRPO, RLOO and REINFORCE++ are PPO's loss on other advantages (group_rewards.py). In the first pass over a rollout
rho = 1, nothing is clipped, and PPO's gradient is REINFORCE's. GSPO hands the loss of an answer out to its tokens
alike; with answers of one token it is PPO. CISPO clips the importance weight, not the token's gradient: every token
keeps one, also where PPO would cut it off, and while rho <= 1 + high it is that of -rho A. SAPO's gradient fades with
the distance of rho from 1 instead of ending at a bound; at rho = 1 it is PPO's. GMPO bounds the logarithm of a token's
ratio, so one token moves the answer's ratio little; with answers of one token it is PPO with the bounds e^-low, e^high.

Covariances and their means are over all tokens of an optimizer step, and of the log-probs before the update: the choice
of tokens depends neither on micro-batches nor on processes. The paper's code takes the log-probs in the update, of one
micro-batch; in the first update after sampling the two are equal.

Off-policy correction, where the sampled policy is not quite the trained one (another engine, older weights):

    w = pi_old / pi_sampled of each token, without gradient, times the token's loss; with equal log-probs w = 1
    tis         min(w, high)                                           truncated importance sampling
    icepop      w where low <= w <= high, else 0                       tokens that disagree too much are left out
    sequence    1 where low <= exp(mean over the answer of log w) <= high, else 0       whole answers are left out

KL to the reference, estimated from sampled tokens, and its adaptive coefficient:

    d = log pi - log ref of the sampled token, fp32:   k1 = d,   k2 = d^2 / 2,   k3 = e^(-d) - 1 + d     Schulman 2020
    beta <- beta (1 + clip(KL / target - 1, -0.2, 0.2) samples / horizon)                     Ziegler et al. 2019

Entropy bonus with a target, H the mean entropy of the last step's tokens:                     He et al. 2025 (Skywork)

    coefficient c where H <= target, else 0;   c <- min(c + step, most) where H <= target, else max(c - step, 0)

Over samples of pi, k1 and k3 have mean KL(pi || ref), k2 nearly so when the two are close; k3 is never negative.
As losses they differ: the mean gradient of k2 is that of KL(pi || ref), of k3 that of KL(ref || pi), of k1 zero.

    critic      L = 1/2 max((V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2),   without clip 1/2 (V - G)^2
                explained variance = 1 - Var(G - V) / Var(G)        1: exact; 0: no better than a constant
"""

import torch
from torch import Tensor

from trimtab.algos.group_rewards import answer_sums


def ppo_loss(
    log_probs_N: Tensor, old_N: Tensor, advantages_N: Tensor, low: float, high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """Loss of each token, and which tokens a clip has cut off from the gradient."""
    ratio_N = (log_probs_N - old_N).exp()
    unclipped_N = ratio_N * advantages_N
    surrogate_N = torch.minimum(unclipped_N, ratio_N.clamp(1 - low, 1 + high) * advantages_N)
    if dual_clip is not None:
        bounded_N = torch.maximum(surrogate_N, dual_clip * advantages_N)
        surrogate_N = torch.where(advantages_N < 0, bounded_N, surrogate_N)
    return -surrogate_N, surrogate_N != unclipped_N


def gspo_loss(
    log_probs_N: Tensor, old_N: Tensor, advantages_N: Tensor, owners_N: Tensor, answers: int, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Loss of each token, and which tokens a clip has cut off from the gradient."""
    lengths_S = answer_sums(log_probs_N.new_ones(len(log_probs_N)), owners_N, answers)
    mean_S = answer_sums(log_probs_N - old_N, owners_N, answers) / lengths_S
    advantages_S = answer_sums(advantages_N, owners_N, answers) / lengths_S
    loss_S, clipped_S = ppo_loss(mean_S, mean_S.new_zeros(answers), advantages_S, low, high)
    return loss_S[owners_N], clipped_S[owners_N]


def cispo_loss(log_probs_N: Tensor, old_N: Tensor, advantages_N: Tensor, high: float) -> tuple[Tensor, Tensor]:
    """Loss of each token, and which tokens' weights are clipped."""
    ratio_N = (log_probs_N - old_N).exp().detach()
    return -ratio_N.clamp(max=1 + high) * advantages_N * log_probs_N, ratio_N > 1 + high


def reinforce_loss(log_probs_N: Tensor, advantages_N: Tensor) -> Tensor:
    """Loss of each token."""
    return -advantages_N * log_probs_N


def sapo_loss(
    log_probs_N: Tensor, old_N: Tensor, advantages_N: Tensor, temperatures: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Loss of each token, and no clipped tokens; `temperatures`: of positive advantages, and of the others."""
    tau_N = torch.where(advantages_N > 0, *temperatures).to(log_probs_N.dtype)
    gate_N = torch.sigmoid(tau_N * ((log_probs_N - old_N).exp() - 1)) * 4 / tau_N
    return -gate_N * advantages_N, torch.zeros_like(advantages_N, dtype=torch.bool)


def gmpo_loss(
    log_probs_N: Tensor, old_N: Tensor, advantages_N: Tensor, owners_N: Tensor, answers: int, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Loss of each token, and which tokens a clip has cut off from the gradient."""
    d_N = log_probs_N - old_N
    clipped_N = torch.where(advantages_N > 0, d_N > high, (d_N < -low) & (advantages_N < 0))
    bounded_N = torch.where(clipped_N, d_N.clamp(-low, high), d_N)
    lengths_S = answer_sums(torch.ones_like(d_N), owners_N, answers)
    mean_S = answer_sums(bounded_N, owners_N, answers) / lengths_S
    advantages_S = answer_sums(advantages_N, owners_N, answers) / lengths_S
    return (-mean_S.exp() * advantages_S)[owners_N], clipped_N


def kl_cov_loss(
    log_probs_N: Tensor, old_N: Tensor, advantages_N: Tensor, chosen_N: Tensor, coefficient: float
) -> tuple[Tensor, Tensor]:
    """Loss of each token, and which tokens are pulled back to the old policy."""
    d_N = log_probs_N - old_N
    # The slope of |d| is 1 or -1 however small d is: before the weights move, rounding would decide which.
    pulled_N = chosen_N & (d_N.abs() > ROUNDING)
    return -d_N.exp() * advantages_N + coefficient * d_N.abs() * pulled_N, chosen_N


ROUNDING = 1e-4
"""Differences of log-probs up to this are none."""


def surrogate_loss(
    kind: str,
    log_probs_N: Tensor,
    old_N: Tensor,
    advantages_N: Tensor,
    owners_N: Tensor,
    answers: int,
    *,
    low: float,
    high: float,
    dual_clip: float | None = None,
    temperatures: tuple[float, float] = (1.0, 1.05),
    chosen_N: Tensor | None = None,
    kl_cov_coefficient: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Loss of each token by --policy_loss_type, and which tokens are clipped. `chosen_N`: by their covariance."""
    columns = log_probs_N, old_N, advantages_N
    if kind == "gspo":
        return gspo_loss(*columns, owners_N, answers, low, high)
    if kind == "gmpo":
        return gmpo_loss(*columns, owners_N, answers, low, high)
    if kind == "cispo":
        return cispo_loss(*columns, high)
    if kind == "sapo":
        return sapo_loss(*columns, temperatures)
    if kind == "kl_cov":
        assert chosen_N is not None
        return kl_cov_loss(*columns, chosen_N, kl_cov_coefficient)
    loss_N, clipped_N = ppo_loss(*columns, low, high, dual_clip)
    if kind == "clip_cov":
        assert chosen_N is not None
        return torch.where(chosen_N, 0.0, loss_N), clipped_N | chosen_N
    assert kind == "ppo", kind
    return loss_N, clipped_N


def covariances(log_probs_N: Tensor, advantages_N: Tensor) -> Tensor:
    """Each token's term of the covariance of log-prob and advantage, over all tokens of a step; float64, so that the
    order of summation decides nothing."""
    log_probs_N, advantages_N = log_probs_N.double(), advantages_N.double()
    return (log_probs_N - log_probs_N.mean()) * (advantages_N - advantages_N.mean())


def chosen_by_covariance(
    kind: str, covariances_N: Tensor, ratio: float, bounds: tuple[float, float], shuffled_N: Tensor
) -> Tensor:
    """Which tokens of a step clip_cov leaves out and kl_cov pulls back: a share `ratio` of all, at least one.
    `shuffled_N`: a random permutation, in whose order clip_cov takes the tokens between its bounds."""
    count, chosen_N = max(1, int(ratio * len(covariances_N))), torch.zeros_like(covariances_N, dtype=torch.bool)
    if kind == "kl_cov":
        chosen_N[covariances_N.argsort(descending=True, stable=True)[:count]] = True
        return chosen_N
    within_N = (covariances_N > bounds[0]) & (covariances_N < bounds[1])
    chosen_N[shuffled_N[within_N[shuffled_N]][:count]] = True
    return chosen_N


def policy_objective(
    loss_N: Tensor,
    weights_N: Tensor,
    *,
    coefficient: float = 1.0,
    kl_N: Tensor | None = None,
    kl_coefficient: float = 0.0,
    entropy_N: Tensor | None = None,
    entropy_coefficient: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """coefficient x surrogate + kl_coefficient x KL - entropy_coefficient x entropy, each a sum of tokens' values times
    their weights; and these terms without their coefficients."""
    terms = {"policy_loss": (loss_N * weights_N).sum()}
    loss = coefficient * terms["policy_loss"]
    if kl_N is not None:
        terms["kl_loss"] = (kl_N * weights_N).sum()
        loss = loss + kl_coefficient * terms["kl_loss"]
    if entropy_N is not None:
        terms["entropy"] = (entropy_N * weights_N).sum()
        loss = loss - entropy_coefficient * terms["entropy"]
    return loss, terms


# ---- off-policy correction


NOTICEABLE = 0.1
"""How far from 1 the weight of a token is that counts as corrected."""


def mismatch_weights(
    kind: str, old_N: Tensor, sampled_N: Tensor, owners_N: Tensor, answers: int, low: float, high: float
) -> Tensor:
    log_w_N = (old_N - sampled_N).detach()
    if kind == "tis":
        return log_w_N.exp().clamp(max=high)
    if kind == "icepop":
        w_N = log_w_N.exp()
        return torch.where((low <= w_N) & (w_N <= high), w_N, 0.0)
    assert kind == "sequence", kind
    lengths_S = answer_sums(torch.ones_like(log_w_N), owners_N, answers)
    w_S = (answer_sums(log_w_N, owners_N, answers) / lengths_S).exp()
    return ((low <= w_S) & (w_S <= high)).to(log_w_N.dtype)[owners_N]


def is_corrected(weights_N: Tensor) -> Tensor:
    """Which tokens count noticeably more or less than they would without a correction."""
    return (weights_N - 1).abs() > NOTICEABLE


# ---- KL to the reference


def kl_estimate(log_probs_N: Tensor, reference_N: Tensor, kind: str) -> Tensor:
    """KL of each token; `kind` is k1, k2 or k3."""
    d = log_probs_N.float() - reference_N.float()
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    assert kind == "k3", kind
    return torch.expm1(-d) + d


def adapted_kl_coefficient(coefficient: float, kl: float, target: float, horizon: int, samples: int) -> float:
    """The next coefficient, after `samples` sequences whose mean KL was `kl`."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * samples / horizon)


def adapted_entropy_coefficient(coefficient: float, entropy: float, target: float, step: float, most: float) -> float:
    """The next coefficient, after a step whose tokens had this mean entropy."""
    return min(coefficient + step, most) if entropy <= target else max(coefficient - step, 0.0)


# ---- the critic


def value_loss(values_N: Tensor, old_N: Tensor, returns_N: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Loss of each token, and which tokens the clip has cut off from the gradient."""
    error_N = (values_N - returns_N).square()
    if clip is None:
        return error_N / 2, torch.zeros_like(error_N, dtype=torch.bool)
    clipped_error_N = (values_N.clamp(old_N - clip, old_N + clip) - returns_N).square()
    return torch.maximum(error_N, clipped_error_N) / 2, clipped_error_N > error_N


def explained_variance(values_N: Tensor, returns_N: Tensor) -> Tensor:
    """0 where the returns do not vary, so that there is nothing to explain."""
    variance = returns_N.var(correction=0)
    explained = 1 - (returns_N - values_N).var(correction=0) / variance
    return torch.where(variance > 1e-8, explained, 0.0)
