"""What a preference row is: a prompt with two answers, or two whole conversations or texts.

The prompt's column is the one `--prompt_key` names, or `prompt`. Without any, the two sides hold everything: message
lists, whose last assistant turn is the answer, or texts such as "\\n\\nHuman: ...\\n\\nAssistant: ...".
"""

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trimtab.data.formats import Message, kind_of, read_tools, require_columns, text_or_messages
from trimtab.errors import UserError

MARGIN = "margin"
ANSWER_MARK = "\n\nAssistant:"
QUESTION_MARK = "\n\nHuman:"
SPEAKER = re.compile(r"\n\n(Human|Assistant): ?")
ROLES = {"Human": "user", "Assistant": "assistant"}


class PairFormatOptions(Protocol):
    @property
    def prompt_key(self) -> str | None: ...

    @property
    def chosen_key(self) -> str: ...

    @property
    def rejected_key(self) -> str: ...


@dataclass(frozen=True)
class PairColumns:
    """Where a preference row keeps its parts."""

    chosen: str
    rejected: str
    prompt: str | None = None
    margin: str | None = None
    tools: str | None = None
    recognised_prompt: bool = False
    """The prompt's column was found, not named: the two sides may well repeat the prompt."""

    @property
    def names(self) -> list[str]:
        parts = (self.prompt, self.chosen, self.rejected, self.margin, self.tools)
        return [name for name in parts if name is not None]

    @property
    def description(self) -> str:
        return "columns " + " + ".join(name for name in (self.prompt, self.chosen, self.rejected) if name is not None)


@dataclass(frozen=True)
class PairRecord:
    """One row, checked. Without a prompt the two sides are whole conversations or whole texts."""

    prompt: str | list[Message] | None
    chosen: str | list[Message]
    rejected: str | list[Message]
    margin: float = 0.0
    tools: list[Any] | None = None


def recognise_pairs(columns: Sequence[str], options: PairFormatOptions) -> PairColumns:
    require_columns(
        columns,
        {
            "--prompt_key": options.prompt_key,
            "--chosen_key": options.chosen_key,
            "--rejected_key": options.rejected_key,
        },
    )
    known = {name for name in (MARGIN, "tools", "prompt") if name in columns}
    return PairColumns(
        options.chosen_key,
        options.rejected_key,
        options.prompt_key or ("prompt" if "prompt" in known else None),
        MARGIN if MARGIN in known else None,
        "tools" if "tools" in known else None,
        recognised_prompt=options.prompt_key is None,
    )


def read_pair(row: dict[str, Any], columns: PairColumns, where: str) -> PairRecord:
    """The checked record of one row; `where` begins every complaint."""
    prompt = None if columns.prompt is None else text_or_messages(row.get(columns.prompt), columns.prompt, where)
    chosen, rejected = (text_or_messages(row.get(name), name, where) for name in (columns.chosen, columns.rejected))
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise UserError(
            f"{where}: of the columns '{columns.chosen}' and '{columns.rejected}' one holds text and the other "
            "messages: give both the same form"
        )
    prompt, chosen, rejected = _without_repetition(prompt, chosen, rejected, columns.recognised_prompt)
    return PairRecord(
        prompt,
        chosen,
        rejected,
        _margin(row.get(columns.margin), where) if columns.margin else 0.0,
        read_tools(row.get(columns.tools), where) if columns.tools else None,
    )


def _without_repetition(
    prompt: str | list[Message] | None,
    chosen: str | list[Message],
    rejected: str | list[Message],
    recognised: bool,
) -> tuple[str | list[Message] | None, str | list[Message], str | list[Message]]:
    """Some data sets have a prompt column and repeat the prompt in both sides."""
    if not prompt:
        return prompt, chosen, rejected
    if isinstance(prompt, str) and isinstance(chosen, list) and isinstance(rejected, list):
        if chosen[0]["role"] != "assistant" and rejected[0]["role"] != "assistant":
            return None, chosen, rejected
        return prompt, chosen, rejected
    if isinstance(prompt, list) and isinstance(chosen, list):
        if chosen[: len(prompt)] == prompt == rejected[: len(prompt)]:
            return prompt, chosen[len(prompt) :], rejected[len(prompt) :]
        return prompt, chosen, rejected
    assert isinstance(chosen, str) and isinstance(rejected, str), "read_pair has checked that they are alike"
    if recognised and isinstance(prompt, str) and chosen.startswith(prompt) and rejected.startswith(prompt):
        return prompt, chosen[len(prompt) :], rejected[len(prompt) :]
    return prompt, chosen, rejected


def _margin(value: Any, where: str) -> float:
    if value is None:  # a source without margins in a mixture
        return 0.0
    if isinstance(value, str):  # as in a CSV file
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(f"{where}: column '{MARGIN}' holds {kind_of(value)}, a number is needed")
    return float(value)


def answer_starts(chosen: str, rejected: str) -> tuple[int, int] | None:
    """Where the answers of two whole texts begin, or None if the texts do not say it with "Assistant:".

    That is after the last one the texts share; or, where a person speaks again after it, after each text's own last.
    """
    mark = chosen.rfind(ANSWER_MARK, 0, common_length(chosen, rejected))
    if mark >= 0 and QUESTION_MARK not in chosen[mark:] and QUESTION_MARK not in rejected[mark:]:
        return (mark + len(ANSWER_MARK),) * 2
    marks = [text.rfind(ANSWER_MARK) for text in (chosen, rejected)]
    return None if min(marks) < 0 else (marks[0] + len(ANSWER_MARK), marks[1] + len(ANSWER_MARK))


def common_length(first: str, second: str) -> int:
    """How many characters two texts begin with in common."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def dialogue_messages(text: str) -> list[Message] | None:
    """The turns of a "\\n\\nHuman: ...\\n\\nAssistant: ..." text, or None if it is not one."""
    before, *parts = SPEAKER.split("\n\n" + text.lstrip("\n"))
    if before or not parts:
        return None
    messages: list[Message] = []
    for speaker, words in zip(parts[::2], parts[1::2]):
        role, content = ROLES[speaker], words.strip()
        if messages and messages[-1]["role"] == role:  # templates want the speakers to alternate
            messages[-1]["content"] += "\n\n" + content
        else:
            messages.append({"role": role, "content": content})
    return messages
