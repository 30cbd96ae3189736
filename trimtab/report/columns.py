"""What a comparison puts side by side: a run, or several that differ only in their seed, as mean and interval."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import PurePath
from typing import Any

import numpy as np

from trimtab.evaluate.seeds import t_intervals
from trimtab.report.curves import Line
from trimtab.report.numbers import plain
from trimtab.report.read import Point, Run, finite
from trimtab.report.settings import PLACES

WITHOUT_MEANING = PLACES | {"seed", "use_tensorboard", "use_visualdl", "record", "wandb_group"}
"""Options in which runs of one experiment may differ."""

COUNTER = re.compile(r"([-_./ ]?seed|(^|[-_./ ])s)?[-_./ ]?[0-9]*$")
"""What stands before the digits in which the names of seeds differ, with digits that they share: -1, _s1, -seed1."""


@dataclass(frozen=True)
class Column:
    label: str
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def several(self) -> bool:
        return len(self.runs) > 1

    @property
    def seeds(self) -> str:
        return ", ".join(plain(run.options.get("seed", "–")) for run in self.runs)

    def mean(self, figure: Callable[[Run], float | None]) -> tuple[float, float] | None:
        """Over the runs that have the figure, and the half-width of its interval."""
        known = [value for run in self.runs if (value := figure(run)) is not None]
        if not known:
            return None
        centre, width = t_intervals(np.array(known)[:, None])
        return float(centre[0]), float(width[0])

    def curve(self, points: Callable[[Run], Sequence[Point]], kind: str, series: int, **more: Any) -> Line:
        """Of one run its points; of several their mean at the steps that all of them have, and its interval."""
        if not self.several:
            return Line(self.label, points(self.first), kind, series, **more)
        curves = [dict(points(run)) for run in self.runs]
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        if not steps:
            return Line(self.label, [], kind, series, **more)
        centre, width = t_intervals(np.array([[curve[step] for step in steps] for curve in curves]))
        mean, low, high = (list(zip(steps, edge.tolist())) for edge in (centre, centre - width, centre + width))
        return Line(self.label, mean, kind, series, low=low, high=high, **more)


def columns_of(runs: Sequence[Run]) -> list[Column]:
    """The runs in their order; one that differs from an earlier one only in its seed joins it."""
    groups: list[list[tuple[str, Run]]] = []
    for label, run in zip(names_of(runs), runs):
        group = next((known for known in groups if _joins(run, [other for _, other in known])), None)
        if group is None:
            groups.append([(label, run)])
        else:
            group.append((label, run))
    labels = _labels([[name for name, _ in group] for group in groups])
    return [Column(label, tuple(run for _, run in group)) for label, group in zip(labels, groups)]


def names_of(runs: Sequence[Run]) -> list[str]:
    """The shortest ends of the runs' paths that tell them apart."""
    paths = [PurePath(run.folder.resolve()).parts for run in runs]
    length = 1
    while len({path[-length:] for path in paths}) < len(paths) and length < max(map(len, paths)):
        length += 1
    return ["/".join(path[-length:]) for path in paths]


def _joins(run: Run, group: Sequence[Run]) -> bool:
    seeds = [finite(member.options.get("seed")) for member in (run, *group)]
    if None in seeds or seeds[0] in seeds[1:]:
        return False
    return run.job == group[0].job and _meaning(run) == _meaning(group[0])


def _meaning(run: Run) -> dict:
    return {name: value for name, value in run.options.items() if name not in WITHOUT_MEANING}


def _labels(groups: Sequence[Sequence[str]]) -> list[str]:
    """A label for each group of names, different from all others."""
    short = [_label(names) for names in groups]
    return [
        label if short.count(label) == 1 else f"{names[0]} to {names[-1]}, {len(names)} seeds"
        for label, names in zip(short, groups)
    ]


def _label(names: Sequence[str]) -> str:
    """What the names of a group begin with, without the word that counts them."""
    if len(names) == 1:
        return names[0]
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*names))
    shared = "".join(letters[0] for letters in alike)
    counted = any(name[len(shared) :][:1].isdigit() for name in names)
    shared = COUNTER.sub("", shared) if counted else shared.rstrip("-_./ ")
    return f"{shared or names[0]}, {len(names)} seeds"
