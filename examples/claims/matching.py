"""Two methods compared where they agree on something: each is a line through its own points."""

from collections.abc import Sequence

import numpy as np


def at(value: float, along: Sequence[float], height: Sequence[float]) -> float | None:
    """The height of the line through the points at this value; None beside the line, where nothing is known."""
    order = np.argsort(along, kind="stable")
    along, height = np.asarray(along, dtype=float)[order], np.asarray(height, dtype=float)[order]
    if not along[0] <= value <= along[-1]:
        return None
    return float(np.interp(value, along, height))


def shared_range(*lines: Sequence[float]) -> tuple[float, float] | None:
    """Where all of them know something."""
    low, high = max(map(min, lines)), min(map(max, lines))
    return (low, high) if low < high else None
