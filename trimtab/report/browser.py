"""The answers of an RL run to the same few prompts over its iterations: whole groups, to be filtered by row and reward.

Radio buttons and style rules do the filtering (`:has`), so the page has no script and a model's text stays text.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from trimtab.report.conversations import shortened
from trimtab.report.numbers import plain, short_number
from trimtab.report.read import Run, finite
from trimtab.report.rollouts import card

MOST_PROMPTS, MOST_STEPS = 8, 12
SETS = {"evaluation": "evaluation", "train": "training"}

Group = list[dict[str, Any]]
Prompt = tuple[str, int]
"""Which set, and which row of it."""


def browser_section(run: Run) -> str:
    found = groups_of(run.rollouts)
    if not found:
        return ""
    prompts = most_followed(found)
    rewards = [reward for prompt in prompts for group in found[prompt].values() for reward in _rewards(group)]
    edges = edges_of(rewards)
    names = {f"{which}{row}": f"{SETS[which]} row {row + 1}" for which, row in prompts}
    body = "".join(_prompt(run, prompt, found[prompt], edges) for prompt in prompts)
    low, high = map(short_number, edges)
    levels = {"low": f"up to {low}", "middle": "between", "high": f"{high} and more"} if edges[0] < edges[1] else {}
    if not any(edges[0] < reward < edges[1] for reward in rewards):
        levels.pop("middle", None)
    rules = "".join(f".browser:has(#row-{name}:checked) .prompt:not(.{name}){{display:none}}" for name in names)
    rules += "".join(f".browser:has(#reward-{name}:checked) article:not(.{name}){{display:none}}" for name in levels)
    return (
        f"<h2>Answers to the same prompts</h2><style>{rules}</style><div class=browser>"
        f"{_choice('row', 'all prompts', names)}{_choice('reward', 'all rewards', levels)}{body}</div>"
    )


def groups_of(rows: Sequence[dict[str, Any]]) -> dict[Prompt, dict[int, Group]]:
    """Whole groups by prompt and by step."""
    found: dict[Prompt, dict[int, Group]] = {}
    for row in rows:
        number, which = finite(row.get("row")), str(row.get("group"))
        if which in SETS and number is not None and number >= 0:
            found.setdefault((which, int(number)), {}).setdefault(row["step"], []).append(row)
    return found


def most_followed(found: dict[Prompt, dict[int, Group]]) -> list[Prompt]:
    """The prompts of most steps, those of the evaluation first."""
    return sorted(found, key=lambda prompt: (prompt[0] != "evaluation", -len(found[prompt])))[:MOST_PROMPTS]


def _prompt(run: Run, prompt: Prompt, steps: dict[int, Group], edges: tuple[float, float]) -> str:
    numbers = sorted(steps)
    shown = numbers if len(numbers) <= MOST_STEPS else [*numbers[: MOST_STEPS // 2], *numbers[-(MOST_STEPS // 2) :]]
    first = steps[numbers[0]][0]
    label = f"<p class=words>label: {escape(shortened(plain(first['label'])))}</p>" if "label" in first else ""
    body = ""
    for number in shown:
        rewards = _rewards(steps[number])
        mean = f", mean reward {short_number(sum(rewards) / len(rewards))}" if rewards else ""
        when = f"{run.unit} {number}" if number else "before training"
        cards = "".join(card(row, with_prompt=False, classes=_level(row, edges)) for row in steps[number])
        body += (
            f"<details{' open' if number == numbers[-1] else ''}><summary>{when}: {len(steps[number])} answers{mean}"
            f"</summary><div class=rollouts>{cards}</div></details>"
        )
    asked = escape(shortened(plain(first.get("prompt", ""))))
    return f'<div class="card prompt {prompt[0]}{prompt[1]}"><pre>{asked}</pre>{label}{body}</div>'


def edges_of(rewards: list[float]) -> tuple[float, float]:
    """Up to the first of them a reward is low, from the second on high: about a third each, if values allow it."""
    ordered = sorted(rewards) or [0.0]
    low, high = ordered[len(ordered) // 3], ordered[2 * len(ordered) // 3]
    if low == high:
        low = max((reward for reward in ordered if reward < high), default=high)
    if low == high:
        high = min((reward for reward in ordered if reward > low), default=low)
    return low, high


def _rewards(group: Group) -> list[float]:
    return [reward for row in group if (reward := finite(row.get("reward"))) is not None]


def _level(row: dict[str, Any], edges: tuple[float, float]) -> str:
    reward = finite(row.get("reward"))
    if reward is None or reward <= edges[0]:
        return "low"
    return "high" if reward >= edges[1] else "middle"


def _choice(name: str, everything: str, values: dict[str, str]) -> str:
    buttons = "".join(
        f'<label><input type=radio name={name} id="{name}-{value}"{" checked" if value == "all" else ""}>'
        f"{escape(words)}</label>"
        for value, words in {"all": everything, **values}.items()
    )
    return f"<fieldset><legend>{name}</legend>{buttons}</fieldset>"
