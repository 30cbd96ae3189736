"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024): good and bad answers that are not in pairs.

    r = log pi(y | x) - log ref(y | x)
    z = max(0, mean of r over mismatched pairs (x_i, y_{i+1}))      no gradient
    good answers: w_good (1 - sigmoid(beta (r - z))),   bad ones: w_bad (1 - sigmoid(beta (z - r)))

z is one number for the whole optimiser step, so cutting the step into micro-batches does not change the loss.
"""

import torch
from torch import Tensor


def kl_baseline(mean_mismatched_ratio: Tensor) -> Tensor:
    """z, from the mean of log pi - log ref over the step's mismatched pairs."""
    return mean_mismatched_ratio.clamp(min=0).detach()


def kto_loss(ratio_B: Tensor, good_B: Tensor, z: Tensor, beta: float, good_weight: float, bad_weight: float) -> Tensor:
    """Loss of each answer; `ratio_B` is its r."""
    gain = torch.where(good_B, ratio_B - z, z - ratio_B)
    weight = torch.where(good_B, good_weight, bad_weight)
    return weight * (1 - torch.sigmoid(beta * gain))
