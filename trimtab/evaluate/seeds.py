"""What several seeds of one experiment say together: a mean and how far it can be trusted.

The t-interval is that of a normally distributed figure, the usual band around training curves. The bootstrap makes no
such assumption and is used where a figure is a share or an extreme; from two or three seeds it is too narrow.
"""

import math

import numpy as np

from trimtab.evaluate.tail_risk import CONFIDENCE, DRAWS, Estimate, t_quantile


def t_intervals(values_SN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and half-width [N] of figures that each of S seeds has measured at N places; one seed has no width."""
    seeds = len(values_SN)
    centre = values_SN.mean(axis=0)
    if seeds == 1:
        return centre, np.zeros_like(centre)
    error = values_SN.std(axis=0, ddof=1) / math.sqrt(seeds)
    return centre, t_quantile((1 + CONFIDENCE) / 2, seeds - 1) * error


def bootstrap_mean(values: list[float], *, draws: int = DRAWS, seed: int = 0) -> Estimate:
    """The mean over seeds, with the percentiles of the means of resampled seeds."""
    numbers = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(len(numbers), size=(draws, len(numbers)))
    low, high = np.quantile(numbers[drawn].mean(axis=1), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(float(numbers.mean()), float(low), float(high))
