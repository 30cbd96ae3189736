"""The best and the worst answers of an RL run's first and last iteration, side by side."""

from __future__ import annotations

from html import escape
from typing import Any

from trimtab.report.numbers import plain, plural, short_number
from trimtab.report.read import Run, finite

MOST_EACH = 3
"""Answers shown of each kind."""
MOST_CHARACTERS = 1500
"""Of one prompt or answer: a longer one loses its middle."""
NONE = "<p class=nothing>All kept answers have the same reward.</p>"
FINISHES = {"length": "cut at the limit", "stop": "ended by itself"}


def rollout_section(run: Run) -> str:
    steps = sorted({row["step"] for row in run.rollouts})
    if not steps:
        return ""
    chosen = dict.fromkeys((steps[0], steps[-1]))
    sides = [best_and_worst([row for row in run.rollouts if row["step"] == step]) for step in chosen]
    body = ""
    for kind, name in enumerate(("Best", "Worst")):
        if any(side[kind] for side in sides):
            columns = "".join(
                f"<div><h3>{name} of {run.unit} {step}</h3>{''.join(map(_card, side[kind])) or NONE}</div>"
                for step, side in zip(chosen, sides)
            )
            body += f"<div class=rollouts>{columns}</div>"
    return f"<h2>Best and worst answers</h2>{body}"


def best_and_worst(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The answers of highest and of lowest reward, each once; the very best and the very worst come first.

    What is as bad as the worst is not among the best, and the other way round; if all are alike, none is worse.
    """
    different = {(plain(row.get("prompt")), plain(row.get("response"))): row for row in rows}.values()
    ordered = sorted(different, key=_reward, reverse=True)
    highest, lowest = _reward(ordered[0]), _reward(ordered[-1])
    if highest == lowest:
        return ordered[:MOST_EACH], []
    half = len(ordered) // 2
    best = [row for row in ordered[: len(ordered) - half] if _reward(row) > lowest]
    worst = [row for row in ordered[len(ordered) - half :] if _reward(row) < highest]
    return best[:MOST_EACH], worst[::-1][:MOST_EACH]


def shortened(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"


def _reward(row: dict[str, Any]) -> float:
    reward = finite(row.get("reward"))
    return float("-inf") if reward is None else reward


def _card(row: dict[str, Any]) -> str:
    reward, tokens = finite(row.get("reward")), finite(row.get("tokens"))
    facts = [plural(int(tokens), "token")] if tokens is not None else []
    if row.get("finish") is not None:
        facts.append(FINISHES.get(str(row["finish"]), str(row["finish"])))
    shown = f"reward {short_number(reward)}" if reward is not None else "no reward"
    prompt, response = (shortened(plain(row.get(name, ""))) for name in ("prompt", "response"))
    answer = escape(response) if response.strip() else "<i class=empty>empty</i>"
    return (
        f"<article><p><b>{escape(shown)}</b> <span>{escape(', '.join(facts))}</span></p>"
        f"<pre class=prompt>{escape(prompt)}</pre><pre>{answer}</pre></article>"
    )
