"""Several runs, one line each, with the curve that says most of them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from trimtab.report.numbers import duration, percent
from trimtab.watching.state import Condition
from trimtab.watching.view import COLOURS, Watched

NAMES = 24


def overview(runs: Sequence[Watched], width: int, height: int | None) -> list[Text]:
    """Two lines a run if there is room, else one."""
    both = height is None or 2 * len(runs) <= height
    lines = []
    for number, watched in enumerate(runs, start=1):
        lines.append(_doing(watched, number, width))
        if both:
            lines.append(_figures(watched, width))
    if height is not None and len(lines) > height:
        more = Text(f"… and {len(lines) - height + 1} more", style="dim")
        more.truncate(width)
        lines = [*lines[: height - 1], more]
    return lines


def _doing(watched: Watched, number: int, width: int) -> Text:
    state, progress = watched.state, watched.progress
    name = watched.name if len(watched.name) <= NAMES else "…" + watched.name[1 - NAMES :]
    line = Text(f"{number:>2} ").append(f"{name:<{NAMES}} ", style="bold")
    line.append(f"● {state.in_words}", style=COLOURS[state.condition])
    if progress.share is not None:
        line.append(f"  {watched.followed.run.unit} {progress.done:,} of {progress.planned:,}, ")
        line.append(percent(progress.share, 0))
    if progress.remaining and state.condition is Condition.RUNNING:
        line.append(f"  {duration(progress.remaining)} to go", style="dim")
    if watched.alarms:
        line.append(f"  ! {len(watched.alarms)}", style="bold red" if watched.alarms[0][0] else "yellow")
    line.truncate(width, overflow="ellipsis")
    return line


def _figures(watched: Watched, width: int) -> Text:
    line = Text("   ")
    room = max(8, (width - 3) // 2 - 26)
    for curve in watched.curves[:2]:
        line.append(f"{curve.name[:13]:<13} ").append(f"{curve.drawn(room):<{room}}", style="cyan")
        line.append(f" {curve.last:<9}", style="bold")
    line.truncate(width, overflow="ellipsis")
    return line
