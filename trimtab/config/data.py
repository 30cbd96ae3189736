"""Groups of options that say which rows are used and how they are read. Like groups.py."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trimtab.config.option import Options, option, required
from trimtab.config.sources import check_mixture, check_sources


@dataclass(frozen=True, kw_only=True)
class CountOptions(Options):
    """Data"""

    max_samples: int = option(1_000_000, at_least=1)
    """At most this many rows are used; in training, to train on."""


@dataclass(frozen=True, kw_only=True)
class RowOptions(CountOptions):
    """Data"""

    eval_dataset: str | None = None
    """Data for evaluation; unset: the training source's test split, if it has one (RL: none)."""
    eval_split: str = option("train", needs="eval_dataset")
    """Split of --eval_dataset."""
    eval_max_samples: int | None = option(None, at_least=1)
    """At most this many rows are used to evaluate with; unset: all."""
    num_workers: int | None = option(None, at_least=1)
    """Processes that tokenise; unset: one per core, at most 8."""

    def check(self) -> Iterable[str]:
        return check_sources(self.eval_dataset, "--eval_dataset")


@dataclass(frozen=True, kw_only=True)
class LengthOptions(Options):
    """Data"""

    max_len: int = option(2048, at_least=1)
    """At most this many tokens in a sample, prompt and answer together."""


@dataclass(frozen=True, kw_only=True)
class PromptLengthOptions(Options):
    """Data"""

    prompt_max_len: int = option(1024, at_least=1)
    """At most this many tokens in a prompt; rows with longer ones are left out, and counted."""


@dataclass(frozen=True, kw_only=True)
class SourceOptions(Options):
    """Data"""

    dataset: str = required("DATA", "a file, a folder or a hub name")
    """Hub names, files (json, jsonl, csv, parquet, arrow, .py) or folders, separated by commas; type@folder for the
    files of one type in a folder."""
    dataset_probs: str | None = None
    """Share of each source, separated by commas; unset: the sources are concatenated."""
    dataset_split: str = "train"
    """Split to use."""

    def check(self) -> Iterable[str]:
        return check_mixture(self.dataset, self.dataset_probs, "--dataset") if self.dataset else ()


@dataclass(frozen=True, kw_only=True)
class DataOptions(SourceOptions, RowOptions, LengthOptions):
    """Data"""


@dataclass(frozen=True, kw_only=True)
class ChatTemplateOptions(Options):
    """Conversations"""

    tokenizer_chat_template: str | None = None
    """Jinja chat template, or a file that holds one, to use instead of the tokenizer's own."""


@dataclass(frozen=True, kw_only=True)
class TemplateOptions(ChatTemplateOptions):
    """Conversations"""

    input_template: str | None = None
    """Text with {} where the prompt goes, used when no chat template is; None switches it off."""
    apply_chat_template: bool = False
    """Render conversations with the tokenizer's chat template; a plain string becomes one user turn."""

    def settle(self, changes: dict[str, Any]) -> Iterable[str]:
        if self.input_template is None or "{}" in self.input_template:
            return ()
        changes["input_template"] = None
        return ["--input_template has no {} for the prompt, so it is left out"]

    def check(self) -> Iterable[str]:
        if self.apply_chat_template:
            return self.idle(["input_template"], "beside --apply_chat_template")
        if self.input_template and "\\n" in self.input_template:
            return [r"--input_template holds a backslash and an n, not a new line: in bash write $'...\n...'"]
        return ()


@dataclass(frozen=True, kw_only=True)
class InputColumn(Options):
    """Conversations"""

    input_key: str = "input"
    """Column that holds the prompt, the messages or the text."""


@dataclass(frozen=True, kw_only=True)
class OutputColumn(Options):
    """Conversations"""

    output_key: str | None = None
    """Column that holds the answer; unset: the answer is the last turn of the input."""


@dataclass(frozen=True, kw_only=True)
class ConversationOptions(InputColumn, OutputColumn, TemplateOptions):
    """Conversations"""


@dataclass(frozen=True, kw_only=True)
class LabelColumn(Options):
    """Conversations"""

    label_key: str = "label"
    """Column that holds the judgement: of a whole answer 1 or 0, of an answer in steps a list with one label a
    step."""


@dataclass(frozen=True, kw_only=True)
class PreferenceColumns(Options):
    """Conversations"""

    prompt_key: str | None = None
    """Column that holds the prompt both answers share; unset: each answer column holds the whole conversation."""
    chosen_key: str = "chosen"
    """Column that holds the preferred answer or conversation."""
    rejected_key: str = "rejected"
    """Column that holds the other one."""
