"""Distributions: rewards of a reward model's pairs and its calibration, rewards and lengths of RL, held-out tails."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from trimtab.evaluate.tail_risk import share
from trimtab.report.charts import HEIGHT, WIDTH, Area, figure, key, linear, shares, steps, values
from trimtab.report.formatting import percent, plural, short_number, spans, table
from trimtab.report.run_data import RunData, finite

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


def are_held_out(run: RunData) -> bool:
    return run.rewards.get("source") == "evaluation"


def reward_section(run: RunData) -> str:
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
    rows = []
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
        sure = f"{percent(members.low, 0)} to {percent(members.high, 0)}"
        rows.append((sure, f"{members.number:,}", percent(right), f"{percent(low)} to {percent(high)}"))
    picture = figure(
        "Calibration",
        area,
        drawing,
        keys=key("share right, with 95 % interval", "dots", 0) + key("as right as it is sure", "level", 0),
        note="across: how sure the model is; bars: how many pairs",
        tall=True,
    )
    numbers = table(("sure", "pairs", "right", "95 % interval"), rows, "data", "card")
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


# ---- RL: spread of rewards and lengths, solved prompts, reward against KL.


COLUMNS, ROWS = 60, 16
SOLVED, HOPELESS = 0.9, 0.0
MOST_NAMED = 12

Histogram = tuple[int, float, float, list[float]]
"""Step, lowest, highest, counts."""


def distribution_section(run: RunData) -> str:
    if not run.is_rl:
        return ""
    drawn = heat_map(run, "reward_histogram", "Rewards of the answers")
    drawn += heat_map(run, "length_histogram", "Lengths of the answers", "tokens") + kl_against_reward(run)
    told = prompts_in_words(run)
    if not drawn and not told:
        return ""
    return f"<h2>Spread of the answers</h2>{told}<div class=charts>{drawn}</div>"


def heat_map(run: RunData, name: str, title: str, unit: str = "") -> str:
    """A histogram of every stretch of the run, upright: the stronger the colour, the more answers."""
    found = [histogram for row in run.rows if (histogram := _read(row, row.get(name))) is not None]
    if len(found) < 2:
        return ""
    low, high = min(one[1] for one in found), max(one[2] for one in found)
    across, up = steps(found[0][0], found[-1][0] + 1), values(low, high)
    area, height = Area(across, up), (up.high - up.low) / ROWS
    stretch = -(-len(found) // COLUMNS)
    drawing = ""
    for begin in range(0, len(found), stretch):
        part = found[begin : begin + stretch]
        counts = [0.0] * ROWS
        for _, bottom, top, members in part:
            for index, count in enumerate(members):
                # A bin of the row counts where its middle lies; equal values, at their place.
                middle = bottom + (top - bottom) * (index / max(1, len(members) - 1))
                counts[min(ROWS - 1, max(0, int((middle - up.low) / height)))] += count
        left = area.x(part[0][0])
        width = (area.x(found[begin + stretch][0]) if begin + stretch < len(found) else WIDTH) - left
        for index, count in enumerate(counts):
            if count:
                share, bottom = count / sum(counts), up.low + index * height
                text = (
                    f"{run.unit} {part[0][0]}: {percent(share, 0)} from {short_number(bottom)} to "
                    f"{short_number(bottom + height)}"
                )
                drawing += (
                    f'<rect class="heat c0" style="fill-opacity:{0.08 + 0.92 * share**0.5:.2f}" x="{left:.1f}" '
                    f'y="{area.y(bottom + height):.1f}" width="{width:.1f}" height="{HEIGHT / ROWS:.1f}">'
                    f"<title>{escape(text)}</title></rect>"
                )
    return figure(title, area, drawing, note="; ".join(filter(None, (unit, "the stronger, the more"))))


def _read(row: dict[str, Any], listed: Any) -> Histogram | None:
    read = [finite(value) for value in listed] if isinstance(listed, list) else []
    numbers = [number for number in read if number is not None]
    if len(numbers) < max(3, len(read)) or min(numbers[2:]) < 0 or sum(numbers[2:]) <= 0:
        return None
    return row["step"], numbers[0], max(numbers[0], numbers[1]), numbers[2:]


def kl_against_reward(run: RunData) -> str:
    """What was paid for the reward: each iteration a dot."""
    kl = dict(run.series("kl"))
    points = [(kl[step], reward) for step, reward in run.series("reward") if step in kl]
    if len(points) < 3 or len({x for x, _ in points}) < 3:
        return ""
    area = Area(linear(*_range(x for x, _ in points)), values(*_range(y for _, y in points)))
    places = [(area.x(x), area.y(y)) for x, y in points]
    way = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places)
    last = f'<path class="dots c1" d="M{places[-1][0]:.1f} {places[-1][1]:.1f}h0"/>'
    drawing = f'<path class="raw c0" d="M{way}"/><path class="dots small c0" d="{dots}"/>{last}'
    return figure("Reward against KL", area, drawing, note="across: nats a token; large dot: the end")


def _range(numbers: Iterable[float]) -> tuple[float, float]:
    known = list(numbers)
    return min(known), max(known)


def prompt_scores(run: RunData) -> dict[int, list[float]]:
    """The mean scores of each followed prompt, visit by visit."""
    found: dict[int, list[float]] = {}
    for row in run.rows:
        listed = row.get("prompt_scores")
        for pair in listed if isinstance(listed, list) else ():
            number, score = map(finite, pair) if isinstance(pair, list) and len(pair) == 2 else (None, None)
            if number is not None and score is not None:
                found.setdefault(int(number), []).append(score)
    return found


def prompts_in_words(run: RunData) -> str:
    """Which prompts are solved, hopeless or on their way, where scores are rates of success."""
    scores = prompt_scores(run)
    if not scores or not all(0 <= score <= 1 for visits in scores.values() for score in visits):
        return ""
    kinds: dict[str, list[int]] = {"solved": [], "learning": [], "mixed": [], "hopeless": []}
    for row, visits in scores.items():
        rose = len(visits) > 1 and visits[-1] > visits[0]
        kind = "solved" if visits[-1] >= SOLVED else "hopeless" if max(visits) <= HOPELESS else "learning"
        kinds["mixed" if kind == "learning" and not rose else kind].append(row)
    words = {
        "solved": f"score at least {SOLVED:g} when they were last answered",
        "learning": "better than at first",
        "mixed": "neither, and not better than at first",
        "hopeless": "never above 0",
    }
    rows = [
        (f"{kind}: {words[kind]}", f"{len(members):,} ({percent(len(members) / len(scores), 0)})", _named(members))
        for kind, members in kinds.items()
    ]
    times = sum(map(len, scores.values())) / len(scores)
    told = f"{plural(len(scores), 'prompt')}, answered {short_number(times)} times on average."
    return f"<p class=words>{told}</p>{table(('prompts', 'number', 'rows'), rows)}"


def _named(rows: Sequence[int]) -> str:
    shown = sorted(rows)[:MOST_NAMED]
    return spans([row + 1 for row in shown]) + (" ..." if len(rows) > MOST_NAMED else "") if rows else "–"


# ---- Held-out samples of the tail (evaluate/tail_risk.py).


LOGS = (("value", "probability"), ("low", "low"), ("high", "high"))
SUMMARIES = "info_eval_{}.json"


def tail_section(run: RunData) -> str:
    parts = []
    for path in _summaries(run):
        try:
            parts.append(_tail_table(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            parts.append(f"<p class=words>{escape(path.name)} cannot be read.</p>")
    return f"<h2>Held-out samples</h2>{''.join(parts)}" if parts else ""


def _summaries(run: RunData) -> list[Path]:
    """In the run's folder all of them; where several runs write, its own."""
    elsewhere, name = run.options.get("save_info_path"), run.manifest.get("run_name")
    if elsewhere and name:
        path = Path(str(elsewhere)).expanduser() / SUMMARIES.format(name)
        if path.exists():
            return [path]
    return sorted(run.folder.glob(SUMMARIES.format("*")))


