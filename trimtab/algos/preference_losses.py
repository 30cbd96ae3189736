"""Losses on preferences: DPO, IPO, SimPO, ORPO and KTO of policies; reward models and process reward models.

    h = (log pi(chosen) - log pi(rejected)) - (log ref(chosen) - log ref(rejected))       sums over answer tokens

    DPO    -log sigmoid(beta h)                                                  Rafailov et al. 2023
    cDPO   -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h)                 labels flipped with probability s
    IPO    (h - 1 / (2 beta))^2                                                  Azar et al. 2023
           with h of mean log-probs too: the form that its authors confirmed to TRL as the one of their experiments
    SimPO  -log sigmoid(beta h - gamma), h of mean log-probs, no reference       Meng et al. 2024
    ORPO   NLL(chosen) - beta log sigmoid(log odds ratio), mean log-probs, no reference    Hong et al. 2024

SimPO is DPO with lengths divided out, no reference, and a margin; ORPO is DPO's sigmoid on log-odds plus the NLL of
the chosen answer, which the caller adds as a token mean.

    KTO    good answers: w_good (1 - sigmoid(beta (r - z))),   bad ones: w_bad (1 - sigmoid(beta (z - r)))
           r = log pi(y | x) - log ref(y | x)                                    Ethayarajh et al. 2024
           z = max(0, mean of r over mismatched pairs (x_i, y_{i+1}))            no gradient

KTO's answers are not in pairs. z is one number for the whole optimizer step, so cutting the step into micro-batches
does not change the loss.

    reward model     -log sigmoid(d),   d = r_chosen - r_rejected - margin       Bradley-Terry, in fp32
                     (the documents' log(1 + exp(-d)) is the same function)
    process reward   hard label k: -log p_k,   p the softmax over the reward tokens alone, at the end of every step
                     soft label q (two tokens): -(q log p_0 + (1 - q) log p_1),   p_0 is the positive token
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def dpo_loss(h_P: Tensor, beta: float, label_smoothing: float = 0.0, margin: float = 0.0) -> Tensor:
    """Loss of each pair. `margin` is SimPO's gamma."""
    logits = beta * h_P - margin
    return -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)


def ipo_loss(h_P: Tensor, beta: float) -> Tensor:
    return (h_P - 1 / (2 * beta)).square()


def log_odds_ratio(chosen_mean_P: Tensor, rejected_mean_P: Tensor) -> Tensor:
    """log of odds(chosen) / odds(rejected), odds(p) = p / (1 - p), from mean log-probs."""
    return (chosen_mean_P - rejected_mean_P) - (_log1mexp(chosen_mean_P) - _log1mexp(rejected_mean_P))


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - e^x) for x < 0 without losing digits near either end."""
    x = x.clamp(max=-1e-7)
    return torch.where(x > -0.6931, torch.log(-torch.expm1(x)), torch.log1p(-x.exp()))


# ---- KTO


def kl_baseline(mean_mismatched_ratio: Tensor) -> Tensor:
    """z, from the mean of log pi - log ref over the step's mismatched pairs."""
    return mean_mismatched_ratio.clamp(min=0).detach()


def kto_loss(ratio_B: Tensor, good_B: Tensor, z: Tensor, beta: float, good_weight: float, bad_weight: float) -> Tensor:
    """Loss of each answer; `ratio_B` is its r."""
    gain = torch.where(good_B, ratio_B - z, z - ratio_B)
    weight = torch.where(good_B, good_weight, bad_weight)
    return weight * (1 - torch.sigmoid(beta * gain))


# ---- reward models


def pairwise_loss(chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor | None = None) -> Tensor:
    """Loss of each pair."""
    difference = chosen_P.float() - rejected_P.float()
    if margin_P is not None:
        difference = difference - margin_P
    return -F.logsigmoid(difference)


# ---- process reward models


def hard_step_loss(log_probs_NK: Tensor, labels_N: Tensor) -> Tensor:
    """Loss of each step; `labels_N` are class indices."""
    return -log_probs_NK.gather(1, labels_N.long()[:, None])[:, 0]


def soft_step_loss(log_probs_N2: Tensor, positive_N: Tensor) -> Tensor:
    """Loss of each step; `positive_N` is the probability of the positive label."""
    target_N2 = torch.stack([positive_N, 1 - positive_N], -1)
    return -(target_N2 * log_probs_N2).sum(-1)
