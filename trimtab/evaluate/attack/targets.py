"""The goals of an attack and the answers it wants, read from a file, and the prompts made of them."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from trimtab.data.sources import load_rows
from trimtab.data.time_limit import template_time
from trimtab.errors import UserError
from trimtab.evaluate.attack.losses import Surroundings

SCENARIOS = {"behaviors": ("goal", "target"), "strings": ("target",)}
"""The columns each needs; without a goal the whole user turn is the suffix."""


@dataclass(frozen=True)
class Target:
    goal: str
    wanted: str


def read_targets(path: str, scenario: str, most: int) -> tuple[list[Target], int]:
    """The first `most` rows, and how many of them had quotes escaped by a backslash, which is taken away."""
    rows = load_rows(path, probabilities=None, split="train", max_samples=most, seed=0, flag="--file_path")
    needed = SCENARIOS[scenario]
    for name in needed:
        if name not in rows.column_names:
            raise UserError(
                f"--file_path {path} has no column {name}: --scenario {scenario} needs {' and '.join(needed)}, and it "
                f"has {', '.join(rows.column_names)}"
            )
    targets, mended = [], 0
    for number, row in enumerate(rows, start=1):
        texts = [_text(row[name], name, f"--file_path {path} row {number}") for name in needed]
        plain = [text.replace("\\'", "'").replace('\\"', '"') for text in texts]
        mended += texts != plain
        targets.append(Target(*plain) if len(plain) == 2 else Target("", *plain))
    return targets, mended


def _text(value: Any, name: str, where: str) -> str:
    if value is None or not str(value).strip():
        raise UserError(f"{where}: {name} is empty; fill it in or remove the row")
    return str(value)


class Prompts:
    """Questions as the model reads them: the only user turn of its chat template, or plain text without one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer

    def text(self, question: str) -> str:
        if not self.tokenizer.chat_template:
            return question
        turns = [{"role": "user", "content": question}]
        with template_time():
            return self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)

    def ids(self, question: str) -> list[int]:
        return self.encode(self.text(question))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []

    def around(self, target: Target) -> Surroundings:
        """The tokens before and after a suffix that follows the goal, and those of the wanted answer."""
        mark = "SUFFIX"
        while mark in target.goal:
            mark += "X"
        before, _, after = self.text(target.goal + mark).rpartition(mark)
        return Surroundings(self.encode(before), self.encode(after), self.encode(target.wanted))
