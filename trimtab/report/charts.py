"""Charts as inline SVG, without script: the frame, lines over steps, and panels (which metrics share one).

The SVG holds only the drawing and is stretched to whatever room there is; strokes keep their width
(`vector-effect`), and every label is HTML. So text has one size on a phone, a screen and paper.
Colours come from the page's custom properties through class names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise

from trimtab.report.formatting import short_number
from trimtab.report.run_data import Point, RunData

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


# ---- Panels: which metrics share a chart, what they are called, which way is better
#
# Every job has a loss; the others come from one job or a few. A metric that is not listed here gets a panel too.

EVALUATION = "eval_"
BOUNDS = ("_low", "_high")
"""Of an evaluation's 95 % interval."""


@dataclass(frozen=True)
class Panel:
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

    def only(self, recorded: Container[str]) -> Panel:
        """With the metrics that were recorded."""
        return replace(self, metrics={metric: name for metric, name in self.metrics.items() if metric in recorded})


# ---- RL.


PASS = re.compile(rf"{EVALUATION}(?:(?P<source>.+)_)?pass_(?P<samples>\d+)")
PART = "reward/"
TWINS = {"score": "reward", "loss": "policy_loss"}
"""Often the same number under two names; then the first one is not drawn."""
ASIDE = {"return", "kl_answer", "kl_loss", "log_prob_ratio", "prompt_tokens", "kl_coefficient", *TWINS}
ASIDE |= {"reward_min", "reward_max", "log_prob", "advantage_size"}
"""What has no picture of its own: others show as much, or it never changes."""

REWARD = Panel("Reward", {"reward": "reward", "score": "score"}, "means", better=1, noun="of the answers")
TAIL = (
    Panel("Exact probability of a bad word", {"log_bad_probability": "log P(bad)"}, "nats", tall=True, better=-1),
    Panel("Worst reward", {"worst_reward": "policy", "proposal_worst_reward": "proposal"}, "of an iteration"),
    Panel("Bad answers", {"bad_share": "policy", "proposal_bad_share": "proposal"}, share=True, noun="bad answers"),
    Panel("Reward of the proposal", {"proposal_reward": "reward"}, "below the policy's, if it finds bad answers"),
    Panel("Effective samples of a group", {"proposal_effective_samples": "samples"}, "of the proposal's answers"),
)
FIGURES = (
    Panel("KL to the reference", {"kl": "KL"}, "nats a token"),
    Panel("Entropy", {"sampled_entropy": "sampled", "entropy": "exact"}, "nats a token", noun="entropy"),
    Panel(
        "Clip fraction",
        {"clip_fraction": "policy", "critic_clip_fraction": "critic"},
        "share of the tokens",
        share=True,
        noun="clip fraction",
    ),
    Panel("Answer length", {"length": "mean", "length_max": "longest"}, "tokens", limit="generate_max_len"),
    Panel("Explained variance", {"explained_variance": "explained variance"}, "1: returns are foreseen", better=1),
    Panel("Spread of the rewards", {"reward_std": "standard deviation"}, "standard deviation"),
    Panel("Groups without a difference", {"equal_groups": "groups"}, "all rewards are equal", share=True),
    Panel("Answers cut at the limit", {"truncated": "answers"}, share=True, better=-1),
    Panel("Groups left out by filtering", {"filtered_groups": "groups"}),
    Panel(
        "Difficulty pools",
        {"active_prompts": "active", "easy_prompts": "always solved", "hard_prompts": "never solved"},
        "prompts",
    ),
    Panel("Turns of retired prompts", {"passed_over": "passed over"}),
    Panel("Weight of the entropy", {"entropy_coefficient": "weight"}),
    Panel("Penalty of long answers", {"overlong_penalty": "penalty"}, better=-1),
    Panel("Movement in an iteration", {"policy_kl": "KL"}, "KL to the policy that sampled"),
    Panel(
        "Sampled against trained",
        {"log_prob_gap": "all tokens", "log_prob_gap_fresh": "tokens of the weights themselves"},
        "mean difference of log-probs",
    ),
    Panel("Policy loss", {"policy_loss": "surrogate", "loss": "whole"}, noun="policy loss"),
    Panel("Critic loss", {"critic_loss": "critic loss"}, better=-1),
)
FINISH = "finish/"
ENDS = {"stop": "over", "truncated": "cut off by it", "turns": "no turns left", "context": "no room left"}
"""How an episode can end, in words; the rest are their own."""
EPISODES = (
    Panel("Turns of an episode", {"turns": "mean"}, "of the model", limit="max_turns"),
    Panel("Episode length", {"episode_length": "mean"}, "tokens, the world's among them", limit="episode_max_len"),
    Panel(
        "Tools",
        {"tool_calls": "calls", "tool_failures": "failed", "unknown_tools": "unknown"},
        "an episode",
        noun="tool calls",
    ),
    Panel("Samples without a drawn token", {"empty_samples": "samples"}, "in no group", better=-1),
    Panel("Episodes that failed", {"failed_episodes": "episodes"}, "their groups are left out", better=-1),
    Panel("Groups without a reward", {"failed_rewards": "groups"}, "left out, since a reward failed", better=-1),
    Panel("Sequences of an episode", {"branches": "mean"}, "more than 1: its history was rewritten"),
    Panel(
        "Time in the environment",
        {"seconds_environment": "mean", "seconds_environment_95": "95 % are below"},
        "seconds a step",
    ),
)
"""Of environments."""
OUTLIVING = (
    Panel(
        "Age of what is trained",
        {"age": "mean", "age_max": "largest"},
        "updates since a group was begun",
        limit="async_staleness",
    ),
    Panel("Trainer with nothing to do", {"waiting": "waiting"}, "share of the time", share=True, better=-1),
    Panel("Engines at work", {"engine_busy": "engines"}, "share of the time", share=True, better=1),
    Panel("Groups under way", {"under_way": "groups"}, "begun and not trained"),
    Panel("Tokens read again", {"read_again": "tokens"}, "of unfinished answers, by the new weights"),
    Panel("Corrected tokens", {"corrected_share": "tokens"}, "weight off 1 by more than a tenth", share=True),
)
"""Of answers that outlive an update."""
KL_WEIGHT = Panel("Weight of the KL", {"kl_coefficient": "weight"})
RL_PACE = (
    Panel("Learning rate", {"learning_rate": "policy", "critic_learning_rate": "critic"}, noun="learning rate"),
    Panel("Gradient norm", {"grad_norm": "policy", "critic_grad_norm": "critic"}, noun="gradient norm"),
    Panel(
        "Tokens a second",
        {
            "rollout_tokens_per_second": "rollout",
            "update_tokens_per_second": "update",
            "tokens_per_second": "iteration",
        },
        noun="tokens a second",
    ),
    Panel("Memory", {"memory_gib": "memory"}, "GiB"),
)


