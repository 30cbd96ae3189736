"""How the rewards and lengths of an RL run are spread, which prompts are solved, and what reward costs in KL."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from trimtab.report.axes import HEIGHT, WIDTH, Area, figure, linear, steps, values
from trimtab.report.numbers import percent, plural, short_number, spans
from trimtab.report.read import Run, finite

COLUMNS, ROWS = 60, 16
SOLVED, HOPELESS = 0.9, 0.0
MOST_NAMED = 12

Histogram = tuple[int, float, float, list[float]]
"""Step, lowest, highest, counts."""


def distribution_section(run: Run) -> str:
    if not run.is_rl:
        return ""
    drawn = heat_map(run, "reward_histogram", "Rewards of the answers")
    drawn += heat_map(run, "length_histogram", "Lengths of the answers", "tokens") + kl_against_reward(run)
    told = prompts_in_words(run)
    if not drawn and not told:
        return ""
    return f"<h2>Spread of the answers</h2>{told}<div class=charts>{drawn}</div>"


def heat_map(run: Run, name: str, title: str, unit: str = "") -> str:
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


def kl_against_reward(run: Run) -> str:
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


def prompt_scores(run: Run) -> dict[int, list[float]]:
    """The mean scores of each followed prompt, visit by visit."""
    found: dict[int, list[float]] = {}
    for row in run.rows:
        listed = row.get("prompt_scores")
        for pair in listed if isinstance(listed, list) else ():
            number, score = map(finite, pair) if isinstance(pair, list) and len(pair) == 2 else (None, None)
            if number is not None and score is not None:
                found.setdefault(int(number), []).append(score)
    return found


def prompts_in_words(run: Run) -> str:
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
    rows = "".join(
        f"<tr><td>{kind}: {words[kind]}</td><td>{len(members):,} ({percent(len(members) / len(scores), 0)})</td>"
        f"<td>{escape(_named(members))}</td></tr>"
        for kind, members in kinds.items()
    )
    times = sum(map(len, scores.values())) / len(scores)
    told = f"{plural(len(scores), 'prompt')}, answered {short_number(times)} times on average."
    head = "<tr><th>prompts</th><th>number</th><th>rows</th></tr>"
    return f"<p class=words>{told}</p><div class='card scroll'><table class='data sides'>{head}{rows}</table></div>"


def _named(rows: Sequence[int]) -> str:
    shown = sorted(rows)[:MOST_NAMED]
    return spans([row + 1 for row in shown]) + (" ..." if len(rows) > MOST_NAMED else "") if rows else "–"
