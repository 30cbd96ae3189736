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
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, overload

from datasets import Dataset

from trimtab.data.data_files import locations_of
from trimtab.data.formats import Message
from trimtab.data.sources import load_rows
from trimtab.errors import UserError
from trimtab.files import write_text

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


# ---- Knights-and-knaves puzzles become the rows of PaddleNLP's recipe: {"src": [prompt], "tgt": [solution]}
#
# A puzzle is a row of the public sets (K-and-K/knights-and-knaves, Logic-RL): the question in `quiz`, the solution
# as text in `solution_text_format` or as `names` and truth values in `solution`, or as both, which must then agree.
# The prompt is word for word the one of PaddleNLP's guide, up to the <think> from which the answer goes on; it is
# the whole text that the model reads, so that no chat template is put around it.


SYSTEM = (
    "You are a helpful assistant. The assistant first thinks about the reasoning process in the mind and then provides "
    "the user with the answer. The reasoning process and answer are enclosed within <think> </think> and<answer> "
    "</answer> tags, respectively, i.e., <think> reasoning process here </think><answer> answer here </answer>.  Now "
    "the user asks you to solve a logical reasoning problem. After thinking, when you finally reach a conclusion, "
    "clearly state the identity of each character within <answer> </answer> tags. i.e., <answer> (1) Zoey is a knight\n"
    "(2) ... </answer>."
)
LINE = re.compile(r"\((\d+)\) (\S+) is a (knight|knave)")


def convert(sources: str, path: Path, *, split: str, max_samples: int | None) -> int:
    """Write the prompts and solutions of the sources' puzzles as JSON lines, all or none; how many they are."""
    rows = load_rows(sources, probabilities=None, split=split, max_samples=max_samples, seed=0, flag="ROWS")
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in converted(rows)]
    try:
        write_text(path, "".join(lines))
    except OSError as error:
        raise UserError(f"{path}: cannot write there ({error.strerror}); choose another file") from error
    return len(lines)


def converted(rows: Dataset) -> Iterator[dict[str, list[str]]]:
    if {"src", "tgt"} <= set(rows.column_names):
        raise UserError("these rows have src and tgt already: train on them as they are")
    for number, row in enumerate(rows):
        try:
            yield source_and_target(row)
        except ValueError as error:
            (where,) = locations_of(rows, "the rows").names([number])
            raise UserError(f"{where}: {error}") from None


def source_and_target(row: dict[str, Any]) -> dict[str, list[str]]:
    """One puzzle; ValueError says what is wrong with it."""
    quiz, told = row.get("quiz"), row.get("solution_text_format")
    if not isinstance(quiz, str) or not quiz.strip():
        raise ValueError(f"no question: it must be text in a column quiz, and the columns are {', '.join(row)}")
    names, truth = row.get("names"), row.get("solution")
    listed = _listed(names, truth) if names is not None and truth is not None else None
    solution = listed if told is None else told
    if solution is None:
        raise ValueError("no solution: it must be text in solution_text_format, or names and truth values in solution")
    _check(solution)
    if listed not in (None, solution):
        raise ValueError(f"two solutions: {solution!r} as text, {listed!r} as truth values")
    return {"src": [prompt_of(quiz)], "tgt": [solution]}


def prompt_of(quiz: str) -> str:
    turns = "".join(f"<|im_start|>{role}\n{text}\n<|im_end|>\n" for role, text in (("system", SYSTEM), ("user", quiz)))
    return f"{turns}<|im_start|>assistant\n<think>"


def _listed(names: Any, truth: Any) -> str:
    if not isinstance(names, list) or not isinstance(truth, list) or len(names) != len(truth):
        raise ValueError("names and solution must be lists of the same length")
    roles = ("knight" if told else "knave" for told in truth)
    return "\n".join(f"({place}) {name} is a {role}" for place, (name, role) in enumerate(zip(names, roles), start=1))


def _check(solution: Any) -> None:
    """What the reward reads must be there: names of one word, each judged once, as a knight or a knave."""
    found = [LINE.fullmatch(line) for line in solution.split("\n")] if isinstance(solution, str) else [None]
    judged = [line.group(2) for line in found if line is not None]
    if len(judged) < len(found) or len(set(judged)) < len(judged):
        raise ValueError(
            f"a solution has a line such as '(1) Zoey is a knight' for everybody, and this has not: {solution!r:.80}"
        )
