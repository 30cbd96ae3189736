"""Preference pairs, for reward models and DPO: two token sequences a row, which usually begin with the same prompt."""

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
from trimtab.data.chat import Rendering, with_end
from trimtab.data.data_report import PairReport
from trimtab.data.pair_formats import (
    PairColumns,
    PairFormatOptions,
    answer_starts,
    common_length,
    dialogue_messages,
    read_pair,
    recognise_pairs,
)
from trimtab.data.rendering import AnswerRenderer
from trimtab.data.token_store import TokenStore, content_hash
from trimtab.data.tokenising import tokenise
from trimtab.errors import UserError


class PairOptions(PairFormatOptions, Protocol):
    """`num_workers` may be there too."""

    @property
    def input_template(self) -> str | None: ...

    @property
    def apply_chat_template(self) -> bool: ...

    @property
    def max_len(self) -> int: ...


@dataclass(frozen=True)
class PairSettings:
    """The options that the tokens depend on."""

    prompt_key: str | None
    chosen_key: str
    rejected_key: str
    input_template: str | None
    apply_chat_template: bool
    max_len: int


@dataclass(frozen=True)
class PairStore:
    """N pairs: pair i is the sequences 2i (chosen) and 2i + 1 (rejected). Each ends with its answer's last token."""

    sequences: TokenStore
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
    def of(cls, arrays: Arrays) -> "PairStore":
        sequences = TokenStore.of(arrays)
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


def build_pair_store(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    options: PairOptions,
    *,
    what: str = "train",
    workers: int | None = None,
) -> tuple[PairStore, PairReport]:
    """Renders, tokenises and truncates both sides, or finds the result of the same work in the cache."""
    settings = settings_of(PairSettings, options)
    first_row(rows, what)
    columns = recognise_pairs(rows.column_names, settings)
    renderer = PairRenderer(columns, tokenizer, settings, what)
    report = PairReport(what, columns.description, rows_read=len(rows), max_len=settings.max_len)
    collector = PairCollector(tokenizer, settings.max_len, report, with_margins=columns.margin is not None)
    return build_store("pairs", rows, renderer, collector, PairStore.of, settings, **workers_of(options, workers))


@dataclass(frozen=True)
class PairRendering:
    chosen: Rendering
    rejected: Rendering
    margin: float = 0.0
    unmarked: bool = False
    """The texts do not say where the answers begin: they begin at the first token that differs."""


class PairRenderer(AnswerRenderer):
    """Rows of any preference layout."""

    def __init__(
        self, columns: PairColumns, tokenizer: PreTrainedTokenizerBase, options: PairOptions | PairSettings, what: str
    ):
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
        tokenised = iter(tokenise(sides, self.tokenizer))
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
