"""Time lines: the phases of an RL iteration, and what trainer, engines and rewards did at the same time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from itertools import accumulate, pairwise
from statistics import fmean, median

from trimtab.report.charts import COLOURS, HEIGHT, Area, Axis, Line, figure, key, linear, steps, tooltips, values
from trimtab.report.formatting import duration, percent, plural, short_number, table
from trimtab.report.run_data import RunData, TimeSpan, finite
from trimtab.report.summary import change_in_words

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


def time_section(run: RunData) -> str:
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
    return f"{told}<div class=charts>{pictures}{_phase_table(phases, times, typical)}</div>"


def phase_times(run: RunData) -> tuple[list[str], Times]:
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


def _phase_table(phases: Sequence[str], times: Times, typical: Sequence[float]) -> str:
    whole = sum(sum(seconds) for _, seconds in times)
    rows = []
    for index, name in enumerate(phases):
        total = sum(seconds[index] for _, seconds in times)
        spent = [duration(seconds) if seconds else "–" for seconds in (total, typical[index], times[-1][1][index])]
        rows.append((name, spent[0], percent(total / whole, 0), *spent[1:]))
    return table(("", "whole run", "share", "median", "last"), rows, "data sides phases", "card scroll wide")


# ---- Trainer, engines and rewards side by side: asynchronous runs.


TRAINER, WRITES, WAITS, LEARNS = "trainer", "rollout", "waiting", "update"
OTHERS = ("engine", "rewards")
ACTIVITIES = {
    WRITES: "answers are written in these processes, or their rewards waited for",
    WAITS: "the next batch is not there yet",
    "scoring": "other models read it",
    LEARNS: "policy and critic learn",
    "sync": "engines get the new weights",
    "evaluation": "prompts of the evaluation are answered",
    "writing": "an engine draws tokens",
    "judging": "rewards look at answers",
}
"""In the order of the legend."""
STRETCH = 5
"""Iterations that are drawn, in the middle of the run: of all of them one could see nothing."""
MOST_LANES, MOST_SPANS = 12, 1500

Stretches = list[tuple[float, float]]


def lane_section(run: RunData) -> str:
    if not run.spans:
        return ""
    spans = _as_seen_by_the_trainer(run)
    words = " ".join(filter(None, (age_in_words(run), _overlap_in_words(spans), _waiting_in_words(run))))
    told = f"<h2>Trainer, engines and rewards side by side</h2><p class=words>{escape(words)}</p>"
    return f"{told}<div class=charts>{_picture(spans)}{_activity_table(spans)}</div>"


def _as_seen_by_the_trainer(run: RunData) -> list[TimeSpan]:
    """Only a trainer whose engines are apart waits in its rollout phase; any other writes the answers itself."""
    if not run.series("engine_busy"):  # which engines of their own alone have
        return list(run.spans)
    return [replace(span, what=WAITS) if (span.lane, span.what) == (TRAINER, WRITES) else span for span in run.spans]


def age_in_words(run: RunData) -> str:
    ages, largest = run.series("age"), run.series("age_max")
    if not ages or not largest:
        return ""
    bound = run.options.get("async_staleness")
    allowed = f" ({bound} would be allowed)" if isinstance(bound, int) else ""
    return (
        f"What was trained had been begun {short_number(fmean(age for _, age in ages))} updates earlier on average, "
        f"{max(age for _, age in largest):.0f} at most{allowed}."
    )


def _overlap_in_words(spans: Sequence[TimeSpan]) -> str:
    """How much of the time in which the trainer learns others work."""
    learning = covered(span for span in spans if span.lane == TRAINER and span.what == LEARNS)
    seconds, told = length(learning), []
    for kind, does in zip(OTHERS, ("engines wrote", "rewards were being judged")):
        shared = length(common(learning, covered(span for span in spans if span.lane.startswith(kind))))
        if shared > 0:
            told.append(f"{does} for {percent(shared / seconds, 0)}")
    if not told:
        return "Trainer, engines and rewards took turns." if len(lanes_of(spans)) > 1 else ""
    return f"Of the time in which the trainer learnt, {' and '.join(told)}."


def _waiting_in_words(run: RunData) -> str:
    waiting = [share for _, share in run.series("waiting")]
    return f"Of an iteration, the trainer had nothing to do for {percent(fmean(waiting), 0)}." if waiting else ""


def _picture(spans: Sequence[TimeSpan]) -> str:
    """A few iterations in the middle of the run, one lane below the other."""
    found = sorted({span.iteration for span in spans if span.lane == TRAINER} or {span.iteration for span in spans})
    first = max(0, (len(found) - STRETCH) // 2)
    chosen = found[first : first + STRETCH]
    inside = [span for span in spans if chosen[0] <= span.iteration <= chosen[-1]]
    trained = [span for span in inside if span.lane == TRAINER] or inside
    begin, end = min(span.begin for span in trained), max(span.end for span in trained)
    shown = ([span for span in spans if span.begin < end and span.end > begin] or inside)[:MOST_SPANS]
    names = lanes_of(shown)
    left_out = len(names) - MOST_LANES
    names = names[:MOST_LANES]
    rows = {name: len(names) - 0.5 - index for index, name in enumerate(names)}
    area = Area(values(begin, end), Axis(0.0, float(len(names)), [*rows.values()], [escape(name) for name in names]))
    kinds = kinds_of(shown)
    drawing = "".join(
        f'<line class=grid x1="{area.x(start):.1f}" x2="{area.x(start):.1f}" y1=0 y2={HEIGHT} />'
        for start in (min(s.begin for s in trained if s.iteration == i) for i in {s.iteration for s in trained})
    )
    thickness = 0.64 * HEIGHT / len(names)
    for span in (span for span in shown if span.lane in rows):
        left, right = area.x(max(span.begin, begin)), area.x(min(span.end, end))
        top = area.y(rows[span.lane] + 0.32)
        text = f"{span.lane}: {span.what} {duration(span.end - span.begin)}, iteration {span.iteration}"
        drawing += (
            f'<rect class="phase {_colour(span.what, kinds)}" x="{left:.1f}" y="{top:.1f}" '
            f'width="{max(right - left, 0.5):.1f}" height="{thickness:.1f}"><title>{escape(text)}</title></rect>'
        )
    which = f"iterations {chosen[0]} to {chosen[-1]}" if len(chosen) > 1 else f"iteration {chosen[0]}"
    note = f"{which}; seconds since the run began"
    note += f"; {plural(left_out, 'more lane')} not drawn" if left_out > 0 else ""
    keys = "".join(f'<span class="key block {_colour(name, kinds)}">{escape(name)}</span>' for name in kinds)
    drawn = figure("Who did what, and when", area, drawing, keys=keys, note=note, tall=True)
    return f"<div class='wide lanes'>{drawn}</div>"


def _activity_table(spans: Sequence[TimeSpan]) -> str:
    """Of every lane, how much of the run it did what."""
    whole = max(span.end for span in spans) - min(span.begin for span in spans)
    rows = []
    for lane in lanes_of(spans)[:MOST_LANES]:
        for what in kinds_of([span for span in spans if span.lane == lane]):
            spent = length(covered(span for span in spans if span.lane == lane and span.what == what))
            share = percent(spent / whole, 0) if whole > 0 else "–"
            rows.append((lane, what, ACTIVITIES.get(what, ""), duration(spent), share))
    return table(("", "does", "which means", "whole run", "share"), rows, "data sides phases", "card scroll wide")


def lanes_of(spans: Iterable[TimeSpan]) -> list[str]:
    """The trainer first, then engines and rewards by their numbers."""

    def place(lane: str) -> tuple[int, int, str]:
        kind, _, number = lane.partition(" ")
        order = (TRAINER, *OTHERS)
        return order.index(kind) if kind in order else len(order), int(number) if number.isdecimal() else 0, lane

    return sorted({span.lane for span in spans}, key=place)


def kinds_of(spans: Iterable[TimeSpan]) -> list[str]:
    found = dict.fromkeys(span.what for span in spans)
    return [*(name for name in ACTIVITIES if name in found), *(name for name in found if name not in ACTIVITIES)]


def _colour(what: str, kinds: Sequence[str]) -> str:
    coloured = [name for name in kinds if name != WAITS]
    return "waits" if what == WAITS else f"c{coloured.index(what) % COLOURS}"


def covered(spans: Iterable[TimeSpan]) -> Stretches:
    """The time that is covered by at least one of them, in stretches that do not touch."""
    found: Stretches = []
    for span in sorted(spans, key=lambda span: span.begin):
        if found and span.begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], span.end)
        else:
            found.append((span.begin, span.end))
    return found


def common(some: Stretches, others: Stretches) -> Stretches:
    """The time that is in both; each is ordered and without overlap."""
    found: Stretches = []
    waiting, rest = list(reversed(some)), list(reversed(others))
    while waiting and rest:
        begin, end = max(waiting[-1][0], rest[-1][0]), min(waiting[-1][1], rest[-1][1])
        if begin < end:
            found.append((begin, end))
        (waiting if waiting[-1][1] <= rest[-1][1] else rest).pop()
    return found


def length(stretches: Stretches) -> float:
    return sum(end - begin for begin, end in stretches)
