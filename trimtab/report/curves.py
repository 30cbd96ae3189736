"""Line charts as inline SVG, without script.

The SVG holds only the drawing and is stretched to whatever room there is; strokes keep their width
(`vector-effect`), and every label is HTML beside it. So text has one size on a phone, a screen and paper.
Colours come from the page's custom properties through class names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from trimtab.report.read import Point

WIDTH, HEIGHT = 1000, 300
MOST_POINTS = 600
"""More than a screen shows; longer curves keep the lowest and the highest value of each stretch."""
MOST_TOOLTIPS = 100


@dataclass(frozen=True)
class Line:
    """One curve; `kind` is a class of the page's style: raw, smooth, only (a lone curve) or dots."""

    name: str
    points: Sequence[Point]
    kind: str = "only"


def chart(title: str, lines: Sequence[Line], note: str = "", tall: bool = False) -> str:
    """A <figure> with the curves over a common step axis; says so when there is nothing to draw.

    The value axis starts at zero, unless `tall` and the values span so much that only a logarithm shows them all.
    """
    lines = [line for line in lines if line.points]
    logarithmic = tall and _spans_much([value for line in lines for _, value in line.points])
    note = f"{note}, logarithmic".lstrip(", ") if logarithmic else note
    caption = f"<figcaption><b>{escape(title)}</b>{_legend(lines)}<span class=note>{escape(note)}</span></figcaption>"
    if not lines:
        return f"<figure class=chart>{caption}<p class=nothing>Not recorded.</p></figure>"
    steps = [step for line in lines for step, _ in line.points]
    values = [value for line in lines for _, value in line.points]
    left, right = _widen(min(steps), max(steps))
    scale, axis = (math.log10, _log_axis) if logarithmic else (float, _linear_axis)
    bottom, top, value_ticks = axis(min(values), max(values))
    step_ticks = [tick for tick in nice_ticks(left, right, 6) if left <= tick <= right and float(tick).is_integer()]

    def across(step: float) -> float:
        return (step - left) / (right - left)

    def down(value: float) -> float:
        return (scale(top) - scale(value)) / (scale(top) - scale(bottom))

    grid = "".join(
        f'<line class=grid x1=0 x2={WIDTH} y1="{down(tick) * HEIGHT:.1f}" y2="{down(tick) * HEIGHT:.1f}"/>'
        for tick in value_ticks
    )
    drawing = "".join(
        _path(line.kind, [(across(step) * WIDTH, down(value) * HEIGHT) for step, value in thin(line.points)])
        for line in lines
    )
    y_labels = "".join(
        f'<span style="top:{down(tick) * 100:.2f}%">{label}</span>'
        for tick, label in zip(value_ticks, axis_labels(value_ticks))
    )
    x_labels = "".join(
        f'<span style="left:{across(tick) * 100:.2f}%">{label}</span>'
        for tick, label in zip(step_ticks, axis_labels(step_ticks))
    )
    described = f"{title}, steps {short_number(min(steps))} to {short_number(max(steps))}"
    return (
        f'<figure class="chart{" tall" if tall else ""}">{caption}'
        f"<div class=plot><div class=y-labels aria-hidden=true>{y_labels}</div>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio=none role=img aria-label="{escape(described)}">'
        f"{grid}{drawing}{_tooltips(lines, across)}</svg>"
        f"<div class=x-labels aria-hidden=true>{x_labels}</div></div></figure>"
    )


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


def short_number(value: float) -> str:
    """Few characters for an axis or a headline: 1500 -> 1,500, 25300 -> 25.3k, 0.00002 -> 2e-5."""
    size = abs(value)
    if size == 0:
        return "0"
    for limit, divisor, suffix in ((1e15, 0, ""), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit:
            return f"{value / divisor:.3g}{suffix}" if divisor else f"{value:.2e}"
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 1e-3:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def _linear_axis(low: float, high: float) -> tuple[float, float, list[float]]:
    low, high = _widen(min(low, 0.0), max(high, 0.0))
    room = 0.04 * (high - low)
    bottom, top = low - (room if low < 0 else 0), high + (room if high > 0 else 0)
    return bottom, top, [tick for tick in nice_ticks(low, high, 5) if bottom <= tick <= top]


def _log_axis(low: float, high: float) -> tuple[float, float, list[float]]:
    bottom, top = low / 1.15, high * 1.15
    exponents = range(math.floor(math.log10(bottom)), math.ceil(math.log10(top)) + 1)
    factors = (1, 3) if top / bottom < 1e4 else (1,)
    ticks = [factor * 10.0**exponent for exponent in exponents for factor in factors]
    return bottom, top, [tick for tick in ticks if bottom <= tick <= top]


def _spans_much(values: Sequence[float]) -> bool:
    """Positive, and the greatest is over 30 times the least (but no more decades than an axis can label)."""
    return bool(values) and min(values) > 0 and 30 < max(values) / min(values) < 1e9


def _widen(low: float, high: float) -> tuple[float, float]:
    """A range one can divide by, also for a single or a constant value."""
    if high - low > max(1e-9 * max(abs(low), abs(high)), 1e-200):
        return low, high
    room = max(abs(low), abs(high)) * 0.5
    if room < 1e-200:
        room = 1.0
    return low - room, high + room


def _path(kind: str, places: Sequence[tuple[float, float]]) -> str:
    if kind == "dots":
        # A line without length and with round ends is a dot that stays round in a stretched drawing.
        return f'<path class=dots d="{"".join(f"M{x:.1f} {y:.1f}h0" for x, y in places)}"/>'
    if len(places) == 1:
        return f'<path class="dots {kind}" d="M{places[0][0]:.1f} {places[0][1]:.1f}h0"/>'
    return f'<path class={kind} d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in places)}"/>'


def _legend(lines: Sequence[Line]) -> str:
    if len(lines) < 2:
        return ""
    return "".join(f"<span class='key {line.kind}'>{escape(line.name)}</span>" for line in lines)


def _tooltips(lines: Sequence[Line], across: Callable[[float], float]) -> str:
    """Transparent strips; the browser shows their <title> under the pointer."""
    values: dict[int, list[str]] = {}
    for line in lines:
        for step, value in line.points:
            values.setdefault(step, []).append(f"{line.name} {short_number(value)}")
    steps = sorted(values)
    dotted = [step for line in lines if line.kind == "dots" for step, _ in line.points]
    chosen = sorted({*steps[:: math.ceil(len(steps) / MOST_TOOLTIPS)], *dotted[-MOST_TOOLTIPS:]})
    strips = []
    edges = [0.0, *((across(a) + across(b)) / 2 for a, b in pairwise(chosen)), 1.0]
    for step, start, end in zip(chosen, edges, edges[1:]):
        text = f"step {step}: {', '.join(values[step])}"
        strips.append(
            f'<rect x="{start * WIDTH:.1f}" y=0 width="{(end - start) * WIDTH:.1f}" height={HEIGHT}>'
            f"<title>{escape(text)}</title></rect>"
        )
    return f"<g class=strips>{''.join(strips)}</g>"
