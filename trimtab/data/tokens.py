"""Supervised rows as token sequences, flat and cached: what SFT and distillation read.

Preference pairs, labelled answers and judged steps have their own stores (`pairs`, `labelled`, `steps`).
"""

from dataclasses import dataclass
from typing import Protocol

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trimtab.data.building import Collector, build_store, first_row, settings_of, without_first, workers_of
from trimtab.data.chat import Rendering
from trimtab.data.data_report import DataReport
from trimtab.data.formats import FormatOptions, recognise_supervised
from trimtab.data.rendering import RenderOptions, SupervisedRenderer
from trimtab.data.token_store import TokenStore
from trimtab.data.tokenising import tokenise

__all__ = ["DataReport", "SupervisedOptions", "TokenStore", "build_sft_store", "tokenise"]


class SupervisedOptions(FormatOptions, RenderOptions, Protocol):
    """A job may lack `multiturn` and `pretrain_mode`: they are then off. `num_workers` may be there too."""

    @property
    def max_len(self) -> int: ...


@dataclass(frozen=True)
class SupervisedSettings:
    """The options that the tokens depend on."""

    input_key: str
    output_key: str | None
    input_template: str | None
    apply_chat_template: bool
    max_len: int
    multiturn: bool = False
    pretrain_mode: bool = False


def build_sft_store(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    options: SupervisedOptions,
    *,
    what: str = "train",
    workers: int | None = None,
) -> tuple[TokenStore, DataReport]:
    """Renders, tokenises and truncates the rows, or finds the result of the same work in the cache."""
    settings = settings_of(SupervisedSettings, options)
    columns = recognise_supervised(rows.column_names, settings, first_row(rows, what))
    renderer = SupervisedRenderer(columns, tokenizer, settings, what)
    report = DataReport(what, columns.description, rows_read=len(rows), max_len=settings.max_len)
    collector = SupervisedCollector(tokenizer, settings.max_len, report)
    return build_store(
        "sft",
        rows,
        renderer,
        collector,
        TokenStore.of,
        settings,
        **workers_of(options, workers),
    )


class SupervisedCollector(Collector[DataReport]):
    def add_present(self, renderings: list[Rendering]) -> None:
        for ids, trained in tokenise(renderings, self.tokenizer):
            self.keep((ids, without_first(trained)))
