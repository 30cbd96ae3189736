"""An episode turn by turn: what the model said, what the world said to it, and what each turn was worth.

Tokens of the model carry the loss; those of the world are only read, and look so.
"""

from __future__ import annotations

from html import escape
from typing import Any

from trimtab.report.numbers import plain, plural, short_number
from trimtab.report.read import finite

MOST_CHARACTERS = 1500
"""Of one prompt, answer or turn: a longer one loses its middle."""
MOST_TURNS = 24
"""Of a longer episode the middle is left out."""
SAID_ELSEWHERE = {"reward", "turns", "episode_length", "seconds_environment"}


def has_turns(row: dict[str, Any]) -> bool:
    return bool(turns_of(row))


def model_turns(row: dict[str, Any]) -> int:
    return sum(bool(turn.get("drawn")) for turn in turns_of(row))


def conversation(row: dict[str, Any]) -> str:
    turns = turns_of(row)
    shown = [_turn(turn) for turn in turns]
    if len(turns) > MOST_TURNS:
        half = MOST_TURNS // 2
        shown = [*shown[:half], f"<li class=gap>{len(turns) - 2 * half} turns are not shown</li>", *shown[-half:]]
    return f"<ol class=turns>{''.join(shown)}</ol>{_figures(row.get('environment'))}"


def shown_text(text: str) -> str:
    return escape(text) if text.strip() else "<i class=empty>empty</i>"


def shortened(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"


def turns_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Who said what in an episode; empty for an answer that is none."""
    listed = row.get("turns")
    return [turn for turn in listed if isinstance(turn, dict)] if isinstance(listed, list) else []


def _turn(turn: dict[str, Any]) -> str:
    drawn = bool(turn.get("drawn"))
    tokens, reward, seconds = (finite(turn.get(name)) for name in ("tokens", "reward", "seconds"))
    facts = [plural(int(tokens), "token")] if tokens is not None else []
    facts += [f"{short_number(seconds)} s"] if seconds is not None and seconds >= 0.1 else []
    worth = f" <b>{'+' if reward > 0 else ''}{escape(short_number(reward))}</b>" if drawn and reward else ""
    role = "model" if drawn else plain(turn.get("role", "")) or "world"
    text = shown_text(shortened(plain(turn.get("text", ""))))
    return (
        f'<li class="{"drawn" if drawn else "world"}"><p>{escape(role)}{worth} <span>{escape(", ".join(facts))}</span>'
        f"</p><pre>{text}</pre></li>"
    )


def _figures(found: Any) -> str:
    """What the environment counted in this episode, where it is not nothing and not said elsewhere."""
    figures = {plain(name): finite(value) for name, value in found.items()} if isinstance(found, dict) else {}
    once = {"begun", "branches"}
    words = [
        f"{name.replace('_', ' ')} {short_number(number)}"
        for name, number in figures.items()
        if number and name not in SAID_ELSEWHERE and not (name in once and number == 1)
    ]
    return f"<p class=counted>{escape(', '.join(words))}</p>" if words else ""