def rl_panels(runs: Sequence[RunData]) -> Iterator[Panel]:
    """The pictures of those of these runs that are RL, the most telling first."""
    runs = [run for run in runs if run.is_rl]
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    twins = {name for name, other in TWINS.items() if not any(_differ(run, name, other) for run in runs)}
    recorded = {name.removeprefix(EVALUATION) for name in names} - twins
    yield from success_panels(runs, names)
    yield REWARD.only(recorded)
    # The only part of a reward is the reward.
    parts = [name for name in names if name.startswith(PART) and any(_differ(run, name, "reward") for run in runs)]
    yield Panel("Parts of the reward", {name: name.removeprefix(PART) or name for name in parts})
    for picture in (*TAIL, *FIGURES, *EPISODES, *OUTLIVING):
        # The limit of answers is one of turns, where an answer is an episode.
        plays = "turns" in recorded and picture.limit == "generate_max_len"
        yield replace(picture.only(recorded), limit="" if plays else picture.limit)
    ends = [name for name in names if name.startswith(FINISH)]
    yield Panel("How episodes end", {name: _end(name) for name in ends}, share=True)
    if any(len({value for _, value in run.series("kl_coefficient")}) > 1 for run in runs):
        yield KL_WEIGHT


def success_panels(runs: Sequence[RunData], names: Sequence[str]) -> Iterator[Panel]:
    """Success over all prompts, then by data source: of one answer, and of the best of several."""
    binary = all(is_binary(run) for run in runs)
    title = f"{min(run.held_out for run in runs) if runs else ''} {'success' if binary else 'score'}".capitalize()
    found = [match for name in names if (match := PASS.fullmatch(name))]
    numbers = sorted({int(match["samples"]) for match in found})
    yield Panel(
        title,
        {f"pass_{n}": best_of(n) for n in numbers if f"{EVALUATION}pass_{n}" in names},
        tall=True,
        share=binary,
        better=1,
    )
    sources = dict.fromkeys(match["source"] for match in found if match["source"])
    for n in numbers:
        yield Panel(
            f"{title} by source, {best_of(n)}",
            {f"{source}_pass_{n}": source for source in sources if f"{EVALUATION}{source}_pass_{n}" in names},
            share=binary,
            better=1,
        )


def _end(name: str) -> str:
    end = name.removeprefix(FINISH)
    return ENDS.get(end, end)


