"""What a claim is made of: the best of k answers without bias, intervals that speak of new prompts, and methods
compared where they agree on something, each as a line through its own points."""

from collections.abc import Sequence
from math import comb, log

import numpy as np

RESAMPLES = 2000


def best_of(scores: Sequence[float], judged_by: Sequence[float], k: int) -> float:
    """The expected score of the answer that a judge likes best among k, over all choices of k of these answers.

    In the order of the judge the answer at place i (from 0) is the best of C(i, k - 1) of the C(n, k) choices.
    Which of two answers comes first that the judge likes alike is left to their order.
    """
    n = len(scores)
    assert 1 <= k <= n, f"the best of {k} among {n} answers"
    order = np.argsort(judged_by, kind="stable")
    return sum(comb(i, k - 1) * scores[place] for i, place in enumerate(order)) / comb(n, k)


def pass_at(right: Sequence[bool], k: int) -> float:
    """The chance that one of k answers is right: the best of k, judged by what is right."""
    return best_of([float(one) for one in right], right, k)


def kl_of_best_of(k: int) -> float:
    """Of the best of k against one answer, if no two are alike: in nats."""
    return log(k) - (k - 1) / k


def interval(of_prompts: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Mean over prompts and its 95 % interval, by drawing as many prompts anew (bootstrap)."""
    values = np.asarray(of_prompts, dtype=float)
    drawn = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[drawn].mean(1), [0.025, 0.975])
    return float(values.mean()), float(low), float(high)


def at(value: float, along: Sequence[float], height: Sequence[float], beyond: float = 0.0) -> float | None:
    """The height of the line through the points at this value; None beside the line, where nothing is known. The line's
    last pieces go on for this part of its length."""
    order = np.argsort(along, kind="stable")
    along, height = np.asarray(along, dtype=float)[order], np.asarray(height, dtype=float)[order]
    further = beyond * (along[-1] - along[0])
    if not along[0] - further <= value <= along[-1] + further:
        return None
    if along[0] <= value <= along[-1]:
        return float(np.interp(value, along, height))
    end, next_to_it = (0, 1) if value < along[0] else (-1, -2)
    if along[end] == along[next_to_it]:
        return None  # two points above each other have no direction
    slope = (height[end] - height[next_to_it]) / (along[end] - along[next_to_it])
    return float(height[end] + slope * (value - along[end]))


def shared_range(*lines: Sequence[float]) -> tuple[float, float] | None:
    """Where all of them know something."""
    low, high = max(map(min, lines)), min(map(max, lines))
    return (low, high) if low < high else None
