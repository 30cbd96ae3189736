"""Judged steps, for process reward models: sequences with marked placeholders and what each should be judged.

The judgement of a step is read from the model's output at the placeholder itself, not before it.
"""

import functools
from collections.abc import Sequence
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
    without_first,
    workers_of,
)
from trimtab.data.chat import Rendering
from trimtab.data.data_report import StepReport
from trimtab.data.rendering import RowRenderer
from trimtab.data.step_formats import (
    LabelReader,
    StepColumns,
    StepFormatOptions,
    one_token,
    read_steps,
    recognise_steps,
)
from trimtab.data.token_store import TokenStore, content_hash
from trimtab.data.tokenising import tokenise, tokenise_in_pieces
from trimtab.errors import UserError


class StepOptions(StepFormatOptions, Protocol):
    """`num_workers` may be there too."""

    @property
    def placeholder_token(self) -> str | None: ...

    @property
    def reward_tokens(self) -> Sequence[str] | None: ...

    @property
    def max_len(self) -> int: ...


@dataclass(frozen=True)
class StepSettings:
    """The options that the tokens depend on."""

    input_key: str
    label_key: str
    placeholder_token: str
    reward_tokens: Sequence[str] | None
    max_len: int


@dataclass(frozen=True)
class StepStore:
    """N sequences; `sequences.trained` marks their placeholders, `targets` has one value for each mark, in order.

    Hard targets are numbers of reward tokens (0 is the positive one), or token ids where no reward tokens are given.
    Soft targets are probabilities of the first of two reward tokens.
    """

    sequences: TokenStore
    targets: np.ndarray
    soft: bool
    fingerprint: str = ""
    """Hash of the content; computed when not given."""

    def __post_init__(self) -> None:
        if not self.fingerprint:
            kind = "soft" if self.soft else "hard"
            object.__setattr__(self, "fingerprint", content_hash(self.targets, of=self.sequences.fingerprint + kind))

    @classmethod
    def of(cls, arrays: Arrays) -> "StepStore":
        sequences = TokenStore.of(arrays)
        return cls(sequences, arrays["targets"], bool(arrays["soft"][0]))

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def lengths(self) -> np.ndarray:
        return self.sequences.lengths

    @functools.cached_property
    def target_offsets(self) -> np.ndarray:
        marks_before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self.sequences.trained)])
        return marks_before[self.sequences.offsets]

    def example(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids, marked, targets) of one sequence; as many targets as marks."""
        ids, marked = self.sequences.example(index)
        return ids, marked, self.targets[self.target_offsets[index] : self.target_offsets[index + 1]]


def build_step_store(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    options: StepOptions,
    *,
    what: str = "train",
    workers: int | None = None,
) -> tuple[StepStore, StepReport]:
    """Tokenises and truncates the rows with their labels, or finds the result of the same work in the cache."""
    settings = settings_of(StepSettings, options)
    first_row(rows, what)
    if not settings.placeholder_token:
        raise UserError("--placeholder_token is not set: name the token that stands after every step")
    columns = recognise_steps(rows.column_names, settings)
    renderer = StepRenderer(columns, tokenizer, settings, what)
    report = StepReport(what, columns.description, rows_read=len(rows), max_len=settings.max_len)
    collector = StepCollector(tokenizer, settings, report)
    return build_store("steps", rows, renderer, collector, StepStore.of, settings, **workers_of(options, workers))


@dataclass(frozen=True)
class StepRendering:
    rendering: Rendering
    """Its spans are the placeholders."""
    values: list[float]


class StepRenderer(RowRenderer):
    def __init__(self, columns: StepColumns, tokenizer: PreTrainedTokenizerBase, settings: StepSettings, what: str):
        super().__init__(columns.names, tokenizer, what)
        self.columns = columns
        self.placeholder = settings.placeholder_token
        self.placeholder_id = one_token(self.placeholder, tokenizer, "--placeholder_token")
        self.value_of = LabelReader(settings.reward_tokens, tokenizer)

    def render(self, row: dict[str, Any], where: str) -> StepRendering | None:
        rendering, labels = read_steps(row, self.columns, self.placeholder, where)
        if not labels and not rendering.trained:
            return None
        self._check_count(rendering, len(labels), where)
        return StepRendering(rendering, [self.value_of(label, where) for label in labels])

    def _check_count(self, rendering: Rendering, labels: int, where: str) -> None:
        spans = len(rendering.trained)
        if labels == spans:
            return
        # The placeholder may also be a part of other words.
        ids, _ = next(iter(tokenise([rendering], self.tokenizer)))
        if (ids == self.placeholder_id).sum() != labels:
            raise UserError(
                f"{where}: {labels} labels for {spans} placeholders '{self.placeholder}' "
                "(--placeholder_token), there must be one for each"
            )


class StepCollector(Collector[StepReport]):
    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: StepSettings, report: StepReport):
        super().__init__(tokenizer, settings.max_len, report)
        self.placeholder = settings.placeholder_token
        self.placeholder_id = one_token(self.placeholder, tokenizer, "--placeholder_token")
        self.reward_tokens = settings.reward_tokens
        self._targets: list[float] = []

    def add_present(self, renderings: list[StepRendering]) -> None:
        tokenised = tokenise([rendering.rendering for rendering in renderings], self.tokenizer)
        for rendering, (ids, marked) in zip(renderings, tokenised):
            ids, marked = self._mark(rendering, ids, marked)
            # A placeholder at the very beginning judges nothing.
            values = rendering.values[int(marked[:1].sum()) :]
            if self.keep((ids, without_first(marked))):
                self._targets.extend(values[: int(marked[: self.max_len].sum())])

    def _mark(self, rendering: StepRendering, ids: np.ndarray, marked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The ids with as many marks as labels, each on a token that is the placeholder."""
        labels, spans = len(rendering.values), len(rendering.rendering.trained)
        if labels == spans:
            if marked.sum() != spans or (ids[marked] != self.placeholder_id).any():
                # The tokenizer joined a placeholder with its neighbours.
                ids, marked = tokenise_in_pieces(rendering.rendering, self.tokenizer)
            return ids, marked
        marked = ids == self.placeholder_id
        assert marked.sum() == labels, "the renderer has counted"
        return ids, marked

    def finish(self) -> Arrays:
        arrays = super().finish()
        targets = np.array(self._targets, dtype=np.float32)
        binary = self.reward_tokens is not None and len(self.reward_tokens) == 2
        soft = binary and bool(((targets != 0) & (targets != 1)).any())
        if binary and not soft:
            targets = 1 - targets  # from the probability of the first reward token to the number of the token meant
        if not soft:
            self.report.labels = self._label_counts(targets)
        return {**arrays, "targets": targets, "soft": np.array([soft])}

    def _label_counts(self, targets: np.ndarray) -> dict[str, int]:
        values, counts = np.unique(targets.astype(np.int64), return_counts=True)
        names = self.reward_tokens or {int(value): self.tokenizer.decode([int(value)]) for value in values}
        return {names[int(value)]: int(count) for value, count in zip(values, counts)}
