"""The few curves that one asks a run for first, each in a line of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from trimtab.report.numbers import percent, short_number, sparkline
from trimtab.report.read import Point, Run
from trimtab.report.rl_summary import success_of


@dataclass(frozen=True)
class Curve:
    name: str
    points: list[Point]
    shown: Callable[[float], str] = short_number

    @property
    def first(self) -> str:
        return self.shown(self.points[0][1])

    @property
    def last(self) -> str:
        return self.shown(self.points[-1][1])

    def drawn(self, width: int) -> str:
        """At most `width` characters; of a longer curve each is the mean of a few steps."""
        values = _means([value for _, value in self.points], width)
        low, high = min(values), max(values)
        flat = high - low <= 1e-9 * max(abs(low), abs(high))
        return "▄" * len(values) if flat else sparkline(values, low, high)


Shown = Callable[[float], str]
RL: dict[str, tuple[str, Shown]] = {
    "kl": ("KL", short_number),
    "teacher_kl": ("KL to teacher", short_number),
    "log_bad_probability": ("log P(bad)", short_number),
    "worst_reward": ("worst reward", short_number),
    "bad_share": ("bad answers", percent),
    "proposal_reward": ("proposal", short_number),
    "sampled_entropy": ("entropy", short_number),
    "entropy": ("entropy", short_number),
    "length": ("length", short_number),
    "turns": ("turns", short_number),
    "age": ("age", short_number),
    "critic_loss": ("critic loss", short_number),
    "grad_norm": ("gradient", short_number),
}
FIXED: dict[str, tuple[str, Shown]] = {
    "loss": ("loss", short_number),
    "eval_loss": ("eval loss", short_number),
    "accuracy": ("accuracy", percent),
    "eval_accuracy": ("eval accuracy", percent),
    "reward_margin": ("margin", short_number),
    "eval_reward_margin": ("eval margin", short_number),
    "nll": ("NLL", short_number),
    "distance": ("distance", short_number),
    "kl": ("KL", short_number),
    "learning_rate": ("learning rate", short_number),
    "grad_norm": ("gradient", short_number),
}


def curves_of(run: Run) -> list[Curve]:
    """The most telling first: a small terminal shows no others."""
    found = []
    if run.is_rl:
        if reward := run.series("reward"):
            found.append(Curve("reward", reward))
        if success := success_of(run):
            found.append(Curve("evaluation", success.points, success.shown))
    for name, (words, shown) in (RL if run.is_rl else FIXED).items():
        points = run.series(name)
        if points and words not in {curve.name for curve in found}:
            found.append(Curve(words, points, shown))
    return found


def _means(values: Sequence[float], width: int) -> list[float]:
    """At most `width` values, each the mean of equally many of the given ones but the first, which may have fewer."""
    size = math.ceil(len(values) / max(1, width))
    starts = range(len(values) - size, -size, -size)
    return [fmean(values[max(0, start) : start + size]) for start in reversed(starts)]
