"""A run in a few lines, as a notebook shows it: small curves, last figures, alarms. One piece of HTML, nothing else."""

from __future__ import annotations

from html import escape

from trimtab.report.formatting import short_number
from trimtab.report.panels import EVALUATION, objective_panels
from trimtab.report.run_data import Point, RunData

CURVES = 4
POINTS = 160
WIDTH, HEIGHT = 150, 36
MOST_ALARMS = 5


def html_card(run: RunData, alarms: list[str]) -> str:
    state = "finished" if run.has_saved_model else "not finished"
    steps = f"{run.steps} {run.unit}{'s' * (run.steps != 1)}"
    head = f"<b>trimtab {escape(run.job)}</b> {escape(str(run.folder))} · {state}, {steps}"
    curves = "".join(_figure(run, name, title) for name, title in _main_figures(run))
    told = "".join(f"<li>{escape(alarm)}</li>" for alarm in alarms[:MOST_ALARMS])
    more = f"<li>and {len(alarms) - MOST_ALARMS} more</li>" if len(alarms) > MOST_ALARMS else ""
    listed = f"<ul style='margin:4px 0 0 18px'>{told}{more}</ul>" if alarms else ""
    page = run.folder / "report.html"
    where = f"<div style='opacity:.7'>report: {escape(str(page))}</div>" if page.is_file() else ""
    return (
        f"<div style='font:13px system-ui,sans-serif'><div>{head}</div>"
        f"<div style='display:flex;flex-wrap:wrap;gap:18px;margin-top:6px'>{curves}</div>{listed}{where}</div>"
    )


def last_figures(run: RunData, most: int = 3) -> list[tuple[str, str]]:
    """The newest values of what matters most to the job."""
    found = [(name, run.last(name)) for name, _ in _main_figures(run)[:most]]
    return [(name, short_number(value)) for name, value in found if value is not None]


def _main_figures(run: RunData) -> list[tuple[str, str]]:
    """(metric, title) of the first pictures of the run's report; of each what was evaluated, where that was."""
    chosen: dict[str, str] = {}
    for picture in objective_panels([run]):
        metric = next(iter(picture.metrics))
        for name in (metric, f"{EVALUATION}{metric}"):
            if run.series(name):
                told = f"{picture.title}, evaluated" if name.startswith(EVALUATION) else picture.title
                chosen.setdefault(name, told)
    return list(chosen.items())[:CURVES]


def _figure(run: RunData, name: str, title: str) -> str:
    points = run.series(name)
    return (
        f"<div><div style='opacity:.7'>{escape(title)}</div>{_sparkline(points)}"
        f"<div>{short_number(points[0][1])} → <b>{short_number(points[-1][1])}</b></div></div>"
    )


def _sparkline(points: list[Point]) -> str:
    kept = points[:: -(-len(points) // POINTS)]
    kept = kept if kept[-1] == points[-1] else [*kept, points[-1]]
    steps, values = [step for step, _ in kept], [value for _, value in kept]
    width, height = steps[-1] - steps[0] or 1, max(values) - min(values) or 1.0
    places = " ".join(
        f"{2 + (WIDTH - 4) * (step - steps[0]) / width:.1f},"
        f"{2 + (HEIGHT - 4) * (1 - (value - min(values)) / height):.1f}"
        for step, value in kept
    )
    return (
        f"<svg width={WIDTH} height={HEIGHT} role=img aria-hidden=true><polyline points='{places}' fill=none "
        "stroke=currentColor stroke-width=1.5 stroke-linejoin=round /></svg>"
    )
