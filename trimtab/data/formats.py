"""What a row is: which columns carry the prompt and the response, and the checked record they become.

Key options name columns. Without them the layouts that other tools write are recognised by their columns: `messages`,
`conversations` (from/value or role/content), `prompt` + `completion`, `text`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trimtab.errors import UserError

SOURCE_COLUMN = "trimtab_source"
"""Which source a row is from, where there may be several."""
DEFAULT_INPUT_KEY = "input"
DEFAULT_OUTPUT_KEYS = (None, "output")  # of different jobs
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"}

Message = dict[str, Any]


class FormatOptions(Protocol):
    @property
    def input_key(self) -> str: ...

    @property
    def output_key(self) -> str | None: ...

    @property
    def pretrain_mode(self) -> bool: ...


@dataclass(frozen=True)
class SupervisedColumns:
    """Where a supervised row keeps its parts, and how its strings are meant."""

    prompt: str
    response: str | None = None
    tools: str | None = None
    whole_text: bool = False
    """Loss on every token: language modelling, `--pretrain_mode`."""
    literal: bool = False
    """Strings of a recognised layout are the text itself: the default `--input_template` is not put around them."""
    description: str = ""

    @property
    def names(self) -> list[str]:
        return [name for name in (self.prompt, self.response, self.tools) if name is not None]


@dataclass(frozen=True)
class SupervisedRecord:
    """One row, checked: strings or lists of role/content messages."""

    prompt: str | list[Message]
    response: str | list[Message] | None
    tools: list[Any] | None = None


def recognise_supervised(
    columns: Sequence[str], options: FormatOptions, first_row: dict[str, Any] | None = None
) -> SupervisedColumns:
    """Decides from the key options and the columns (and, for the default key, the first row) what the rows are."""
    found = ", ".join(columns)
    tools = "tools" if "tools" in columns else None
    whole = options.pretrain_mode
    asked = options.input_key != DEFAULT_INPUT_KEY or options.output_key not in DEFAULT_OUTPUT_KEYS
    has_default = options.input_key in columns

    def keyed(response: str | None) -> SupervisedColumns:
        text = f"columns {options.input_key} + {response}" if response else f"column {options.input_key}"
        return SupervisedColumns(options.input_key, response, tools, whole, description=text)

    if asked:
        require_columns(columns, {"--input_key": options.input_key})
        is_conversation = isinstance((first_row or {}).get(options.input_key), list)
        if is_conversation and options.output_key == "output" and "output" not in columns:
            return keyed(None)
        require_columns(columns, {"--output_key": options.output_key})
        return keyed(options.output_key)
    if has_default and options.output_key in columns:
        return keyed(options.output_key)
    if has_default and (whole or isinstance((first_row or {}).get(options.input_key), list)):
        return keyed(None)
    for name in ("messages", "conversations"):
        if name in columns:
            return SupervisedColumns(name, None, tools, whole, description=f"conversations in column {name}")
    if "prompt" in columns and "completion" in columns:
        return SupervisedColumns("prompt", "completion", tools, whole, True, "columns prompt + completion")
    if "text" in columns:
        return SupervisedColumns("text", None, None, True, True, "language modelling on column text")
    if has_default:
        raise UserError(
            f"column '{options.input_key}' alone says nothing to answer: name the response column with --output_key, "
            f"or train on all its text with --pretrain_mode (columns found: {found})"
        )
    raise UserError(
        f"no column '{options.input_key}' (--input_key) in the data, and none of the known layouts (messages; "
        f"conversations; prompt + completion; text): found {found}"
    )


def require_columns(columns: Sequence[str], keys: Mapping[str, str | None]) -> None:
    """`keys` are the columns that options name, by flag."""
    for flag, name in keys.items():
        if name is not None and name not in columns:
            raise UserError(f"no column '{name}' ({flag}) in the data: found {', '.join(own_columns(columns))}")


def own_columns(columns: Sequence[str]) -> list[str]:
    """The columns that the data came with."""
    return [name for name in columns if name != SOURCE_COLUMN]


def read_supervised(row: dict[str, Any], columns: SupervisedColumns, where: str) -> SupervisedRecord:
    """The checked record of one row; `where` ("row 7 of the training data") begins every complaint."""
    prompt = text_or_messages(row.get(columns.prompt), columns.prompt, where)
    response = None
    if columns.response is not None:
        response = text_or_messages(row.get(columns.response), columns.response, where)
        if isinstance(response, list) and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, str) and not columns.whole_text:
        raise UserError(
            f"{where}: column '{columns.prompt}' holds plain text and there is no response: name its column with "
            "--output_key, or train on all of it with --pretrain_mode"
        )
    return SupervisedRecord(prompt, response, read_tools(row.get(columns.tools), where) if columns.tools else None)


def text_or_messages(value: Any, column: str, where: str) -> str | list[Message]:
    """A string as it is, a conversation (or one message) as a checked list."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        value = [value]
    if isinstance(value, list):
        if not value:
            raise UserError(f"{where}: column '{column}' holds an empty conversation")
        return [_message(message, column, number, where) for number, message in enumerate(value, start=1)]
    raise UserError(f"{where}: column '{column}' holds {kind_of(value)}, text or a list of messages is needed")


def _message(message: Any, column: str, number: int, where: str) -> Message:
    here = f"{where}: message {number} of column '{column}'"
    if not isinstance(message, dict):
        raise UserError(f"{here} is {kind_of(message)}, an object with role and content is needed")
    # Columnar storage fills the keys other messages have with None; templates must not see those.
    message = {key: value for key, value in message.items() if value is not None}
    if "role" not in message and "from" in message:
        speaker = message.pop("from")
        message = {"role": SHAREGPT_ROLES.get(speaker, speaker), "content": message.pop("value", None), **message}
    if not isinstance(message.get("role"), str):
        raise UserError(f"{here} has no role (keys found: {', '.join(message) or 'none'})")
    content = message.get("content")
    if content is None and "tool_calls" in message:
        message["content"] = ""
    elif not isinstance(content, (str, list)):
        raise UserError(f"{here} ({message['role']}) holds {kind_of(content)} as content, text is needed")
    return message


def read_tools(value: Any, where: str) -> list[Any] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: column 'tools' is not valid JSON ({error.msg})") from None
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise UserError(f"{where}: column 'tools' holds {kind_of(value)}, a list of tool descriptions is needed")
    return value


def kind_of(value: Any) -> str:
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return f"a truth value ({value})"
    if isinstance(value, (int, float)):
        return f"a number ({value})"
    known: dict[type, str] = {str: "a string", list: "a list", dict: "an object"}
    return known.get(type(value), f"a {type(value).__name__}")
