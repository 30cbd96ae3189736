"""Knights-and-knaves puzzles become the rows of PaddleNLP's recipe: {"src": [prompt], "tgt": [solution]}.

A puzzle is a row of the public sets (K-and-K/knights-and-knaves, Logic-RL): the question in `quiz`, the solution as
text in `solution_text_format` or as `names` and truth values in `solution`, or as both, which must then agree. The
prompt is word for word the one of PaddleNLP's guide, up to the <think> from which the answer goes on; it is the whole
text that the model reads, so that no chat template is put around it.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset

from trimtab.data.places import places_of
from trimtab.data.sources import load_rows
from trimtab.errors import UserError
from trimtab.files import write_text

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
            (where,) = places_of(rows, "the rows").names([number])
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
