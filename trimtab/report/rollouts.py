"""The best and the worst answers of an RL run's first and last iteration, side by side."""

from __future__ import annotations

from html import escape
from typing import Any

from trimtab.report.conversations import conversation, has_turns, model_turns, shortened, shown_text
from trimtab.report.numbers import plain, plural, short_number
from trimtab.report.read import Run, finite

MOST_EACH = 3
"""Answers shown of each kind."""
NONE = "<p class=nothing>All kept answers have the same reward.</p>"
FINISHES = {
    "length": "cut at the limit",
    "stop": "ended by itself",
    "truncated": "cut off by the environment",
    "turns": "no turns left",
    "context": "no room left",
    "failed": "the environment failed",
}


def rollout_section(run: Run) -> str:
    rows = [row for row in run.rollouts if row.get("kept") in ("best", "worst")]
    steps = sorted({row["step"] for row in rows})
    if not steps:
        return ""
    chosen = dict.fromkeys((steps[0], steps[-1]))
    sides = [best_and_worst([row for row in rows if row["step"] == step]) for step in chosen]
    body = ""
    for kind, name in enumerate(("Best", "Worst")):
        if any(side[kind] for side in sides):
            columns = "".join(
                f"<div><h3>{name} of {run.unit} {step}</h3>{''.join(map(card, side[kind])) or NONE}</div>"
                for step, side in zip(chosen, sides)
            )
            body += f"<div class=rollouts>{columns}</div>"
    noun = "episodes" if any(map(has_turns, rows)) else "answers"
    return f"<h2>Best and worst {noun}</h2>{body}"


def best_and_worst(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The answers that the run kept as its best and as its worst, the very best and the very worst first.

    What is as bad as the worst is not among the best, and the other way round; if all are alike, none is worse.
    """
    ordered = sorted(rows, key=_reward, reverse=True)
    highest, lowest = _reward(ordered[0]), _reward(ordered[-1])
    if highest == lowest:
        return ordered[:MOST_EACH], []
    best = [row for row in ordered if row.get("kept") == "best" and _reward(row) > lowest]
    worst = [row for row in ordered[::-1] if row.get("kept") == "worst" and _reward(row) < highest]
    return best[:MOST_EACH], worst[:MOST_EACH]


def _reward(row: dict[str, Any]) -> float:
    reward = finite(row.get("reward"))
    return float("-inf") if reward is None else reward


def figures(row: dict[str, Any]) -> tuple[str, list[str]]:
    """In words: the reward of an answer, and what else is known of it."""
    reward, tokens, advantage = (finite(row.get(name)) for name in ("reward", "tokens", "advantage"))
    parts = row.get("parts")
    facts = [f"{name} {short_number(value)}" for name, value in _numbers(parts if isinstance(parts, dict) else {})]
    facts += [f"advantage {short_number(advantage)}"] if advantage is not None else []
    facts += [plural(int(tokens), "token")] if tokens is not None else []
    facts += [plural(model_turns(row), "turn")] if has_turns(row) else []
    if row.get("finish") is not None:
        facts.append(FINISHES.get(str(row["finish"]), str(row["finish"])))
    return f"reward {short_number(reward)}" if reward is not None else "no reward", facts


def card(row: dict[str, Any], with_prompt: bool = True, classes: str = "") -> str:
    """An answer with its reward and what it is made of."""
    shown, facts = figures(row)
    prompt, response = (shortened(plain(row.get(name, ""))) for name in ("prompt", "response"))
    answer = conversation(row) if has_turns(row) else f"<pre>{shown_text(response)}</pre>"
    asked = f"<pre class=prompt>{escape(prompt)}</pre>" if with_prompt else ""
    return (
        f"<article{f' class={classes}' if classes else ''}><p><b>{escape(shown)}</b> "
        f"<span>{escape(', '.join(facts))}</span></p>{asked}{answer}</article>"
    )


def _numbers(parts: dict[Any, Any]) -> list[tuple[str, float]]:
    return [(str(name), number) for name, value in parts.items() if (number := finite(value)) is not None]