def is_binary(run: RunData) -> bool:
    """Whether every score of every evaluation was 0 or 1: then, and only then, their mean is a rate of success."""
    return all(row.get("eval_binary") is True for row in run.rows if f"{EVALUATION}pass_1" in row)


def _differ(run: RunData, name: str, other: str) -> bool:
    return bool(run.series(name)) and run.series(name) != run.series(other)


def best_of(samples: int) -> str:
    return "one answer" if samples == 1 else f"best of {samples} answers"


# ---- Every job.


MOST_OTHERS = 20

LOSS = Panel("Loss", {"loss": "loss"}, tall=True, better=-1)
REWARDS = {"chosen_reward": "chosen", "rejected_reward": "rejected"}
OBJECTIVES: dict[str, tuple[Panel, ...]] = {
    "rm": (
        Panel("Accuracy", {"accuracy": "accuracy"}, "dashed: chance", share=True, level=0.5, better=1),
        Panel("Mean rewards", REWARDS, band=True, noun="reward"),
    ),
    "prm": (Panel("Accuracy", {"accuracy": "accuracy"}, "share of steps judged right", share=True, better=1),),
    "dpo": (
        Panel(
            "Rewards of the two sides", REWARDS, "shaded: the margin", tall=True, level=0.0, band=True, noun="reward"
        ),
        Panel("Reward margin", {"reward_margin": "margin"}, "chosen minus rejected", better=1),
        Panel("Accuracy", {"accuracy": "accuracy"}, "share of pairs with a positive margin", share=True, better=1),
        Panel("NLL of the chosen answer", {"nll": "NLL"}, better=-1),
    ),
    "kto": (
        Panel(
            "Rewards of the two sides",
            {"chosen_reward": "desirable", "rejected_reward": "undesirable"},
            "shaded: the margin",
            tall=True,
            level=0.0,
            band=True,
            noun="reward",
        ),
        Panel("Reward margin", {"reward_margin": "margin"}, "desirable minus undesirable", better=1),
        Panel("KL estimate", {"kl": "KL"}, "what a reward is measured against"),
    ),
    "kd": (
        Panel("NLL of the data", {"nll": "NLL"}, better=-1),
        Panel("Distance to the teacher", {"distance": "distance"}, better=-1),
    ),
}
EXPERTS = Panel(
    "Balance of the experts",
    {"aux_loss": "auxiliary loss", "expert_max_load": "busiest expert"},
    "1: evenly used",
)
PACE = (
    Panel("Learning rate", {"learning_rate": "learning rate"}),
    Panel("Gradient norm", {"grad_norm": "gradient norm"}, "before clipping"),
    Panel("Tokens a second", {"tokens_per_second": "tokens a second"}),
    Panel("Memory", {"memory_gib": "memory"}, "GiB"),
)
BOOKKEEPING = {"step", "epoch", "samples", "micro_batches", "tokens", "trained_tokens", "skipped_steps"}


def pace_panels(runs: Sequence[RunData]) -> list[Panel]:
    """Speed, memory and the optimiser."""
    if not any(run.is_rl for run in runs):
        return list(PACE)
    recorded = _recorded(runs)
    return [picture.only(recorded) for picture in RL_PACE]


def objective_panels(runs: Sequence[RunData]) -> list[Panel]:
    """Loss and the figures of these runs' jobs, as far as any run recorded them; each figure in one picture.

    The loss of RL says little, so there it is one of the later figures.
    """
    recorded = _recorded(runs)
    pictures = [] if all(run.is_rl for run in runs) else [LOSS]
    drawn = {*BOOKKEEPING, *(name for picture in (LOSS, *pace_panels(runs)) for name in picture.metrics)}
    aside = ASIDE if any(run.is_rl for run in runs) else ()
    bounds = {f"{name}{end}" for name in recorded for end in BOUNDS}
    others = [name for name in recorded if name not in aside and name not in bounds]
    others = [name for name in others if not name.startswith(("seconds", PART))]
    for picture in (
        *(picture for run in runs for picture in OBJECTIVES.get(run.job, ())),
        *rl_panels(runs),
        EXPERTS,
        *(Panel(_words(name), {name: _words(name)}) for name in others[:MOST_OTHERS]),
    ):
        if not drawn.issuperset(picture.metrics) and any(name in recorded for name in picture.metrics):
            pictures.append(picture)
            drawn.update(picture.metrics)
    return pictures


def _recorded(runs: Sequence[RunData]) -> dict[str, None]:
    """Names of the metrics, whether they are of training or of evaluation."""
    return dict.fromkeys(name.removeprefix(EVALUATION) for run in runs for name in run.metrics)


def _words(name: str) -> str:
    return name.replace("_", " ").strip().capitalize() or "Unnamed"
