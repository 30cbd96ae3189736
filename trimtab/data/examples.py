"""Rows as token sequences, flat and cached: supervised ones, which SFT and distillation read, preference pairs,
labelled answers and judged steps. A job's options may lack what has a default in its settings."""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trimtab.data.chat_template import with_end
from trimtab.data.data_files import locations_of
from trimtab.data.dataset import (
    Arrays,
    Collector,
    DataReport,
    LabelledReport,
    PairReport,
    StepReport,
    TokenDataset,
    build_dataset,
    content_hash,
    first_row,
    settings_of,
    up_to_answer,
    without_first,
    workers_of,
)
from trimtab.data.formats import (
    LabelReader,
    PairColumns,
    PairSettings,
    Rendering,
    StepColumns,
    StepSettings,
    SupervisedColumns,
    SupervisedSettings,
    answer_starts,
    common_length,
    dialogue_messages,
    find_pair_columns,
    find_step_columns,
    find_supervised_columns,
    kind_of,
    one_token,
    read_pair,
    read_steps,
    read_supervised,
    require_columns,
)
from trimtab.data.rendering import (
    AnswerRenderer,
    RowRenderer,
    SupervisedRenderer,
    tokenize_in_pieces,
    tokenize_renderings,
)
from trimtab.errors import UserError


def build_sft_dataset(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    options: object,
    *,
    what: str = "train",
    workers: int | None = None,
) -> tuple[TokenDataset, DataReport]:
    """Renders, tokenises and truncates the rows, or finds the result of the same work in the cache."""
    settings = settings_of(SupervisedSettings, options)
    columns = find_supervised_columns(rows.column_names, settings, first_row(rows, what))
    renderer = SupervisedRenderer(columns, tokenizer, settings, what)
    report = DataReport(what, columns.description, rows_read=len(rows), max_len=settings.max_len)
    collector = SupervisedCollector(tokenizer, settings.max_len, report)
    return build_dataset(
        "sft",
        rows,
        renderer,
        collector,
        TokenDataset.of,
        settings,
        **workers_of(options, workers),
    )


class SupervisedCollector(Collector[DataReport]):
    def add_present(self, renderings: list[Rendering]) -> None:
        for ids, trained in tokenize_renderings(renderings, self.tokenizer):
            self.keep((ids, without_first(trained)))


# ---- Preference pairs, for reward models and DPO: two token sequences a row, which usually begin with the same prompt.


