"""Direct preference optimisation and its relatives, on log-probabilities of whole answers.

    h = (log pi(chosen) - log pi(rejected)) - (log ref(chosen) - log ref(rejected))       sums over answer tokens

    DPO    -log sigmoid(beta h)                                                  Rafailov et al. 2023
    cDPO   -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h)                 labels flipped with probability s
    IPO    (h - 1 / (2 beta))^2                                                  Azar et al. 2023
           with h of mean log-probs too: the form that its authors confirmed to TRL as the one of their experiments
    SimPO  -log sigmoid(beta h - gamma), h of mean log-probs, no reference       Meng et al. 2024
    ORPO   NLL(chosen) - beta log sigmoid(log odds ratio), mean log-probs, no reference    Hong et al. 2024

SimPO is DPO with lengths divided out, no reference, and a margin; ORPO is DPO's sigmoid on log-odds plus the NLL of
the chosen answer, which the caller adds as a token mean.
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
