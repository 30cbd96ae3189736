"""The critic's loss: squared distance of values V from returns G, with PPO's value clip.

L = 1/2 max((V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2),   without clip 1/2 (V - G)^2
explained variance = 1 - Var(G - V) / Var(G)        1: exact; 0: no better than a constant
"""

import torch
from torch import Tensor


def clipped(values_N: Tensor, old_N: Tensor, returns_N: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
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
