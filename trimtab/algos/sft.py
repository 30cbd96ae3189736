"""Supervised fine-tuning: the negative log-likelihood of the trained tokens.

    L = - (1 / N) sum over trained tokens of log p(token | what comes before)

N counts the trained tokens of the whole optimiser step, over all its micro-batches and ranks, so the loss returned
here is the sum; the caller divides once.
"""

from torch import Tensor


def sft_loss_sum(log_probs_N: Tensor) -> Tensor:
    return -log_probs_N.sum()
