"""How far the policy is from the reference: estimates from sampled tokens, and the adaptive coefficient.

    d = log pi - log ref        of the sampled token, fp32
    k1 = d,   k2 = d^2 / 2,   k3 = e^(-d) - 1 + d                                         Schulman 2020

Over samples of pi, k1 and k3 have mean KL(pi || ref), k2 nearly so when the two are close; k3 is never negative.
As losses they differ: the mean gradient of k2 is that of KL(pi || ref), of k3 that of KL(ref || pi), of k1 zero.

    beta <- beta (1 + clip(KL / target - 1, -0.2, 0.2) samples / horizon)          Ziegler et al. 2019
"""

import torch
from torch import Tensor


def estimate(log_probs_N: Tensor, reference_N: Tensor, kind: str) -> Tensor:
    """KL of each token; `kind` is k1, k2 or k3."""
    d = log_probs_N.float() - reference_N.float()
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    assert kind == "k3", kind
    return torch.expm1(-d) + d


def adapted(coefficient: float, kl: float, target: float, horizon: int, samples: int) -> float:
    """The next coefficient, after `samples` sequences whose mean KL was `kl`."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * samples / horizon)
