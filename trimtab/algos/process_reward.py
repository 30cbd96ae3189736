"""Process reward models: at the end of every step, how likely is the positive label?

hard label k:          L = -log p_k                           p: softmax over the reward tokens alone
soft label q (two):    L = -(q log p_0 + (1 - q) log p_1)     p_0 is the positive token
"""

import torch
from torch import Tensor


def hard_step_loss(log_probs_NK: Tensor, labels_N: Tensor) -> Tensor:
    """Loss of each step; `labels_N` are class indices."""
    return -log_probs_NK.gather(1, labels_N.long()[:, None])[:, 0]


def soft_step_loss(log_probs_N2: Tensor, positive_N: Tensor) -> Tensor:
    """Loss of each step; `positive_N` is the probability of the positive label."""
    target_N2 = torch.stack([positive_N, 1 - positive_N], -1)
    return -(target_N2 * log_probs_N2).sum(-1)
