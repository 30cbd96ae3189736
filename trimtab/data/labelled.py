"""Answers labelled desirable or not, for KTO."""

import functools
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trimtab.data.building import (
    Arrays,
    Collector,
    build_store,
    first_row,
    settings_of,
    up_to_answer,
    without_first,
    workers_of,
)
from trimtab.data.chat import Rendering
from trimtab.data.data_report import LabelledReport
from trimtab.data.formats import (
    SupervisedColumns,
    kind_of,
    read_supervised,
    recognise_supervised,
    require_columns,
)
from trimtab.data.places import places_of
from trimtab.data.rendering import SupervisedRenderer
from trimtab.data.token_store import TokenStore, content_hash
from trimtab.data.tokenising import tokenise
from trimtab.errors import UserError

TRUTHS = {"1": True, "true": True, "0": False, "false": False}


class LabelledOptions(Protocol):
    """`num_workers` may be there too."""

    @property
    def input_key(self) -> str: ...

    @property
    def output_key(self) -> str | None: ...

    @property
    def label_key(self) -> str: ...

    @property
    def input_template(self) -> str | None: ...

    @property
    def apply_chat_template(self) -> bool: ...

    @property
    def max_len(self) -> int: ...


@dataclass(frozen=True)
class LabelledSettings:
    """The options that the tokens depend on."""

    input_key: str
    output_key: str | None
    label_key: str
    input_template: str | None
    apply_chat_template: bool
    max_len: int
    multiturn: bool = False
    pretrain_mode: bool = False


@dataclass(frozen=True)
class LabelledStore:
    """N answers to prompts, each sequence ending with its answer's last token."""

    sequences: TokenStore
    labels: np.ndarray
    """bool: whether the answer is desirable."""
    max_len: int
    fingerprint: str = ""
    """Hash of the content; computed when not given."""

    def __post_init__(self) -> None:
        if not self.fingerprint:
            object.__setattr__(self, "fingerprint", content_hash(self.labels, of=self.sequences.fingerprint))

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> np.ndarray:
        return self.sequences.lengths

    @functools.cached_property
    def answer_starts(self) -> np.ndarray:
        """Where each sequence's first trained token is; what comes before is the prompt."""
        marked = np.flatnonzero(self.sequences.trained)
        begins = self.sequences.offsets[:-1]
        return marked[np.searchsorted(marked, begins)] - begins

    def example(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, trained) of one sequence."""
        return self.sequences.example(index)

    def mismatched(self, prompt: int, answer: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, trained) of the prompt of one example followed by the answer of another, cut to `max_len`."""
        prompt_ids, _ = self.example(prompt)
        answer_ids, trained = self.example(answer)
        # A kept example has an answer within max_len, so its prompt leaves room for a token at least.
        end, start = int(self.answer_starts[prompt]), int(self.answer_starts[answer])
        ids = np.concatenate([prompt_ids[:end], answer_ids[start:]])
        trained = np.concatenate([np.zeros(end, dtype=bool), trained[start:]])
        return ids[: self.max_len], trained[: self.max_len]


def build_labelled_store(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    options: LabelledOptions,
    *,
    what: str = "train",
    workers: int | None = None,
) -> tuple[LabelledStore, LabelledReport]:
    """Renders, tokenises and truncates the rows, or finds the result of the same work in the cache."""
    settings = settings_of(LabelledSettings, options)
    first = first_row(rows, what)
    require_columns(rows.column_names, {"--label_key": settings.label_key})
    _check_every_label(rows, settings.label_key, what)
    columns = recognise_supervised(rows.column_names, settings, first)
    if columns.whole_text:
        raise UserError(
            f"column '{columns.prompt}' holds texts without an answer that the label could be about: name the columns "
            f"with --input_key and --output_key (found: {', '.join(rows.column_names)})"
        )
    renderer = LabelledRenderer(columns, tokenizer, settings, what)
    layout = f"{columns.description}, labels in {settings.label_key}"
    report = LabelledReport(what, layout, rows_read=len(rows), max_len=settings.max_len)
    collector = LabelledCollector(tokenizer, settings.max_len, report)

    def store_of(arrays: Arrays) -> LabelledStore:
        labels = arrays["labels"]
        sequences = TokenStore.of(arrays)
        return LabelledStore(sequences, labels, settings.max_len)

    return build_store("labelled", rows, renderer, collector, store_of, settings, **workers_of(options, workers))


def _check_every_label(rows: Dataset, label_key: str, what: str) -> None:
    missing = [number for number, label in enumerate(rows[label_key]) if label is None]
    if missing:
        first = places_of(rows, f"the {what} data").names(missing[:1])[0]
        raise UserError(
            f"{first}: column '{label_key}' holds nothing (null), and so it does in {len(missing):,} of {len(rows):,} "
            "rows; true or false (or 1 or 0) is needed"
        )


class LabelledRenderer(SupervisedRenderer):
    """Supervised rows with a label. An empty answer is an answer too: one can wish not to see it."""

    def __init__(
        self,
        columns: SupervisedColumns,
        tokenizer: PreTrainedTokenizerBase,
        settings: LabelledSettings,
        what: str,
    ):
        super().__init__(columns, tokenizer, settings, what)
        self.label_key = settings.label_key
        self.names = [*self.names, settings.label_key]

    def render(self, row: dict[str, Any], where: str) -> tuple[Rendering, bool]:
        record = read_supervised(row, self.columns, where)
        label = _desirable(row.get(self.label_key), self.label_key, where)
        return self.render_answer(record.prompt, record.response, record.tools, where), label


def _desirable(value: Any, column: str, where: str) -> bool:
    if isinstance(value, str):  # as in a CSV file
        value = TRUTHS.get(value.strip().lower(), value)
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    raise UserError(f"{where}: column '{column}' holds {kind_of(value)}, true or false (or 1 or 0) is needed")


class LabelledCollector(Collector[LabelledReport]):
    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_len: int, report: LabelledReport):
        super().__init__(tokenizer, max_len, report)
        self._labels: list[bool] = []

    def add_present(self, renderings: list[tuple[Rendering, bool]]) -> None:
        tokenised = tokenise([rendering for rendering, _ in renderings], self.tokenizer)
        for (_, label), (ids, trained) in zip(renderings, tokenised):
            if self.keep(up_to_answer(ids, without_first(trained))):
                self._labels.append(label)

    def finish(self) -> Arrays:
        labels = np.array(self._labels, dtype=bool)
        self.report.rows_desirable = int(labels.sum())
        return {**super().finish(), "labels": labels}
