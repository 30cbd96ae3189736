"""Where the seconds of an RL iteration go: its phases one after another, and over the whole run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from itertools import accumulate, pairwise
from statistics import fmean, median

from trimtab.report.axes import HEIGHT, Area, Axis, figure, key, linear, steps
from trimtab.report.curves import COLOURS, Line, tooltips
from trimtab.report.numbers import duration, percent
from trimtab.report.read import Run, finite
from trimtab.report.rl_summary import change_in_words

PREFIX = "seconds_"
MEANINGS = {
    "rollout": "answers are sampled and rewarded",
    "scoring": "reference and critic read them",
    "update": "policy and critic learn",
    "sync": "engines get the new weights, and are asked whether they have",
    "evaluation": "prompts of the evaluation are answered",
}
OF_EPISODES = {"environment", "environment_95"}
"""Not phases: what an episode spent in its environment, while others were answered."""
MOST_BARS = 200
"""More iterations share a bar, which shows their mean."""

Times = list[tuple[int, list[float]]]
"""Step, and the seconds of each phase in it."""


def time_section(run: Run) -> str:
    phases, times = phase_times(run)
    if not times:
        return ""
    typical = [median(seconds[index] for _, seconds in times) for index in range(len(phases))]
    # An evaluation comes now and then; it would hide how the work itself changes.
    working = [sum(spent for name, spent in zip(phases, seconds) if name != "evaluation") for _, seconds in times]
    window = max(1, min(10, len(working) // 10))
    ends = fmean(working[:window]), fmean(working[-window:])
    change = change_in_words(duration, *ends)
    words = (
        f"Without evaluation, a typical {run.unit} takes {duration(median(working))}; "
        f"from the beginning to the end of the run it {change}."
    )
    pictures = _time_line(phases, {"median": typical, "last": times[-1][1]}) + _over_the_run(phases, times)
    meanings = [f"{name}: {MEANINGS[name]}" for name in phases if name in MEANINGS]
    words += f" {'; '.join(meanings).capitalize()}." if meanings else ""
    told = f"<h2>Where the time goes</h2><p class=words>{escape(words)}</p>"
    return f"{told}<div class=charts>{pictures}{_table(phases, times, typical)}</div>"


def phase_times(run: Run) -> tuple[list[str], Times]:
    """The phases in their order, and their seconds in every iteration that recorded any."""
    recorded = [name.removeprefix(PREFIX) for name in run.metrics if name.startswith(PREFIX)]
    recorded = [name for name in recorded if name not in OF_EPISODES]
    phases = [*(name for name in MEANINGS if name in recorded), *(name for name in recorded if name not in MEANINGS)]
    times = [
        (row["step"], [max(finite(row.get(f"{PREFIX}{name}")) or 0.0, 0.0) for name in phases]) for row in run.rows
    ]
    return phases, [(step, seconds) for step, seconds in times if sum(seconds) > 0]


def _time_line(phases: Sequence[str], iterations: dict[str, Sequence[float]]) -> str:
    """One bar an iteration, from its start to its end."""
    longest = max(map(sum, iterations.values()))
    across = linear(0.0, longest)
    names = list(iterations)
    rows = [len(names) - 0.5 - index for index in range(len(names))]
    area = Area(across, Axis(0.0, float(len(names)), rows, names))
    drawing = ""
    for row, (name, seconds) in zip(rows, iterations.items()):
        top, height = area.y(row + 0.32), 0.64 * HEIGHT / len(names)
        for index, (end, spent) in enumerate(zip(accumulate(seconds), seconds)):
            if spent:
                x, right = area.x(end - spent), area.x(end)
                text = f"{name}: {phases[index]} {duration(spent)}, {percent(spent / sum(seconds), 0)}"
                drawing += (
                    f'<rect class="phase c{index % COLOURS}" x="{x:.1f}" y="{top:.1f}" width="{right - x:.1f}" '
                    f'height="{height:.1f}"><title>{escape(text)}</title></rect>'
                )
    return figure("One iteration", area, drawing, keys=_keys(phases), note="seconds from its start")


def _over_the_run(phases: Sequence[str], times: Times) -> str:
    """The phases of every iteration on top of each other."""
    stretch = -(-len(times) // MOST_BARS)
    bars = [_mean(times[start : start + stretch]) for start in range(0, len(times), stretch)]
    first, last = times[0][0], times[-1][0]
    across = replace(steps(first, last), low=first - 0.5, high=last + 0.5)
    area = Area(across, linear(0.0, max(sum(seconds) for _, seconds in bars)))
    edges = [(step - 0.5, seconds) for step, seconds in bars] + [(last + 0.5, [])]
    drawing = ""
    for index in range(len(phases)):
        path = ""
        for (left, seconds), (right, _) in pairwise(edges):
            bottom, top = area.y(sum(seconds[:index])), area.y(sum(seconds[: index + 1]))
            path += f"M{area.x(left):.1f} {bottom:.1f}V{top:.1f}H{area.x(right):.1f}V{bottom:.1f}Z"
        drawing += f'<path class="phase c{index % COLOURS}" d="{path}"/>'
    lines = [
        Line(name, [(step, seconds[index]) for step, seconds in bars], series=index)
        for index, name in enumerate(phases)
    ]
    note = f"seconds; means of {stretch} iterations" if stretch > 1 else "seconds of each iteration"
    drawing += tooltips(lines, area)
    return figure("Over the run", area, drawing, keys=_keys(phases), note=note)


def _mean(times: Times) -> tuple[int, list[float]]:
    return times[0][0], [fmean(column) for column in zip(*(seconds for _, seconds in times))]


def _keys(phases: Sequence[str]) -> str:
    return "".join(key(name, "block", index % COLOURS) for index, name in enumerate(phases))


def _table(phases: Sequence[str], times: Times, typical: Sequence[float]) -> str:
    whole = sum(sum(seconds) for _, seconds in times)
    rows = ""
    for index, name in enumerate(phases):
        total = sum(seconds[index] for _, seconds in times)
        spent = [duration(seconds) if seconds else "–" for seconds in (total, typical[index], times[-1][1][index])]
        cells = (name, spent[0], percent(total / whole, 0), *spent[1:])
        rows += f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
    head = "".join(f"<th>{name}</th>" for name in ("", "whole run", "share", "median", "last"))
    return f"<div class='card scroll wide'><table class='data sides phases'><tr>{head}</tr>{rows}</table></div>"
