"""CISPO (MiniMax 2025): the importance weight is clipped, not the token's gradient.

    L = -stop_gradient(min(rho, 1 + high)) A log pi,   rho = pi / pi_old

Every token keeps a gradient, also where PPO would cut it off. While rho <= 1 + high its gradient is that of -rho A.
"""

from torch import Tensor


def weighted(log_probs_N: Tensor, old_N: Tensor, advantages_N: Tensor, high: float) -> tuple[Tensor, Tensor]:
    """Loss of each token, and which tokens' weights are clipped."""
    ratio_N = (log_probs_N - old_N).exp().detach()
    return -ratio_N.clamp(max=1 + high) * advantages_N * log_probs_N, ratio_N > 1 + high