@dataclass(frozen=True)
class PairDataset:
    """N pairs: pair i is the sequences 2i (chosen) and 2i + 1 (rejected). Each ends with its answer's last token."""

    sequences: TokenDataset
    shared: np.ndarray
    """int32: how many tokens, all before the first trained one, both sides of a pair begin with."""
    margins: np.ndarray | None = None
    """float32, if the data have a `margin` column."""
    fingerprint: str = ""
    """Hash of the content; computed when not given."""

    def __post_init__(self) -> None:
        if not self.fingerprint:
            extras = [self.shared] if self.margins is None else [self.shared, self.margins]
            object.__setattr__(self, "fingerprint", content_hash(*extras, of=self.sequences.fingerprint))

    @classmethod
    def of(cls, arrays: Arrays) -> "PairDataset":
        sequences = TokenDataset.of(arrays)
        return cls(sequences, arrays["shared"], arrays.get("margins"))

    def __len__(self) -> int:
        return len(self.shared)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of both sides together."""
        return self.sequences.lengths.reshape(-1, 2).sum(axis=1)

    @functools.cached_property
    def lengths_sharing(self) -> np.ndarray:
        """Tokens of a pair that holds what its sides share once."""
        return self.lengths - self.shared

    def pair(self, index: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """(ids, trained) of the chosen and of the rejected side."""
        if not 0 <= index < len(self):
            raise IndexError(f"no pair {index} in a store of {len(self)}")
        return self.sequences.example(2 * index), self.sequences.example(2 * index + 1)


def build_pair_dataset(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    options: object,
    *,
    what: str = "train",
    workers: int | None = None,
) -> tuple[PairDataset, PairReport]:
    """Renders, tokenises and truncates both sides, or finds the result of the same work in the cache."""
    settings = settings_of(PairSettings, options)
    first_row(rows, what)
    columns = find_pair_columns(rows.column_names, settings)
    renderer = PairRenderer(columns, tokenizer, settings, what)
    report = PairReport(what, columns.description, rows_read=len(rows), max_len=settings.max_len)
    collector = PairCollector(tokenizer, settings.max_len, report, with_margins=columns.margin is not None)
    return build_dataset("pairs", rows, renderer, collector, PairDataset.of, settings, **workers_of(options, workers))


@dataclass(frozen=True)
class PairRendering:
    chosen: Rendering
    rejected: Rendering
    margin: float = 0.0
    unmarked: bool = False
    """The texts do not say where the answers begin: they begin at the first token that differs."""


class PairRenderer(AnswerRenderer):
    """Rows of any preference layout."""

    def __init__(self, columns: PairColumns, tokenizer: PreTrainedTokenizerBase, options: PairSettings, what: str):
        as_chat, template = options.apply_chat_template, options.input_template
        super().__init__(columns.names, tokenizer, what, as_chat=as_chat, input_template=template)
        self.columns = columns

    def render(self, row: dict[str, Any], where: str) -> PairRendering:
        record = read_pair(row, self.columns, where)
        if record.prompt is None and isinstance(record.chosen, str):
            assert isinstance(record.rejected, str)
            return self._render_texts(record.chosen, record.rejected, record.margin, where)
        chosen, rejected = (
            self.render_answer(side, None, record.tools, where)
            if record.prompt is None
            else self.render_answer(record.prompt, side, record.tools, where)
            for side in (record.chosen, record.rejected)
        )
        return PairRendering(chosen, rejected, record.margin)

    def _render_texts(self, chosen: str, rejected: str, margin: float, where: str) -> PairRendering:
        """Two whole texts, each with its prompt."""
        if self.as_chat:
            good, bad = dialogue_messages(chosen), dialogue_messages(rejected)
            if good is None or bad is None:
                raise UserError(
                    f"{where}: --apply_chat_template needs to know the turns, and these texts do not begin with "
                    "'Human:': name the prompt's column with --prompt_key, or leave the template out"
                )
            return PairRendering(self.chat.render(good, where=where), self.chat.render(bad, where=where), margin)
        if self.input_template is not None:
            raise UserError(
                "--input_template goes around a prompt, and the data have whole texts in "
                f"'{self.columns.chosen}' and '{self.columns.rejected}': name the prompt's column with --prompt_key, "
                "or set it to None"
            )
        texts = with_end(chosen, self.tokenizer), with_end(rejected, self.tokenizer)
        starts = answer_starts(chosen, rejected)
        first, second = starts or (common_length(*texts),) * 2
        sides = Rendering(texts[0], [(first, len(texts[0]))]), Rendering(texts[1], [(second, len(texts[1]))])
        return PairRendering(*sides, margin, unmarked=starts is None)


class PairCollector(Collector[PairReport]):
    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_len: int, report: PairReport, *, with_margins: bool = False
    ):
        super().__init__(tokenizer, max_len, report)
        self._shared: list[int] = []
        self._margins: list[float] | None = [] if with_margins else None

    def add_present(self, renderings: list[PairRendering]) -> None:
        sides = [side for rendering in renderings for side in (rendering.chosen, rendering.rejected)]
        tokenised = iter(tokenize_renderings(sides, self.tokenizer))
        for rendering, chosen, rejected in zip(renderings, tokenised, tokenised):
            self._add_pair(rendering, chosen, rejected)

    def _add_pair(self, rendering: PairRendering, *sides: tuple[np.ndarray, np.ndarray]) -> None:
        same = _same_beginning(*(ids for ids, _ in sides))
        if rendering.unmarked:
            # One of them may be the other's beginning: something must be left to be the answer.
            start = min(same, *(len(ids) - 1 for ids, _ in sides))
            sides = tuple((ids, np.arange(len(ids)) >= start) for ids, _ in sides)
        sides = tuple(up_to_answer(ids, without_first(trained)) for ids, trained in sides)
        if not self.keep(*sides):
            return
        starts = [int(trained.argmax()) for _, trained in sides]
        shared = min(same, *starts)
        self._shared.append(shared)
        self.report.rows_equal += same >= min(self.max_len, max(len(ids) for ids, _ in sides))
        self.report.prompts_shared += starts == [shared, shared] and shared > 0
        self.report.tokens_shared += shared
        if self._margins is not None:
            self._margins.append(rendering.margin)

    def finish(self) -> Arrays:
        arrays = {**super().finish(), "shared": np.array(self._shared, dtype=np.int32)}
        if self._margins is not None:
            arrays["margins"] = np.array(self._margins, dtype=np.float32)
        return arrays


def _same_beginning(first: np.ndarray, second: np.ndarray) -> int:
    shorter = min(len(first), len(second))
    differ = first[:shorter] != second[:shorter]
    return int(differ.argmax()) if differ.any() else shorter


# ---- Answers labelled desirable or not, for KTO.


TRUTHS = {"1": True, "true": True, "0": False, "false": False}


@dataclass(frozen=True, kw_only=True)
class LabelledSettings(SupervisedSettings):
    label_key: str


@dataclass(frozen=True)
class LabelledDataset:
    """N answers to prompts, each sequence ending with its answer's last token."""

    sequences: TokenDataset
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


