"""How far two runs are apart in one figure, step by step. The runs are A, which is compared with, and B.

    weighted relative error   sum |b - a| / sum size,   size = |a|, at least `floor` and at least the row's `scale`
    mean relative error       mean of |b - a| / size
    mean absolute error       mean of |b - a|
    bias                      mean of b - a: errors of one sign do not cancel in it
    first step                |b - a| / size there, before anything that was learnt can differ

The weighted error is what the guides of other devices ask for, freed of the unit of the loss: large values weigh more,
so that a loss near zero at the end of a run does not decide alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from trimtab.errors import UserError
from trimtab.report.numbers import plural, spans
from trimtab.report.read import Run, finite

FEWEST_STEPS = 5
"""Fewer do not show where two runs are going."""


@dataclass(frozen=True)
class Judged:
    """A number of the metrics rows in which two runs are to agree."""

    metric: str
    words: str
    floor: float = 0.0
    """What lies below it counts as much as the floor: for what begins at zero."""
    scale: str = ""
    """Another number of the row, as large as this one would be if its terms did not cancel."""
    first: float | None = None
    """How far apart the first step may be; None: that is told, and not judged."""


@dataclass(frozen=True)
class Place:
    """One step in both runs."""

    step: int
    a: float
    b: float
    own: float
    """What the difference is seen against: the size of A's value, or its scale."""
    floor: float = 0.0

    @property
    def size(self) -> float:
        return max(self.own, self.floor)

    @property
    def difference(self) -> float:
        return self.b - self.a

    @property
    def relative(self) -> float:
        return _over(abs(self.difference), self.size)


@dataclass(frozen=True)
class Errors:
    """What is said of one figure."""

    steps: int
    weighted: float
    without_floor: float
    """The weighted error if no floor held it down: what a reader would compute."""
    mean_relative: float
    mean_absolute: float
    bias: float
    largest: float
    largest_step: int
    first: float
    first_step: int

    @classmethod
    def of(cls, places: Sequence[Place]) -> Errors:
        differences = [abs(place.difference) for place in places]
        worst = max(places, key=lambda place: abs(place.difference))
        return cls(
            steps=len(places),
            weighted=_over(math.fsum(differences), math.fsum(place.size for place in places)),
            without_floor=_over(math.fsum(differences), math.fsum(place.own for place in places)),
            mean_relative=fmean(place.relative for place in places),
            mean_absolute=fmean(differences),
            bias=fmean(place.difference for place in places),
            largest=worst.difference,
            largest_step=worst.step,
            first=places[0].relative,
            first_step=places[0].step,
        )

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it, which has no infinity."""
        return {name: value if finite(value) is not None else None for name, value in asdict(self).items()}


def joined(a: Run, b: Run, judged: Judged, most: int | None = None) -> list[Place]:
    """The steps of both runs, or the first so many. What only one of them has cannot be compared."""
    in_a, in_b = ({row["step"]: row for row in run.rows if 0 < row["step"] <= (most or math.inf)} for run in (a, b))
    _check_steps(a, in_a, b, in_b)
    places = []
    for step in sorted(in_a):
        if judged.metric not in in_a[step] and judged.metric not in in_b[step]:
            continue  # such as the policy's loss while the critic learns alone
        first, second = _value(a, in_a[step], judged), _value(b, in_b[step], judged)
        own = max(abs(first), finite(in_a[step].get(judged.scale)) or 0.0)
        places.append(Place(step, first, second, own, judged.floor))
    if len(places) < FEWEST_STEPS:
        raise UserError(
            f"{a.folder} and {b.folder}: {judged.words} is there in {plural(len(places), a.unit)} of both; at least "
            f"{FEWEST_STEPS} are needed to compare them"
        )
    return places


def _value(run: Run, row: dict[str, Any], judged: Judged) -> float:
    value = finite(row.get(judged.metric))
    if value is None:
        raise UserError(
            f"{run.folder}: {judged.words} of {run.unit} {row['step']} is no number, so there is nothing to compare"
        )
    return value


def _check_steps(a: Run, in_a: dict[int, dict], b: Run, in_b: dict[int, dict]) -> None:
    for run, rows, other, others in ((a, in_a, b, in_b), (b, in_b, a, in_a)):
        if missing := sorted(others.keys() - rows.keys()):
            alone = f", or compare --steps {missing[0] - 1} alone" if missing[0] > FEWEST_STEPS else ""
            raise UserError(
                f"{run.folder}: it lacks {run.unit} {spans(missing)}, which {other.folder} has; let it run to its "
                f"end{alone}"
            )


def _over(difference: float, size: float) -> float:
    return difference / size if size else (math.inf if difference else 0.0)
