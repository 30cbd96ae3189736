"""What a row of judged steps is, and what its labels mean.

Either one text with a placeholder after every step and a list of labels (`--input_key`, `--label_key`), or a prompt,
a list of steps and a list of labels (`prompt`, `completions`, `labels`), which becomes such a text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from trimtab.data.chat import Rendering
from trimtab.data.formats import DEFAULT_INPUT_KEY, kind_of, require_columns
from trimtab.errors import UserError

DEFAULT_LABEL_KEY = "label"
SIGNS = {"+": 1.0, "-": 0.0}


class StepFormatOptions(Protocol):
    @property
    def input_key(self) -> str: ...

    @property
    def label_key(self) -> str: ...


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


def recognise_steps(columns: Sequence[str], options: StepFormatOptions) -> StepColumns:
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
