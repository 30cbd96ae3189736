"""Ragged sequences that lie one after another."""

import torch
from torch import Tensor


def flat(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """How many tokens of its sequence come after each token, and which sequence it belongs to."""
    remaining = [length - 1 - t for length in lengths for t in range(length)]
    owners = [s for s, length in enumerate(lengths) for _ in range(length)]
    return torch.tensor(remaining, dtype=torch.int64), torch.tensor(owners, dtype=torch.int64)