def _tail_table(figures: dict[str, Any]) -> str:
    rows = [(name, figures[key]) for name, key in (("mean reward", "reward"), ("mean return", "return"))]
    rows.append(("KL to the start, a token", figures["kl_per_token"]))
    rows += [(f"share below {threshold}", found) for threshold, found in figures["below"].items()]
    for threshold, found in figures.get("rare_events", {}).items():
        of, effective = (short_number(found["importance"][f"effective_{kind}"]) for kind in ("samples", "bad_samples"))
        name = f"the same by the proposal's answers, weighed ({threshold}): {effective} effective bad samples, of {of}"
        rows.append((name, _as_shares(found["importance"])))
    rows += [(f"mean of the worst {found['k']} (CVaR {level})", found) for level, found in figures["cvar"].items()]
    clustered = "new_prompts" in figures["reward"]
    told = f"{figures['samples']:,} samples" + (f" for {figures['prompts']:,} prompts" if clustered else "")
    told += f", the worst with a reward of {short_number(figures['worst_reward'])}. 95 % intervals"
    told += (
        ": for new answers to these prompts, and for new prompts, of which fewer are known than of answers."
        if clustered
        else " speak of new answers to these prompts, not of new prompts."
    )
    for threshold, found in figures.get("rare_events", {}).items():
        if _apart(_as_shares(found["importance"]), found["plain"]):
            told += (
                f" Of the share below {threshold} the two estimates contradict each other: the proposal does not reach "
                "all that the policy says, so trust the plain one."
            )
    cells = [
        (name, short_number(found["value"]), *map(_interval, (found, *([found["new_prompts"]] if clustered else ()))))
        for name, found in rows
    ]
    head = ("", "", "these prompts", *(["new prompts"] if clustered else []))
    return f"<p class=words>{told}</p>{table(head, cells)}"


def _as_shares(found: dict[str, Any]) -> dict[str, Any]:
    """An estimate in logarithms as one of probabilities; without a bad sample its logarithm is none."""
    shares: dict[str, Any] = {
        name: math.exp(value) if (value := found[f"log_{key}"]) is not None else 0.0
        for name, key in LOGS
        if f"log_{key}" in found
    }
    return shares | ({"new_prompts": _as_shares(found["new_prompts"])} if "new_prompts" in found else {})


def _apart(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first["high"] < second["low"] or second["high"] < first["low"]


def _interval(found: dict[str, Any]) -> str:
    if found["low"] is None or found["high"] is None:
        return "unknown"
    return f"{short_number(found['low'])} to {short_number(found['high'])}"
