"""Rewards of the n answers to one prompt, seen against each other: [groups, n] -> [groups, n].

    leave_one_out    R - (sum of the others) / (n - 1)  =  n / (n - 1) (R - mean)   RLOO: Ahmadian et al. 2024
    minus_mean       R - mean              REINFORCE++ with a baseline: Hu et al. 2025; Dr. GRPO: Liu et al. 2025
    standardised     (R - mean) / (std + 1e-9), unbiased std                        GRPO: Shao et al. 2024
    unchanged        R

Answers that are all rewarded alike get exactly 0 from the first three, and so does one that is alone in its group.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def unchanged(rewards_GA: Tensor) -> Tensor:
    return rewards_GA


def minus_mean(rewards_GA: Tensor) -> Tensor:
    return rewards_GA - _means(rewards_GA)


def leave_one_out(rewards_GA: Tensor) -> Tensor:
    samples = rewards_GA.shape[1]
    return minus_mean(rewards_GA) * (samples / max(samples - 1, 1))


def standardised(rewards_GA: Tensor) -> Tensor:
    deviations_GA = minus_mean(rewards_GA)
    if rewards_GA.shape[1] == 1:  # one reward has no deviation
        return deviations_GA
    return deviations_GA / (deviations_GA.std(1, keepdim=True) + 1e-9)


SHAPED_BY: dict[str, Callable[[Tensor], Tensor]] = {
    "unchanged": unchanged,
    "minus_mean": minus_mean,
    "leave_one_out": leave_one_out,
    "standardised": standardised,
}


def compared(rewards_GA: Tensor) -> Tensor:
    """1 for answers that have others in their group, 0 for one alone."""
    return torch.full_like(rewards_GA, float(rewards_GA.shape[1] > 1))


def equal_groups(rewards_GA: Tensor) -> Tensor:
    """Which groups' rewards are all equal: they say nothing about which answer is better."""
    return (rewards_GA == rewards_GA[:, :1]).all(1)


def within(scores_GA: Tensor, low: float, high: float) -> Tensor:
    """Which groups dynamic filtering keeps: neither hopeless nor solved, low < mean < high."""
    means_G = _means(scores_GA)[:, 0]
    return (low < means_G) & (means_G < high)


def _means(values_GA: Tensor) -> Tensor:
    """Measured from the first value: a rounded mean of equal values would leave a deviation, which a std of the same
    size turns into an advantage of 1."""
    first_G1 = values_GA[:, :1]
    return first_G1 + (values_GA - first_G1).mean(1, keepdim=True)
