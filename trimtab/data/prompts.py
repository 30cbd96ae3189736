"""Prompts to sample answers to: rendered up to where the answer begins, with what their rows hold for the reward.

A prompt longer than `--prompt_max_len` is left out and counted: half a question has another answer. Only where
`--truncate_prompts` asks for it, its first tokens are kept.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trimtab.config.jobs import GenerateOptions
from trimtab.config.rl_jobs import RLOptions
from trimtab.data.chat_template import in_template
from trimtab.data.conversion import conditioned
from trimtab.data.data_files import SelectedRows, locations_of
from trimtab.data.dataset import (
    Arrays,
    DataReport,
    beginnings,
    build_dataset,
    content_hash,
    count_shared,
    first_row,
    rows_hash,
    settings_of,
    workers_of,
)
from trimtab.data.formats import (
    DEFAULT_INPUT_KEY,
    SOURCE_COLUMN,
    Message,
    Rendering,
    own_columns,
    read_tools,
    require_columns,
    text_or_messages,
)
from trimtab.data.rendering import AnswerRenderer, as_messages, tokenize_renderings
from trimtab.data.sources import load_rows
from trimtab.errors import UserError

SOURCE_COLUMNS = ("datasource", "data_source", SOURCE_COLUMN)  # the first that says something


PADDLE_LABEL = "tgt"


@dataclass(frozen=True)
class PromptSettings:
    """The options that the tokens depend on."""

    input_key: str
    input_template: str | None
    apply_chat_template: bool
    prompt_max_len: int
    condition: str | None = None
    """Words that follow every prompt and ask for a reward (see post_processing.py)."""
    truncate_prompts: bool = False
    """Prompts that are too long keep their first tokens."""


@dataclass
class PromptReport(DataReport):
    rows_unlabelled: int = 0
    """Kept prompts whose column of --label_key holds nothing."""
    first_unlabelled: str = ""
    """Where the first of them stands."""
    template_unused: bool = False
    """The prompts are text, the model has a chat template, and no option says whether to apply it."""

    noun: ClassVar[str] = "prompts"

    def lines(self) -> list[str]:
        text = [
            f"{self.what} data: {self.rows_kept:,} of {self.in_files:,} {self.noun} ({self.layout}), "
            f"{self.tokens:,} tokens",
            "lengths: " + ", ".join(f"{name} {value:,}" for name, value in self.lengths.items()),
        ]
        text += [*self.beyond_limit(), *self.seen_in_training()]
        if self.rows_over_long:
            text.append(
                f"{self.rows_over_long:,} {self.noun} left out: more than {self.max_len:,} tokens (--prompt_max_len)"
            )
        if self.rows_truncated:
            text.append(
                f"{self.rows_truncated:,} {self.noun} cut to their first {self.max_len:,} tokens (--truncate_prompts): "
                "they lack their end"
            )
        if self.rows_empty:
            text.append(f"{self.rows_empty:,} {self.noun} left out: empty")
        if self.rows_unlabelled:
            text.append(f"{self.rows_unlabelled:,} {self.noun} have no label (the first: {self.first_unlabelled})")
        if self.template_unused:
            text.append(
                "note: the prompts are text and the model reads them as they stand; it has a chat template, which "
                "--apply_chat_template would put around them"
            )
        return text


@dataclass(frozen=True)
class PromptTokens:
    """N prompts, one after another: as tokens, as UTF-8 text, and which row of the data each is."""

    ids: np.ndarray
    offsets: np.ndarray
    text: np.ndarray
    text_offsets: np.ndarray
    rows: np.ndarray

    @functools.cached_property
    def fingerprint(self) -> str:
        return content_hash(self.ids, self.offsets, self.text, self.text_offsets, self.rows)


class PromptDataset:
    """N prompts and their rows."""

    def __init__(self, tokens: PromptTokens, rows: Dataset, input_key: str, label_key: str | None):
        self._tokens, self.rows = tokens, rows.select(tokens.rows)
        self._places = SelectedRows(locations_of(rows, "the data"), tokens.rows)
        self.input_key, self._label_key = input_key, label_key
        self.column_names = own_columns(rows.column_names)
        self._others = [name for name in self.column_names if name != input_key]
        self._row = functools.lru_cache(4096)(self.rows.__getitem__)  # the answers to a prompt come close together

    def __len__(self) -> int:
        return len(self._tokens.rows)

    @property
    def kept(self) -> np.ndarray:
        """Which rows of the data it was built from are prompts."""
        return self._tokens.rows

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the prompts and of all that their rows hold; what a file is called does not matter."""
        rows = self.rows.select_columns(self.column_names)
        return content_hash(of=self._tokens.fingerprint + rows_hash(rows))

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        return np.diff(self._tokens.offsets)

    def beginnings(self) -> Iterator[bytes]:
        """Every prompt, to be compared with others'."""
        return beginnings(self._tokens.ids, self._tokens.offsets)

    @property
    def largest_token(self) -> int:
        return int(self._tokens.ids.max())

    def ids(self, index: int) -> list[int]:
        return _piece(self._tokens.ids, self._tokens.offsets, index).tolist()

    def text(self, index: int) -> str:
        """The prompt as the model reads it."""
        return _piece(self._tokens.text, self._tokens.text_offsets, index).tobytes().decode()

    def prompt(self, index: int) -> str | list[Message]:
        """The prompt as its row holds it, without template and condition."""
        value = the_one_text(self._row(index)[self.input_key])
        return text_or_messages(value, self.input_key, f"prompt {index + 1}")

    def label(self, index: int) -> Any:
        """What `--label_key` names, or None. In PaddleNLP's rows it may be a list of one text, as the prompt may."""
        if self._label_key is None:
            return None
        row = self._row(index)
        label, prompt = row[self._label_key], row[self.input_key]
        as_list = self._label_key == PADDLE_LABEL or the_one_text(prompt) is not prompt
        return the_one_text(label) if as_list else label

    def unlabelled(self) -> list[int]:
        """The prompts without a label, neither in that column nor, as in verl's data, in `reward_model`."""
        known = [name for name in (self._label_key, "reward_model") if name in self.column_names]
        if not known:  # a dataset without columns has no rows to look at
            return list(range(len(self)))
        return [i for i, row in enumerate(self.rows.select_columns(known)) if _truth(row, known) is None]

    def place(self, index: int) -> str:
        """Where the prompt stands in the user's files."""
        return self._places.names([index])[0]

    def columns(self, index: int) -> dict[str, Any]:
        """The row without its prompt."""
        row = self._row(index)
        return {name: row[name] for name in self._others}

    def source(self, index: int) -> str:
        """Where the prompt comes from: the row's own word for it, or the file's or data set's name."""
        row = self._row(index)
        return next((str(row[name]) for name in SOURCE_COLUMNS if row.get(name) is not None), "")


