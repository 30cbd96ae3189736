"""What a row is: which columns carry the prompt and the response, and the checked record they become.

Key options name columns. Without them the layouts that other tools write are recognised by their columns: `messages`,
`conversations` (from/value or role/content), `prompt` + `completion`, `text`.
"""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from trimtab.errors import UserError

SOURCE_COLUMN = "trimtab_source"
"""Which source a row is from, where there may be several."""
DEFAULT_INPUT_KEY = "input"
DEFAULT_OUTPUT_KEYS = (None, "output")  # of different jobs
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"}

Message = dict[str, Any]


@dataclass(frozen=True)
class Rendering:
    """A text and the half-open character spans of it that carry loss, in order."""

    text: str
    trained: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class SupervisedKeys:
    """The options that say where a supervised row keeps its parts."""

    input_key: str
    output_key: str | None
    pretrain_mode: bool = False


@dataclass(frozen=True, kw_only=True)
class SupervisedSettings(SupervisedKeys):
    """The options that the tokens of supervised rows depend on. A job may lack those with a default."""

    input_template: str | None
    apply_chat_template: bool
    max_len: int
    multiturn: bool = False


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


def find_supervised_columns(
    columns: Sequence[str], options: SupervisedKeys, first_row: dict[str, Any] | None = None
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


# ---- What a preference row is: a prompt with two answers, or two whole conversations or texts
#
# The prompt's column is the one `--prompt_key` names, or `prompt`. Without any, the two sides hold everything:
# message lists, whose last assistant turn is the answer, or texts such as "\n\nHuman: ...\n\nAssistant: ...".


MARGIN = "margin"
ANSWER_MARK = "\n\nAssistant:"
QUESTION_MARK = "\n\nHuman:"
SPEAKER = re.compile(r"\n\n(Human|Assistant): ?")
ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True)
class PairSettings:
    """The options that the tokens of pairs depend on."""

    prompt_key: str | None
    chosen_key: str
    rejected_key: str
    input_template: str | None
    apply_chat_template: bool
    max_len: int


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


def find_pair_columns(columns: Sequence[str], options: PairSettings) -> PairColumns:
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


# ---- What a row of judged steps is, and what its labels mean
#
# Either one text with a placeholder after every step and a list of labels (`--input_key`, `--label_key`), or a
# prompt, a list of steps and a list of labels (`prompt`, `completions`, `labels`), which becomes such a text.


DEFAULT_LABEL_KEY = "label"
SIGNS = {"+": 1.0, "-": 0.0}


@dataclass(frozen=True)
class StepSettings:
    """The options that the tokens of judged steps depend on."""

    input_key: str
    label_key: str
    placeholder_token: str
    reward_tokens: Sequence[str] | None
    max_len: int


@dataclass(frozen=True)
class StepColumns:
    """Where a row keeps its parts; without `steps` the placeholders are in the text already."""

    text: str
    labels: str
    steps: str | None = None

    @property
    def names(self) -> list[str]:
        return [name for name in (self.text, self.steps, self.labels) if name is not None]

    @property
    def description(self) -> str:
        return "columns " + " + ".join(self.names)


def find_step_columns(columns: Sequence[str], options: StepSettings) -> StepColumns:
    keys = {"--input_key": options.input_key, "--label_key": options.label_key}
    asked = (options.input_key, options.label_key) != (DEFAULT_INPUT_KEY, DEFAULT_LABEL_KEY)
    if asked or all(name in columns for name in keys.values()):
        require_columns(columns, keys)
        return StepColumns(options.input_key, options.label_key)
    if {"prompt", "completions", "labels"} <= set(columns):
        return StepColumns("prompt", "labels", "completions")
    raise UserError(
        f"no columns '{options.input_key}' (--input_key) and '{options.label_key}' (--label_key) in the data, nor "
        f"prompt + completions + labels: found {', '.join(columns)}"
    )


def read_steps(row: dict[str, Any], columns: StepColumns, placeholder: str, where: str) -> tuple[Rendering, list[Any]]:
    """The text with its placeholders as spans, and the labels as they are in the row."""
    text, labels = row.get(columns.text), row.get(columns.labels)
    if not isinstance(text, str):
        raise UserError(f"{where}: column '{columns.text}' holds {kind_of(text)}, text is needed")
    if not isinstance(labels, list):
        raise UserError(f"{where}: column '{columns.labels}' holds {kind_of(labels)}, a list of labels is needed")
    if columns.steps is None:
        return Rendering(text, _occurrences(text, placeholder)), labels
    steps = row.get(columns.steps)
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise UserError(f"{where}: column '{columns.steps}' holds {kind_of(steps)}, a list of texts is needed")
    if len(steps) != len(labels):
        raise UserError(f"{where}: {len(labels)} labels for {len(steps)} steps, there must be one for each")
    spans = []
    for step in steps:
        text += step
        spans.append((len(text), len(text) + len(placeholder)))
        text += placeholder
    return Rendering(text, spans), labels


def _occurrences(text: str, word: str) -> list[tuple[int, int]]:
    spans = []
    start = text.find(word)
    while start >= 0:
        spans.append((start, start + len(word)))
        start = text.find(word, start + len(word))
    return spans


def one_token(text: str, tokenizer: PreTrainedTokenizerBase, what: str) -> int:
    """The id of a text that must be exactly one token; `what` ("--placeholder_token") begins the complaint."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise UserError(f"{what} '{text}' is {len(ids)} tokens of this tokenizer: choose a text that is exactly one")
    return ids[0]


def reward_token_ids(reward_tokens: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of `--reward_tokens`, positive first."""
    ids = [one_token(token, tokenizer, "--reward_tokens") for token in reward_tokens]
    if len(set(ids)) < max(len(ids), 2):
        raise UserError(f"--reward_tokens {' '.join(reward_tokens)}: at least two different tokens are needed")
    return ids


class LabelReader:
    """What a label in the data asks of the model.

    Two reward tokens: the probability of the first, 1 or 0 for a label that is certain. More: the number of the reward
    token. None: the id of the label's own token.
    """

    def __init__(self, reward_tokens: Sequence[str] | None, tokenizer: PreTrainedTokenizerBase):
        self.reward_tokens = list(reward_tokens) if reward_tokens else None
        self.tokenizer = tokenizer
        self._known: dict[str, float] = {}
        if self.reward_tokens:
            reward_token_ids(self.reward_tokens, tokenizer)
            numbers = {token: float(number) for number, token in enumerate(self.reward_tokens)}
            binary = len(numbers) == 2
            self._known = {**SIGNS, **{token: 1.0 - n for token, n in numbers.items()}} if binary else numbers

    def __call__(self, label: Any, where: str) -> float:
        if isinstance(label, str):
            return self._word(label, where)
        if self.reward_tokens is None:
            raise UserError(f"{where}: a label is {kind_of(label)}: say what it stands for with --reward_tokens")
        if not isinstance(label, (bool, int, float)) or not 0 <= label <= 1:
            raise UserError(f"{where}: a label is {kind_of(label)}, a reward token or a number from 0 to 1 is needed")
        if len(self.reward_tokens) != 2:
            raise UserError(f"{where}: a label is {kind_of(label)}, which needs exactly two --reward_tokens")
        return float(label)

    def _word(self, label: str, where: str) -> float:
        if label not in self._known:
            if self.reward_tokens:
                choice = " ".join(self.reward_tokens)
                raise UserError(f"{where}: label '{label}' is none of --reward_tokens {choice}")
            self._known[label] = float(one_token(label, self.tokenizer, f"{where}: label"))
        return self._known[label]
