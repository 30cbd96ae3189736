"""Line charts over the steps of a run: single values, their mean, evaluation points, a band between two curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from trimtab.report.axes import HEIGHT, WIDTH, Area, figure, key, linear, logarithmic, shares, small_shares, steps
from trimtab.report.numbers import short_number
from trimtab.report.read import Point

MOST_POINTS = 600
"""More than a screen shows; longer curves keep the lowest and the highest value of each stretch."""
MOST_TOOLTIPS = 100
SMALL_SHARE = 0.1
"""Shares that are all below it get a closer look."""
COLOURS = 6
"""Series after the sixth have the first colours again, dashed."""


@dataclass(frozen=True)
class Line:
    """One curve. `kind` is a class of the page's style: raw, smooth, only (a lone curve), dots or level."""

    name: str
    points: Sequence[Point]
    kind: str = "only"
    series: int = 0
    """Which colour."""
    in_legend: bool = True
    low: Sequence[Point] = ()
    """With `high`, the edges of the interval around the curve, which is shaded."""
    high: Sequence[Point] = ()


def chart(
    title: str,
    lines: Sequence[Line],
    note: str = "",
    *,
    tall: bool = False,
    share: bool = False,
    level: float | None = None,
    band: tuple[Sequence[Point], Sequence[Point]] | None = None,
) -> str:
    """A <figure> with the curves over a common step axis; says so when there is nothing to draw.

    The value axis starts at zero, unless `tall` and the values span so much that only a logarithm shows them all.
    `share`: the values are shares of one. `level`: a dashed line at this value. `band`: two curves over the same
    steps whose distance is shaded.
    """
    lines = [line for line in lines if line.points]
    keys = "".join(key(line.name, line.kind, line.series % COLOURS) for line in lines if line.in_legend)
    keys = keys if sum(line.in_legend for line in lines) > 1 else ""
    if not lines:
        return figure(title, None, "", note=note)
    values = [value for line in lines for points in (line.points, line.low, line.high) for _, value in points]
    if share and min(values) >= 0 and max(values) <= 1 + 1e-6:
        up = shares() if max(values) > SMALL_SHARE else small_shares(max(values))
    elif tall and _spans_much(values):
        up, note = logarithmic(min(values), max(values)), f"{note}, logarithmic".lstrip(", ")
    else:
        up = linear(min(values), max(values))
    numbers = [step for line in lines for step, _ in line.points]
    area = Area(steps(min(numbers), max(numbers)), up)
    drawing = _band(area, *band) if band else ""
    drawing += "".join(_band(area, line.low, line.high, f" spread c{line.series % COLOURS}") for line in lines)
    if level is not None and up.low <= level <= up.high:
        drawing += f'<line class=level x1=0 x2={WIDTH} y1="{area.y(level):.1f}" y2="{area.y(level):.1f}"/>'
    drawing += "".join(_path(line, area) for line in lines)
    described = f"{title}, steps {short_number(min(numbers))} to {short_number(max(numbers))}"
    return figure(title, area, drawing + tooltips(lines, area), keys=keys, note=note, described=described, tall=tall)


def smooth(points: Sequence[Point], window: int) -> list[Point]:
    """Mean over a centred window, which shrinks at both ends so that it stays centred."""
    sums = [0.0]
    for _, value in points:
        sums.append(sums[-1] + value)
    smoothed = []
    for index, (step, _) in enumerate(points):
        reach = min(window // 2, index, len(points) - 1 - index)
        smoothed.append((step, (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)))
    return smoothed


def window_of(points: Sequence[Point]) -> int:
    """How many steps a mean is taken over: a twentieth of the run, an odd number."""
    return max(1, len(points) // 20) | 1


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most about `most` points that keep every stretch's extremes, so that no spike disappears."""
    if len(points) <= most:
        return list(points)
    stretch = math.ceil(len(points) / (most // 2))
    kept: list[Point] = [points[0]]
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    kept.append(points[-1])
    return sorted(set(kept))


def _spans_much(values: Sequence[float]) -> bool:
    """Positive, and the greatest is over 30 times the least (but no more decades than an axis can label)."""
    return min(values) > 0 and 30 < max(values) / min(values) < 1e9


def _path(line: Line, area: Area) -> str:
    places = [(area.x(step), area.y(value)) for step, value in thin(line.points)]
    colour = f"c{line.series % COLOURS}" + (" dashed" if line.series >= COLOURS else "")
    if line.kind == "dots" or len(places) == 1:
        # A line without length and with round ends is a dot that stays round in a stretched drawing.
        dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places)
        kind = "" if line.kind == "dots" else f" {line.kind}"
        return f'<path class=ring d="{dots}"/><path class="dots{kind} {colour}" d="{dots}"/>'
    return f'<path class="{line.kind} {colour}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in places)}"/>'


def _band(area: Area, first: Sequence[Point], second: Sequence[Point], kind: str = "") -> str:
    edge = [(area.x(step), area.y(value)) for step, value in (*thin(first), *reversed(thin(second)))]
    return f'<path class="band{kind}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in edge)}Z"/>' if edge else ""


def tooltips(lines: Sequence[Line], area: Area) -> str:
    """Transparent strips; the browser shows their <title> under the pointer."""
    values: dict[int, dict[str, None]] = {}
    for line in lines:
        for step, value in line.points:
            values.setdefault(step, {})[f"{line.name} {short_number(value)}"] = None
    numbers = sorted(values)
    dotted = [step for line in lines if line.kind == "dots" for step, _ in line.points]
    chosen = sorted({*numbers[:: math.ceil(len(numbers) / MOST_TOOLTIPS)], *dotted[-MOST_TOOLTIPS:]})
    strips = []
    edges = [0.0, *((area.x(a) + area.x(b)) / 2 for a, b in pairwise(chosen)), float(WIDTH)]
    for step, start, end in zip(chosen, edges, edges[1:]):
        text = f"step {step}: {', '.join(values[step])}"
        strips.append(
            f'<rect x="{start:.1f}" y=0 width="{end - start:.1f}" height={HEIGHT}><title>{escape(text)}</title></rect>'
        )
    return f"<g class=strips>{''.join(strips)}</g>"