def the_one_text(value: Any) -> Any:
    """PaddleNLP's rows: a list of one text is that text."""
    return value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str) else value


def _truth(row: dict[str, Any], names: Sequence[str]) -> Any:
    for name in names:
        value = row[name]
        if isinstance(value, dict) and (name == "reward_model" or "ground_truth" in value):
            value = value.get("ground_truth")
        if value is not None:
            return value
    return None


def _piece(values: np.ndarray, offsets: np.ndarray, index: int) -> np.ndarray:
    if not 0 <= index < len(offsets) - 1:
        raise IndexError(f"no prompt {index} among {len(offsets) - 1}")
    return values[offsets[index] : offsets[index + 1]]


PromptDatasets = tuple[dict[str, "PromptDataset"], dict[str, PromptReport]]


def load_prompt_datasets(options: RLOptions, tokenizer: PreTrainedTokenizerBase) -> PromptDatasets:
    """The prompts to train on ("train") and, where --eval_dataset is given, those to measure with ("evaluation")."""
    return build_prompt_datasets(load_prompt_rows(options), tokenizer, options)


def load_prompt_rows(options: RLOptions) -> dict[str, Dataset]:
    found = {
        "train": load_rows(
            options.prompt_data,
            probabilities=options.prompt_data_probs,
            split=options.prompt_split,
            max_samples=options.max_samples,
            flag="--prompt_data",
            seed=options.seed,
            name_sources=True,
        )
    }
    if options.eval_dataset:
        found["evaluation"] = load_rows(
            options.eval_dataset,
            probabilities=None,
            split=options.eval_split,
            max_samples=options.eval_max_samples,
            flag="--eval_dataset",
            seed=options.seed,
            name_sources=True,
        )
    return found


def build_prompt_datasets(
    found: dict[str, Dataset], tokenizer: PreTrainedTokenizerBase, options: RLOptions
) -> PromptDatasets:
    built = {what: build_prompt_dataset(rows, tokenizer, options, what=what) for what, rows in found.items()}
    stores = {what: store for what, (store, _) in built.items()}
    reports = {what: report for what, (_, report) in built.items()}
    if "evaluation" in stores:
        shared = count_shared(stores["train"].beginnings(), stores["evaluation"].beginnings())
        reports["evaluation"].rows_also_trained = shared
    return stores, reports


