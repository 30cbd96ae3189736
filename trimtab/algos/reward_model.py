"""Reward models from comparisons (Bradley-Terry): the chosen answer scores higher than the rejected one.

    L = -log sigmoid(d),   d = r_chosen - r_rejected - margin

The documents' second form, log(1 + exp(-d)), is the same function written differently; both are computed here
without overflow, in fp32.
"""

import torch.nn.functional as F
from torch import Tensor


def pairwise_loss(chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor | None = None) -> Tensor:
    """Loss of each pair."""
    difference = chosen_P.float() - rejected_P.float()
    if margin_P is not None:
        difference = difference - margin_P
    return -F.logsigmoid(difference)
