"""PPO's clipped surrogate (Schulman et al. 2017), which every estimator here trains on.

    rho = pi / pi_old,   L = -min(rho A, clip(rho, 1 - low, 1 + high) A)
    low < high: DAPO's "clip higher" (Yu et al. 2025)
    dual clip c > 1: for A < 0 the surrogate is at least c A                       Ye et al. 2020

In the first pass over a rollout rho = 1, nothing is clipped, and the gradient is REINFORCE's: -A grad log pi.
"""

import torch
from torch import Tensor


def clipped(
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
