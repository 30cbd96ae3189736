"""Recorded answers and episodes as HTML.

An episode is shown turn by turn. Tokens of the model carry the loss; those of the environment are only read, and look
so.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Sequence
from html import escape
from typing import Any

from trimtab.report.formatting import plain, plural, short_number
from trimtab.report.run_data import RunData, finite

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


# ---- Best and worst answers of the first and the last iteration.


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


def rollout_section(run: RunData) -> str:
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


def answer_facts(row: dict[str, Any]) -> tuple[str, list[str]]:
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
    shown, facts = answer_facts(row)
    prompt, response = (shortened(plain(row.get(name, ""))) for name in ("prompt", "response"))
    answer = conversation(row) if has_turns(row) else f"<pre>{shown_text(response)}</pre>"
    asked = f"<pre class=prompt>{escape(prompt)}</pre>" if with_prompt else ""
    return (
        f"<article{f' class={classes}' if classes else ''}><p><b>{escape(shown)}</b> "
        f"<span>{escape(', '.join(facts))}</span></p>{asked}{answer}</article>"
    )


def _numbers(parts: dict[Any, Any]) -> list[tuple[str, float]]:
    return [(str(name), number) for name, value in parts.items() if (number := finite(value)) is not None]


# ---- Answers to the same few prompts over the iterations. Radio buttons and style rules filter them (`:has`), so that
# the report has no script.


MOST_PROMPTS, MOST_STEPS = 8, 12
SETS = {"evaluation": "evaluation", "train": "training"}

Group = list[dict[str, Any]]
Prompt = tuple[str, int]
"""Which set, and which row of it."""


def browser_section(run: RunData) -> str:
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


def _prompt(run: RunData, prompt: Prompt, steps: dict[int, Group], edges: tuple[float, float]) -> str:
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


# ---- The live page: answers of one iteration, whole groups and extremes.


def kept_steps(run: RunData) -> list[int]:
    """The iterations of which answers are kept."""
    return sorted({row["step"] for row in run.rollouts})


def nearest(run: RunData, step: int | None) -> int | None:
    """The last such iteration that is not after `step`, or the first one; without `step` the newest."""
    steps = kept_steps(run)
    if not steps:
        return None
    return steps[-1] if step is None else steps[max(0, bisect_right(steps, step) - 1)]


def answers(run: RunData, step: int | None = None) -> str:
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


def _when(run: RunData, step: int) -> str:
    return f"of {run.unit} {step}" if step else "before training"


def _groups(run: RunData, step: int) -> str:
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


def _extremes(run: RunData, step: int) -> str:
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
