"""What scored answers become: rows that a trainer learns from. Pure functions, from rows to rows.

A scored row has an `input` (text as the model read it, or a conversation), an `output` and its `reward`. With r_1 to
r_n the rewards of the answers y_1 to y_n to one prompt x:

    rs        x, y_i              i = argmax r                      rejection sampling, for sft
    iter_dpo  x, y_i, y_j         i = argmax r, j = argmin r        pairs, for dpo and rm; none where all r are equal
    kto       x, y_i, label       label = r_i > mean r              for kto; none where all r are equal
    csft      x + r_i, y_i        every answer, r written into x    conditional SFT; then sampled with x + a high r

Of equal rewards the first counts. Normalised rewards of csft are (r - mean) / deviation over all rows.
"""

import json
import statistics
from collections.abc import Callable, Iterator
from typing import Any, overload

from trimtab.data.formats import Message

Row = dict[str, Any]
Prompt = str | list[Message]

REWARD_TEMPLATE = "{input} <rm_score>: {reward} "


def post_process(rows: list[Row], name: str, *, reward_template: str | None, normalize: bool) -> list[Row]:
    """The rows that the post-processor of this name makes of scored rows."""
    if name == "csft":
        return conditional_rows(rows, reward_template or REWARD_TEMPLATE, normalize=normalize)
    return _OF_GROUPS[name](rows)


def best_answers(rows: list[Row]) -> list[Row]:
    return [max(group, key=_reward) for group in _groups(rows)]


def best_and_worst(rows: list[Row]) -> list[Row]:
    pairs = []
    for group in _telling(rows):
        best, worst = max(group, key=_reward), min(group, key=_reward)
        pairs.append(
            {
                "prompt": best["input"],
                "chosen": best["output"],
                "chosen_reward": best["reward"],
                "rejected": worst["output"],
                "rejected_reward": worst["reward"],
            }
        )
    return pairs


def judged_answers(rows: list[Row]) -> list[Row]:
    judged = []
    for group in _telling(rows):
        mean = statistics.fmean(map(_reward, group))
        judged += [{**row, "label": row["reward"] > mean} for row in group]
    return judged


def conditional_rows(rows: list[Row], template: str, *, normalize: bool) -> list[Row]:
    mean, deviation = 0.0, 1.0
    if normalize:
        mean = statistics.fmean(map(_reward, rows))
        deviation = statistics.pstdev(map(_reward, rows)) or 1.0
    return [
        {**row, "input": with_reward(row["input"], template, f"{(row['reward'] - mean) / deviation:.2f}")}
        for row in rows
    ]


def with_reward(prompt: Prompt, template: str, reward: str) -> Prompt:
    """The prompt with its reward written behind it: behind the text, or behind the last turn of a conversation."""
    if isinstance(prompt, str):
        before, hole, after = template.partition("{input}")
        if not hole:
            before, after = "", template
        # Not str.format: braces in the prompt are just text.
        return before.replace("{reward}", reward) + prompt + after.replace("{reward}", reward)
    last = prompt[-1]  # a turn, or the last part of a turn in parts
    words = "content" if "content" in last else "text"
    return [*prompt[:-1], {**last, words: with_reward(last[words], template, reward)}]


@overload
def conditioned(prompt: str, condition: str | None) -> str: ...
@overload
def conditioned(prompt: list[Message], condition: str | None) -> list[Message]: ...
def conditioned(prompt: Prompt, condition: str | None) -> Prompt:
    """The prompt of a model that was trained on csft rows, asking for the reward that `condition` spells."""
    return prompt if condition is None else with_reward(prompt, "{input} " + condition.strip() + " ", "")


def _reward(row: Row) -> float:
    return row["reward"]


def _groups(rows: list[Row]) -> list[list[Row]]:
    """The answers to each prompt, wherever they stand, in the order of the prompts."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(json.dumps(row["input"]), []).append(row)
    return list(groups.values())


def _telling(rows: list[Row]) -> Iterator[list[Row]]:
    """The groups in which one answer is better than another."""
    return (group for group in _groups(rows) if len(set(map(_reward, group))) > 1)


_OF_GROUPS: dict[str, Callable[[list[Row]], list[Row]]] = {
    "rs": best_answers,
    "iter_dpo": best_and_worst,
    "kto": judged_answers,
}