def build_labelled_dataset(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    options: object,
    *,
    what: str = "train",
    workers: int | None = None,
) -> tuple[LabelledDataset, LabelledReport]:
    """Renders, tokenises and truncates the rows, or finds the result of the same work in the cache."""
    settings = settings_of(LabelledSettings, options)
    first = first_row(rows, what)
    require_columns(rows.column_names, {"--label_key": settings.label_key})
    _check_every_label(rows, settings.label_key, what)
    columns = find_supervised_columns(rows.column_names, settings, first)
    if columns.whole_text:
        raise UserError(
            f"column '{columns.prompt}' holds texts without an answer that the label could be about: name the columns "
            f"with --input_key and --output_key (found: {', '.join(rows.column_names)})"
        )
    renderer = LabelledRenderer(columns, tokenizer, settings, what)
    layout = f"{columns.description}, labels in {settings.label_key}"
    report = LabelledReport(what, layout, rows_read=len(rows), max_len=settings.max_len)
    collector = LabelledCollector(tokenizer, settings.max_len, report)

    def store_of(arrays: Arrays) -> LabelledDataset:
        labels = arrays["labels"]
        sequences = TokenDataset.of(arrays)
        return LabelledDataset(sequences, labels, settings.max_len)

    return build_dataset("labelled", rows, renderer, collector, store_of, settings, **workers_of(options, workers))


def _check_every_label(rows: Dataset, label_key: str, what: str) -> None:
    missing = [number for number, label in enumerate(rows[label_key]) if label is None]
    if missing:
        first = locations_of(rows, f"the {what} data").names(missing[:1])[0]
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
        tokenised = tokenize_renderings([rendering for rendering, _ in renderings], self.tokenizer)
        for (_, label), (ids, trained) in zip(renderings, tokenised):
            if self.keep(up_to_answer(ids, without_first(trained))):
                self._labels.append(label)

    def finish(self) -> Arrays:
        labels = np.array(self._labels, dtype=bool)
        self.report.rows_desirable = int(labels.sum())
        return {**super().finish(), "labels": labels}


# ---- Judged steps, for process reward models: sequences with marked placeholders and what each should be judged
#
# The judgement of a step is read from the model's output at the placeholder itself, not before it.


@dataclass(frozen=True)
class StepDataset:
    """N sequences; `sequences.trained` marks their placeholders, `targets` has one value for each mark, in order.

    Hard targets are numbers of reward tokens (0 is the positive one), or token ids where no reward tokens are given.
    Soft targets are probabilities of the first of two reward tokens.
    """

    sequences: TokenDataset
    targets: np.ndarray
    soft: bool
    fingerprint: str = ""
    """Hash of the content; computed when not given."""

    def __post_init__(self) -> None:
        if not self.fingerprint:
            kind = "soft" if self.soft else "hard"
            object.__setattr__(self, "fingerprint", content_hash(self.targets, of=self.sequences.fingerprint + kind))

    @classmethod
    def of(cls, arrays: Arrays) -> "StepDataset":
        sequences = TokenDataset.of(arrays)
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


def build_step_dataset(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    options: object,
    *,
    what: str = "train",
    workers: int | None = None,
) -> tuple[StepDataset, StepReport]:
    """Tokenises and truncates the rows with their labels, or finds the result of the same work in the cache."""
    settings = settings_of(StepSettings, options)
    first_row(rows, what)
    if not settings.placeholder_token:
        raise UserError("--placeholder_token is not set: name the token that stands after every step")
    columns = find_step_columns(rows.column_names, settings)
    renderer = StepRenderer(columns, tokenizer, settings, what)
    report = StepReport(what, columns.description, rows_read=len(rows), max_len=settings.max_len)
    collector = StepCollector(tokenizer, settings, report)
    return build_dataset("steps", rows, renderer, collector, StepDataset.of, settings, **workers_of(options, workers))


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
        ids, _ = next(iter(tokenize_renderings([rendering], self.tokenizer)))
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
        tokenised = tokenize_renderings([rendering.rendering for rendering in renderings], self.tokenizer)
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
                ids, marked = tokenize_in_pieces(rendering.rendering, self.tokenizer)
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
