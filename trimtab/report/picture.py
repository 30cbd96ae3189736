"""One chart of a report: which metrics share it, what they are called, which way is better."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

EVALUATION = "eval_"
BOUNDS = ("_low", "_high")
"""Of an evaluation's 95 % interval."""


@dataclass(frozen=True)
class Picture:
    """One chart: the metrics drawn in it, each with its name in the legend."""

    title: str
    metrics: dict[str, str]
    note: str = ""
    tall: bool = False
    share: bool = False
    level: float | None = None
    limit: str = ""
    """An option whose value the metrics cannot pass: a dashed line, once they come near it."""
    band: bool = False
    """Shade what lies between the two metrics."""
    better: int = 0
    """+1: more is better, -1: less is better, 0: neither."""
    noun: str = ""
    """What the names in the legend are adjectives of."""

    def name_of(self, metric: str) -> str:
        """What a picture of this metric alone is called."""
        name = self.metrics[metric]
        if len(self.metrics) == 1:
            return self.title
        return f"{name[0].upper()}{name[1:]} {self.noun}" if self.noun else f"{self.title}, {name}"

    def only(self, recorded: Container[str]) -> Picture:
        """With the metrics that were recorded."""
        return replace(self, metrics={metric: name for metric, name in self.metrics.items() if metric in recorded})
