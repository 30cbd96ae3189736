"""The frame of every picture: a drawing area as inline SVG, without script, with its labels beside it.

The SVG holds only the drawing and is stretched to whatever room there is; strokes keep their width
(`vector-effect`), and every label is HTML. So text has one size on a phone, a screen and paper.
Colours come from the page's custom properties through class names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from trimtab.report.formatting import short_number
from trimtab.report.run_data import Point

WIDTH, HEIGHT = 1000, 300


@dataclass(frozen=True)
class Axis:
    """A range of values and the ticks in it; `place` maps a value to 0..1."""

    low: float
    high: float
    ticks: Sequence[float]
    labels: Sequence[str]
    scale: Callable[[float], float] = float

    def place(self, value: float) -> float:
        low, high = self.scale(self.low), self.scale(self.high)
        return (self.scale(value) - low) / (high - low)


@dataclass(frozen=True)
class Area:
    """A drawing area: data coordinates to SVG coordinates, y pointing down."""

    across: Axis
    up: Axis

    def x(self, value: float) -> float:
        return self.across.place(value) * WIDTH

    def y(self, value: float) -> float:
        return (1 - self.up.place(value)) * HEIGHT


def figure(
    title: str,
    area: Area | None,
    drawing: str,
    *,
    keys: str = "",
    note: str = "",
    described: str = "",
    tall: bool = False,
) -> str:
    """A <figure>: caption, grid, drawing and labels; without an area it says that there is nothing to draw."""
    notes = f"<span class=note>{escape(note)}</span>" if note else ""
    caption = f"<figcaption><b>{escape(title)}</b>{keys}{notes}</figcaption>"
    if area is None:
        return f"<figure class=chart>{caption}<p class=nothing>Not recorded.</p></figure>"
    grid = "".join(
        f'<line class=grid x1=0 x2={WIDTH} y1="{area.y(tick):.1f}" y2="{area.y(tick):.1f}"/>' for tick in area.up.ticks
    )
    y_labels = "".join(
        f'<span style="top:{area.y(tick) / HEIGHT * 100:.2f}%">{label}</span>'
        for tick, label in zip(area.up.ticks, area.up.labels)
    )
    x_labels = "".join(
        f'<span style="left:{area.x(tick) / WIDTH * 100:.2f}%">{label}</span>'
        for tick, label in zip(area.across.ticks, area.across.labels)
    )
    shape = f'viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio=none'
    return (
        f'<figure class="chart{" tall" if tall else ""}">{caption}'
        f"<div class=plot><div class=y-labels aria-hidden=true>{y_labels}</div>"
        f'<svg {shape} role=img aria-label="{escape(described or title)}">{grid}{drawing}</svg>'
        f"<div class=x-labels aria-hidden=true>{x_labels}</div></div></figure>"
    )


def key(name: str, kind: str, series: int) -> str:
    """An entry of a legend."""
    return f'<span class="key {kind} c{series}">{escape(name)}</span>'


def linear(low: float, high: float) -> Axis:
    """From zero to the values, with a little room beyond them."""
    low, high = widen(min(low, 0.0), max(high, 0.0)) if low or high else (0.0, 1.0)
    room = 0.04 * (high - low)
    bottom, top = low - (room if low < 0 else 0), high + (room if high > 0 else 0)
    ticks = [tick for tick in nice_ticks(low, high, 5) if bottom <= tick <= top]
    return Axis(bottom, top, ticks, axis_labels(ticks))


def logarithmic(low: float, high: float) -> Axis:
    bottom, top = low / 1.15, high * 1.15
    exponents = range(math.floor(math.log10(bottom)), math.ceil(math.log10(top)) + 1)
    factors = (1, 3) if top / bottom < 1e4 else (1,)
    ticks = [factor * 10.0**exponent for exponent in exponents for factor in factors]
    ticks = [tick for tick in ticks if bottom <= tick <= top]
    return Axis(bottom, top, ticks, axis_labels(ticks), math.log10)


def shares(low: float = 0.0, high: float = 1.0) -> Axis:
    """Shares as percents."""
    interval = 0.25 if high - low > 0.6 else 0.1
    ticks = [low + index * interval for index in range(round((high - low) / interval) + 1)]
    return Axis(low, high, ticks, [f"{100 * tick:.0f} %" for tick in ticks])


def small_shares(high: float) -> Axis:
    """Percents up to a share that is far below one."""
    axis = linear(0.0, 100 * high)  # of nothing but zeros, up to one percent
    ticks = [tick / 100 for tick in axis.ticks]
    return Axis(0.0, axis.high / 100, ticks, [f"{label} %" for label in axis.labels])


def steps(low: float, high: float) -> Axis:
    left, right = widen(low, high)
    ticks = [tick for tick in nice_ticks(left, right, 6) if left <= tick <= right and float(tick).is_integer()]
    return Axis(left, right, ticks, axis_labels(ticks))


def values(low: float, high: float) -> Axis:
    """Exactly this range, which need not hold zero."""
    left, right = widen(low, high)
    ticks = [tick for tick in nice_ticks(left, right, 6) if left <= tick <= right]
    return Axis(left, right, ticks, axis_labels(ticks))


def nice_ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers 1, 2 or 5 times a power of ten apart that cover low..high."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    interval = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / interval + 1e-9), math.ceil(high / interval - 1e-9)
    return [index * interval for index in range(first, last + 1)]


def axis_labels(ticks: Sequence[float]) -> list[str]:
    """The ticks of one axis in one notation."""
    largest = max(map(abs, ticks), default=0.0)
    uneven = len(ticks) > 2 and not math.isclose(ticks[2] - ticks[1], ticks[1] - ticks[0])
    if len(ticks) < 2 or uneven or not 1e-3 <= largest < 1e15:
        return [short_number(tick) for tick in ticks]
    divisor, suffix = next(((d, s) for d, s in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if largest >= 10 * d), (1.0, ""))
    interval = (ticks[1] - ticks[0]) / divisor
    decimals = max(0, -math.floor(math.log10(interval) + 1e-9))
    return [f"{tick / divisor:,.{decimals}f}{suffix}" if tick else "0" for tick in ticks]


def widen(low: float, high: float) -> tuple[float, float]:
    """A range one can divide by, also for a single or a constant value."""
    if high - low > max(1e-9 * max(abs(low), abs(high)), 1e-200):
        return low, high
    room = max(abs(low), abs(high)) * 0.5
    if room < 1e-200:
        room = 1.0
    return low - room, high + room


# ---- Line charts over the steps of a run.


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
