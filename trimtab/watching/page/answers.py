"""The answers that a run keeps of one iteration: whole groups side by side, then the best and the worst."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from html import escape
from typing import Any

from trimtab.report.browser import SETS, Group, groups_of
from trimtab.report.conversations import has_turns, shortened
from trimtab.report.numbers import plain, plural, short_number
from trimtab.report.read import Run, finite
from trimtab.report.rollouts import best_and_worst, card


def kept_steps(run: Run) -> list[int]:
    """The iterations of which answers are kept."""
    return sorted({row["step"] for row in run.rollouts})


def nearest(run: Run, step: int | None) -> int | None:
    """The last such iteration that is not after `step`, or the first one; without `step` the newest."""
    steps = kept_steps(run)
    if not steps:
        return None
    return steps[-1] if step is None else steps[max(0, bisect_right(steps, step) - 1)]


def answers(run: Run, step: int | None = None) -> str:
    """Everything of an iteration; whole groups, which are not kept every time, as they last were."""
    chosen = nearest(run, step)
    if chosen is None:
        return ""
    steps = kept_steps(run)
    place = steps.index(chosen)
    earlier, later = steps[place - 1] if place else "", steps[place + 1] if place + 1 < len(steps) else ""
    noun = "Episodes" if any(map(has_turns, run.rollouts)) else "Answers"
    return (
        f'<div class=iteration data-step="{chosen}" data-earlier="{earlier}" data-later="{later}" '
        f'data-first="{steps[0]}" data-newest="{steps[-1]}"><h2>{noun} {_when(run, chosen)}</h2>'
        f"{_groups(run, chosen)}{_extremes(run, chosen)}</div>"
    )


def _when(run: Run, step: int) -> str:
    return f"of {run.unit} {step}" if step else "before training"


def _groups(run: Run, step: int) -> str:
    found = groups_of([row for row in run.rollouts if row["step"] <= step])
    body = ""
    for which, name in reversed(SETS.items()):
        rows = {row: groups for (of, row), groups in found.items() if of == which}
        if not rows:
            continue
        last = max(number for groups in rows.values() for number in groups)
        shown = [(row, groups[last]) for row, groups in rows.items() if last in groups]
        when = "" if last == step else f", {_when(run, last)}"
        body += f"<h3>{name.capitalize()} prompts{escape(when)}</h3>{''.join(_group(*pair) for pair in shown)}"
    return body


def _group(row: int, group: Group) -> str:
    """A prompt with all its kept answers, the best first."""
    ordered = sorted(group, key=lambda answer: finite(answer.get("reward")) or 0.0, reverse=True)
    rewards = [reward for answer in group if (reward := finite(answer.get("reward"))) is not None]
    mean = f", mean reward {short_number(sum(rewards) / len(rewards))}" if rewards else ""
    first = group[0]
    label = f"<p class=words>label: {escape(shortened(plain(first['label'])))}</p>" if "label" in first else ""
    cards = "".join(answer(one, with_prompt=False) for one in ordered)
    told = f"row {row + 1}: {plural(len(group), 'answer')}{mean}"
    return (
        f"<div class='card group' data-key='{row}-{first['step']}'><p class=facts-line>{escape(told)}</p>"
        f"<pre class=asked>{escape(shortened(plain(first.get('prompt', ''))))}</pre>{label}"
        f"<div class='rollouts beside' tabindex=0>{cards}</div></div>"
    )


def _extremes(run: Run, step: int) -> str:
    rows = [row for row in run.rollouts if row["step"] == step and row.get("kept") in ("best", "worst")]
    if not rows:
        return ""
    columns = ""
    for name, chosen in zip(("Best", "Worst"), best_and_worst(rows)):
        if chosen:
            columns += f"<div><h3>{name} {_when(run, step)}</h3>{''.join(map(answer, chosen))}</div>"
    return f"<div class=rollouts>{columns}</div>"


def answer(row: dict[str, Any], with_prompt: bool = True) -> str:
    """A card, and below it the place for its tokens where the run has kept them. What is in it never changes."""
    body = card(row, with_prompt=with_prompt)
    number = finite(row.get("answer"))
    where = "" if number is None else f' data-step="{row["step"]}" data-answer="{int(number)}"'
    return f'<div class=answer data-key="{row["step"]}-{zlib.crc32(body.encode(errors="replace"))}"{where}>{body}</div>'
