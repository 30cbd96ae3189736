"""Mean and deviation of all rewards of a run so far, by which those of an iteration are standardised.

    joined          n, mean, M = sum of (r - mean)^2 of what was seen and of what is new: with d the difference of means
                    n = a + b,   mean = mean_a + d b / n,   M = M_a + M_b + d^2 a b / n                 Chan et al. 1979
    standardised    (r - mean) / (sqrt(M / n) + 1e-8)

What is new is joined first and standardised by the result, so that the first iteration has something to go by.
"""

import math
from collections.abc import Sequence

from torch import Tensor

NONE = (0.0, 0.0, 0.0)
"""The moments (n, mean, M) before anything was seen."""


def joined(moments: Sequence[float], new_S: Tensor) -> tuple[float, float, float]:
    seen, mean, squares = moments
    new_S = new_S.double()
    new, own = len(new_S), float(new_S.mean())
    total, difference = seen + new, own - mean
    squares += float((new_S - own).square().sum()) + difference**2 * seen * new / total
    return total, mean + difference * new / total, squares


def standardised(rewards_S: Tensor, moments: Sequence[float], *, centred: bool = True) -> Tensor:
    """Not `centred`: parts of rewards, which add up to them."""
    mean = moments[1] if centred else 0.0
    return ((rewards_S.double() - mean) / (deviation(moments) + 1e-8)).to(rewards_S.dtype)


def deviation(moments: Sequence[float]) -> float:
    seen, _, squares = moments
    return math.sqrt(squares / seen)