def build_prompt_dataset(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    options: RLOptions | GenerateOptions,
    *,
    what: str = "train",
    workers: int | None = None,
) -> tuple[PromptDataset, PromptReport]:
    """Renders and tokenises the rows, or finds the result of the same work in the cache."""
    settings = settings_of(PromptSettings, options)
    first = first_row(rows, what)
    input_key = input_column(rows.column_names, settings.input_key)
    require_columns(rows.column_names, {"--label_key": options.label_key})
    renderer = PromptRenderer(input_key, rows.column_names, tokenizer, settings, what)
    report = PromptReport(what, f"column {input_key}", rows_read=len(rows), max_len=settings.prompt_max_len)
    tokens, report = build_dataset(
        "prompts",
        rows,
        renderer,
        PromptCollector(tokenizer, settings, report),
        lambda arrays: PromptTokens(**arrays),
        settings,
        **workers_of(options, workers),
    )
    plain = isinstance(the_one_text(first[input_key]), str) and not settings.apply_chat_template
    report.template_unused = plain and settings.input_template is None and tokenizer.chat_template is not None
    store = PromptDataset(tokens, rows, input_key, options.label_key)
    if options.label_key is not None and (missing := store.unlabelled()):
        report.rows_unlabelled, report.first_unlabelled = len(missing), store.place(missing[0])
    return store, report


def input_column(columns: Sequence[str], wanted: str) -> str:
    """The column of --input_key; where that is not set, `prompt` will do as well."""
    if wanted == DEFAULT_INPUT_KEY and wanted not in columns and "prompt" in columns:
        return "prompt"
    require_columns(columns, {"--input_key": wanted})
    return wanted


class PromptRenderer(AnswerRenderer):
    """Rows as text that ends where the answer begins."""

    def __init__(
        self,
        input_key: str,
        columns: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        settings: PromptSettings,
        what: str,
    ):
        names = [input_key, *(["tools"] if "tools" in columns else [])]
        super().__init__(
            names, tokenizer, what, as_chat=settings.apply_chat_template, input_template=settings.input_template
        )
        self.input_key, self.condition = input_key, settings.condition

    def render(self, row: dict[str, Any], where: str) -> Rendering | None:
        prompt = text_or_messages(the_one_text(row[self.input_key]), self.input_key, where)
        if not prompt:
            return None
        if isinstance(prompt, str) and not self.as_chat:
            return Rendering(conditioned(in_template(prompt, self.input_template), self.condition))
        messages = conditioned(as_messages(prompt, "user"), self.condition)
        if messages[-1]["role"] == "assistant":
            raise UserError(
                f"{where}: column '{self.input_key}' ends with the assistant's turn, which is the policy's to write"
            )
        return Rendering(self.chat.render_prompt(messages, tools=read_tools(row.get("tools"), where), where=where))


class PromptCollector:
    """Takes renderings, chunk by chunk, and keeps the prompts that are neither empty nor too long."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: PromptSettings, report: PromptReport):
        self.tokenizer, self.report = tokenizer, report
        self.max_len, self.cuts = settings.prompt_max_len, settings.truncate_prompts
        self._seen = 0
        self._rows: list[int] = []
        self._ids: list[np.ndarray] = []
        self._texts: list[bytes] = []

    def add(self, renderings: list[Rendering | None]) -> None:
        present = [(place, rendering) for place, rendering in enumerate(renderings) if rendering is not None]
        tokenised = tokenize_renderings([rendering for _, rendering in present], self.tokenizer)
        for (place, rendering), (ids, _) in zip(present, tokenised):
            text = rendering.text
            if len(ids) > self.max_len and self.cuts:
                self.report.rows_truncated += 1
                ids = ids[: self.max_len]
                text = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            if len(ids) > self.max_len:
                self.report.rows_over_long += 1
            elif len(ids):
                self._rows.append(self._seen + place)
                self._ids.append(ids)
                self._texts.append(text.encode())
        self._seen += len(renderings)

    def finish(self) -> Arrays:
        report = self.report
        report.rows_kept = len(self._rows)
        report.rows_empty = self._seen - report.rows_kept - report.rows_over_long
        if not self._rows:
            raise UserError(
                f"no prompt of the {report.what} data is left: of {report.rows_read:,}, {report.rows_over_long:,} have "
                f"more than {self.max_len:,} tokens (raise --prompt_max_len), {report.rows_empty:,} are empty"
            )
        ids, offsets = _flat(self._ids)
        text, text_offsets = _flat([np.frombuffer(text, dtype=np.uint8) for text in self._texts])
        report.count(np.zeros(len(ids), dtype=bool), np.diff(offsets))
        rows = np.array(self._rows, dtype=np.int64)
        return {"ids": ids, "offsets": offsets, "text": text, "text_offsets": text_offsets, "rows": rows}


def _flat(pieces: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """All of them one after another, and where each begins."""
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    return np.concatenate(pieces), np.concatenate([np.zeros(1, dtype=np.int64), ends])
