"""What trainer, engines and rewards did at the same time: of runs whose answers outlive an update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from statistics import fmean

from trimtab.report.axes import HEIGHT, Area, Axis, figure, values
from trimtab.report.curves import COLOURS
from trimtab.report.numbers import duration, percent, plural, short_number
from trimtab.report.read import Run, Span

TRAINER, WRITES, WAITS, LEARNS = "trainer", "rollout", "waiting", "update"
OTHERS = ("engine", "rewards")
MEANINGS = {
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


def lane_section(run: Run) -> str:
    if not run.spans:
        return ""
    spans = _as_seen_by_the_trainer(run)
    words = " ".join(filter(None, (age_in_words(run), _overlap_in_words(spans), _waiting_in_words(run))))
    told = f"<h2>Trainer, engines and rewards side by side</h2><p class=words>{escape(words)}</p>"
    return f"{told}<div class=charts>{_picture(spans)}{_table(spans)}</div>"


def _as_seen_by_the_trainer(run: Run) -> list[Span]:
    """Only a trainer whose engines are apart waits in its rollout phase; any other writes the answers itself."""
    if not run.series("engine_busy"):  # which engines of their own alone have
        return list(run.spans)
    return [replace(span, what=WAITS) if (span.lane, span.what) == (TRAINER, WRITES) else span for span in run.spans]


def age_in_words(run: Run) -> str:
    ages, largest = run.series("age"), run.series("age_max")
    if not ages or not largest:
        return ""
    bound = run.options.get("async_staleness")
    allowed = f" ({bound} would be allowed)" if isinstance(bound, int) else ""
    return (
        f"What was trained had been begun {short_number(fmean(age for _, age in ages))} updates earlier on average, "
        f"{max(age for _, age in largest):.0f} at most{allowed}."
    )


def _overlap_in_words(spans: Sequence[Span]) -> str:
    """How much of the time in which the trainer learns others work."""
    learning = joined(span for span in spans if span.lane == TRAINER and span.what == LEARNS)
    seconds, told = length(learning), []
    for kind, does in zip(OTHERS, ("engines wrote", "rewards were being judged")):
        shared = length(common(learning, joined(span for span in spans if span.lane.startswith(kind))))
        if shared > 0:
            told.append(f"{does} for {percent(shared / seconds, 0)}")
    if not told:
        return "Trainer, engines and rewards took turns." if len(lanes_of(spans)) > 1 else ""
    return f"Of the time in which the trainer learnt, {' and '.join(told)}."


def _waiting_in_words(run: Run) -> str:
    waiting = [share for _, share in run.series("waiting")]
    return f"Of an iteration, the trainer had nothing to do for {percent(fmean(waiting), 0)}." if waiting else ""


def _picture(spans: Sequence[Span]) -> str:
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


def _table(spans: Sequence[Span]) -> str:
    """Of every lane, how much of the run it did what."""
    whole = max(span.end for span in spans) - min(span.begin for span in spans)
    rows = ""
    for lane in lanes_of(spans)[:MOST_LANES]:
        for what in kinds_of([span for span in spans if span.lane == lane]):
            spent = length(joined(span for span in spans if span.lane == lane and span.what == what))
            share = percent(spent / whole, 0) if whole > 0 else "–"
            cells = (lane, what, MEANINGS.get(what, ""), duration(spent), share)
            rows += f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
    head = "".join(f"<th>{name}</th>" for name in ("", "does", "which means", "whole run", "share"))
    return f"<div class='card scroll wide'><table class='data sides phases'><tr>{head}</tr>{rows}</table></div>"


def lanes_of(spans: Iterable[Span]) -> list[str]:
    """The trainer first, then engines and rewards by their numbers."""

    def place(lane: str) -> tuple[int, int, str]:
        kind, _, number = lane.partition(" ")
        order = (TRAINER, *OTHERS)
        return order.index(kind) if kind in order else len(order), int(number) if number.isdecimal() else 0, lane

    return sorted({span.lane for span in spans}, key=place)


def kinds_of(spans: Iterable[Span]) -> list[str]:
    found = dict.fromkeys(span.what for span in spans)
    return [*(name for name in MEANINGS if name in found), *(name for name in found if name not in MEANINGS)]


def _colour(what: str, kinds: Sequence[str]) -> str:
    coloured = [name for name in kinds if name != WAITS]
    return "waits" if what == WAITS else f"c{coloured.index(what) % COLOURS}"


def joined(spans: Iterable[Span]) -> Stretches:
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
