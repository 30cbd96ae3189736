"""Correction where what sampled is not quite what is trained: another engine, rounded or older weights.

    w = pi_old / pi_sampled of each token, without gradient, times the token's loss
    tis         min(w, high)                                           truncated importance sampling
    icepop      w where low <= w <= high, else 0                       tokens that disagree too much are left out
    sequence    1 where low <= exp(mean over the answer of log w) <= high, else 0       whole answers are left out

With equal log-probs every weight is 1.
"""

import torch
from torch import Tensor

from trimtab.algos.answers import sums

NOTICEABLE = 0.1
"""How far from 1 the weight of a token is that counts as corrected."""


def weights(
    kind: str, old_N: Tensor, sampled_N: Tensor, owners_N: Tensor, answers: int, low: float, high: float
) -> Tensor:
    log_w_N = (old_N - sampled_N).detach()
    if kind == "tis":
        return log_w_N.exp().clamp(max=high)
    if kind == "icepop":
        w_N = log_w_N.exp()
        return torch.where((low <= w_N) & (w_N <= high), w_N, 0.0)
    assert kind == "sequence", kind
    lengths_S = sums(torch.ones_like(log_w_N), owners_N, answers)
    w_S = (sums(log_w_N, owners_N, answers) / lengths_S).exp()
    return ((low <= w_S) & (w_S <= high)).to(log_w_N.dtype)[owners_N]


def corrected(weights_N: Tensor) -> Tensor:
    """Which tokens count noticeably more or less than they would without a correction."""
    return (weights_N - 1).abs() > NOTICEABLE
