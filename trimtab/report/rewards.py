"""The pictures of a reward model: how it scores the two sides, and whether its confidence is deserved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

from trimtab.evaluate.tail_risk import share
from trimtab.report.axes import HEIGHT, Area, figure, key, linear, shares, values
from trimtab.report.numbers import percent, plural, short_number
from trimtab.report.read import Run

Pair = tuple[float, float]


@dataclass(frozen=True)
class Accuracy:
    """How many pairs the model gets right; a tie is half right."""

    right: float
    number: int

    @property
    def share(self) -> float:
        return self.right / self.number

    @property
    def interval(self) -> tuple[float, float]:
        found = share(self.right, self.number)
        return found.low, found.high

    def in_words(self) -> str:
        low, high = self.interval
        return f"{percent(self.share)} (95 % interval {percent(low)} to {percent(high)})"


def accuracy_of(pairs: Sequence[Pair]) -> Accuracy | None:
    right = sum(1.0 if chosen > rejected else 0.5 if chosen == rejected else 0.0 for chosen, rejected in pairs)
    return Accuracy(right, len(pairs)) if pairs else None


def are_held_out(run: Run) -> bool:
    return run.rewards.get("source") == "evaluation"


def reward_section(run: Run) -> str:
    """Accuracy in words, the histogram and the calibration; nothing where no rewards were stored."""
    pairs = run.pairs
    accuracy = accuracy_of(pairs)
    if accuracy is None:
        return ""
    which = f"{run.held_out} pairs" if are_held_out(run) else "pairs"
    words = (
        f"The chosen answer has the higher reward in {short_number(accuracy.right)} of {accuracy.number:,} {which}: "
        f"{accuracy.in_words()}. {_confidence_in_words(pairs, accuracy)}"
    )
    ties = sum(chosen == rejected for chosen, rejected in pairs)
    if ties:
        words += f" {plural(ties, 'pair')} with equal rewards count half."
    if not are_held_out(run):
        words += " These pairs were trained on, so this says little about new ones: give --eval_dataset."
    pictures = histogram(pairs) + calibration(pairs)
    told = f"<h2>Is the better answer preferred?</h2><p class=words>{escape(words)}</p>"
    return f'{told}<div class="charts two">{pictures}</div>'


def histogram(pairs: Sequence[Pair]) -> str:
    """Rewards of the chosen and of the rejected answers over each other."""
    sides = [[pair[side] for pair in pairs] for side in (0, 1)]
    low, high = min(map(min, sides)), max(map(max, sides))
    across = values(low, high)
    number = max(5, min(40, round(2 * math.sqrt(len(pairs)))))
    width = (across.high - across.low) / number
    counts = [[0] * number for _ in sides]
    for side, rewards in enumerate(sides):
        for reward in rewards:
            counts[side][min(number - 1, int((reward - across.low) / width))] += 1
    area = Area(across, linear(0, max(map(max, counts))))
    drawing = ""
    for side, heights in enumerate(counts):
        for index, height in enumerate(heights):
            if height:
                x, end = area.x(across.low + index * width), area.x(across.low + (index + 1) * width)
                text = (
                    f"{height} {('chosen', 'rejected')[side]} from {short_number(across.low + index * width)} "
                    f"to {short_number(across.low + (index + 1) * width)}"
                )
                drawing += (
                    f'<rect class="bar c{side}" x="{x:.1f}" y="{area.y(height):.1f}" width="{end - x:.1f}" '
                    f'height="{HEIGHT - area.y(height):.1f}"><title>{escape(text)}</title></rect>'
                )
    for side, rewards in enumerate(sides):
        x = area.x(fmean(rewards))
        drawing += f'<path class="mean c{side}" d="M{x:.1f} 0V{HEIGHT}"/>'
    keys = key("chosen", "block", 0) + key("rejected", "block", 1)
    return figure("Rewards of the pairs", area, drawing, keys=keys, note="pairs; upright lines: means", tall=True)


@dataclass(frozen=True)
class Bin:
    """Pairs about whose order the model is similarly sure."""

    low: float
    high: float
    number: int = 0
    right: float = 0.0
    confidence: float = 0.0
    """Sum over its pairs."""


def calibration_bins(pairs: Sequence[Pair]) -> list[Bin]:
    """By the probability sigmoid(|difference|) that the model gives to its own choice, from one half to one.

    Which answer of a pair is named first says nothing, so only the model's choice counts: it is right where that is
    the chosen answer.
    """
    number = 10 if len(pairs) >= 200 else 5
    edges = [0.5 + 0.5 * index / number for index in range(number + 1)]
    counts, right, sure = [0] * number, [0.0] * number, [0.0] * number
    for chosen, rejected in pairs:
        difference = chosen - rejected
        confidence = sigmoid(abs(difference))
        index = min(number - 1, int((confidence - 0.5) * 2 * number))
        counts[index] += 1
        right[index] += 1.0 if difference > 0 else 0.5 if difference == 0 else 0.0
        sure[index] += confidence
    return [Bin(*figures) for figures in zip(edges, edges[1:], counts, right, sure)]


def calibration(pairs: Sequence[Pair]) -> str:
    """Of the pairs the model is 80 % sure about, is it right on 80 %?"""
    area = Area(shares(0.5, 1.0), shares())
    drawing = f'<path class=level d="M{area.x(0.5):.1f} {area.y(0.5):.1f}L{area.x(1):.1f} {area.y(1):.1f}"/>'
    table = ""
    bins = [members for members in calibration_bins(pairs) if members.number]
    most = max(members.number for members in bins)
    for members in bins:
        low, high = Accuracy(members.right, members.number).interval
        right, mean = members.right / members.number, members.confidence / members.number
        x, tall = area.x(mean), 0.16 * HEIGHT * members.number / most
        text = (
            f"{members.number:,} pairs, {percent(members.low, 0)} to {percent(members.high, 0)} sure: right on "
            f"{percent(right)}, 95 % interval {percent(low)} to {percent(high)}"
        )
        edge = area.x(members.low)
        drawing += (
            f'<rect class="bar weight" x="{edge + 3:.1f}" y="{HEIGHT - tall:.1f}" '
            f'width="{area.x(members.high) - edge - 6:.1f}" height="{tall:.1f}"/>'
            f'<path class="whisker c0" d="M{x:.1f} {area.y(low):.1f}V{area.y(high):.1f}"/>'
            f'<path class=ring d="M{x:.1f} {area.y(right):.1f}h0"/>'
            f'<path class="dots c0" d="M{x:.1f} {area.y(right):.1f}h0"/>'
            f'<g class=strips><rect x="{edge:.1f}" y=0 width="{area.x(members.high) - edge:.1f}" height={HEIGHT}>'
            f"<title>{escape(text)}</title></rect></g>"
        )
        table += (
            f"<tr><td>{percent(members.low, 0)} to {percent(members.high, 0)}</td><td>{members.number:,}</td>"
            f"<td>{percent(right)}</td><td>{percent(low)} to {percent(high)}</td></tr>"
        )
    picture = figure(
        "Calibration",
        area,
        drawing,
        keys=key("share right, with 95 % interval", "dots", 0) + key("as right as it is sure", "level", 0),
        note="across: how sure the model is; bars: how many pairs",
        tall=True,
    )
    head = "<tr><th>sure</th><th>pairs</th><th>right</th><th>95 % interval</th></tr>"
    numbers = f"<div class=card><table class=data>{head}{table}</table></div>"
    return f"{picture}<details class=wide><summary>Calibration in numbers</summary>{numbers}</details>"


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value > -700 else 0.0


def _confidence_in_words(pairs: Sequence[Pair], accuracy: Accuracy) -> str:
    sure = fmean(sigmoid(abs(chosen - rejected)) for chosen, rejected in pairs)
    low, high = accuracy.interval
    if sure > high:
        return f"It is on average {percent(sure)} sure of its choice: surer than it should be."
    if sure < low:
        return f"It is on average {percent(sure)} sure of its choice: less sure than it could be."
    return f"It is on average {percent(sure)} sure of its choice, which fits."
