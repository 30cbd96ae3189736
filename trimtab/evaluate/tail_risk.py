"""How bad the worst outputs are, and how often they come: figures of saved rewards, each with its interval.

    P(bad) = P(r < threshold)                 a share, with Wilson's interval
    CVaR_q = mean of the worst k = floor(q n) rewards, at least one, with a bootstrap interval
    P(bad) = E_q[ p/q 1(bad) ]                from samples of a proposal q, with log weights log p - log q

Intervals hold 95 % and speak of new samples for the same prompts. What is left out: any assumption about the tail
beyond the worst sample seen. All in numpy, so that figures can be made where no torch is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
DRAWS = 5000
DRAWN_AT_ONCE = 2**22  # numbers held by the bootstrap
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class TailMean(Estimate):
    k: int  # samples it is the mean of


@dataclass(frozen=True)
class RareEvent:
    """A probability too small for plain numbers: natural logarithms. Without a single bad sample: -inf, up to 0."""

    log_probability: float
    log_low: float
    log_high: float
    effective_samples: float  # (sum w)^2 / sum w^2 over all samples: how well the proposal covers the model
    effective_bad_samples: float  # the same over the bad ones: how many the estimate rests on


def mean(values: Sequence[float]) -> Estimate:
    """The mean, with the interval of the normal distribution."""
    values = _numbers(values)
    centre = float(values.mean())
    margin = Z * float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return Estimate(centre, centre - margin, centre + margin)


def probability_below(rewards: Sequence[float], threshold: float) -> Estimate:
    rewards = _numbers(rewards)
    return share(int((rewards < threshold).sum()), len(rewards))


def share(count: int, of: int) -> Estimate:
    """`count` of `of`, with Wilson's score interval: not empty where nothing, or everything, was counted."""
    value = count / of
    scale = 1 + Z**2 / of
    centre = (value + Z**2 / (2 * of)) / scale
    margin = Z / scale * math.sqrt(value * (1 - value) / of + (Z / (2 * of)) ** 2)
    # At the ends the bound is exactly 0 or 1; rounding would say otherwise.
    low = 0.0 if count == 0 else centre - margin
    return Estimate(value, low, 1.0 if count == of else centre + margin)


def cvar(rewards: Sequence[float], level: float, *, draws: int = DRAWS, seed: int = 0) -> TailMean:
    """The mean of the worst `level` of the rewards."""
    assert 0 < level <= 1, "a level is a share of the samples"
    ordered = np.sort(_numbers(rewards))
    k = max(1, math.floor(level * len(ordered) + 1e-9))  # 0.29 * 100 is a little below 29
    low, high = np.quantile(_resampled(ordered, k, draws, seed), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return TailMean(float(ordered[:k].mean()), float(low), float(high), k)


def _resampled(ordered: np.ndarray, k: int, draws: int, seed: int) -> np.ndarray:
    """The mean of the lowest k in each of `draws` resamples of all n values.

    Only those k are drawn: the k lowest of n uniform numbers are S_1/S_(n+1), ..., S_k/S_(n+1), where S are the
    partial sums of exponential numbers.
    """
    n, rng = len(ordered), np.random.default_rng(seed)
    means = []
    for begin in range(0, draws, rows := max(1, DRAWN_AT_ONCE // k)):
        count = min(rows, draws - begin)
        sums = rng.standard_exponential((count, k)).cumsum(axis=1)
        whole = sums[:, -1] + rng.standard_gamma(n + 1 - k, count)
        places = (sums / whole[:, None] * n).astype(np.int64)
        means.append(ordered[np.minimum(places, n - 1)].mean(axis=1))
    return np.concatenate(means)


def rare_event(log_weights: Sequence[float], bad: Sequence[bool]) -> RareEvent:
    """P(bad) under the model from samples of a proposal, `log_weights` being log p - log q of each.

    The interval is that of a log-normal estimate: the relative error of the mean weight of bad samples is an additive
    error of its logarithm. It can only know of regions the proposal reaches: look at the effective samples too.
    """
    log_weights, bad = _numbers(log_weights), np.asarray(bad, dtype=bool)
    assert len(log_weights) == len(bad)
    effective = _effective(log_weights)
    chosen = log_weights[bad]
    if not len(chosen):
        return RareEvent(-math.inf, -math.inf, 0.0, effective, 0.0)
    n, total = len(bad), _log_sum(chosen)
    log_probability = total - math.log(n)
    # Var(mean) / mean^2, with mean = (sum over the bad) / n; both terms stay in range at any scale of the weights.
    variance = max(0.0, math.exp(_log_sum(2 * chosen) - 2 * total) - 1 / n) * n / max(1, n - 1)
    margin = Z * math.sqrt(variance)
    return RareEvent(
        log_probability, log_probability - margin, min(0.0, log_probability + margin), effective, _effective(chosen)
    )


def _effective(log_weights: np.ndarray) -> float:
    return math.exp(2 * _log_sum(log_weights) - _log_sum(2 * log_weights))


def _log_sum(logs: np.ndarray) -> float:
    most = float(logs.max())
    return most + math.log(float(np.exp(logs - most).sum()))


def _numbers(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    assert array.ndim == 1 and len(array), "one number a sample, and at least one sample"
    return array
