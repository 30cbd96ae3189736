"""The prompts of a tail run: those of an RL run, one text in place of all of them if asked for, and held-out ones."""

import dataclasses

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trimtab.config.jobs import TailOptions
from trimtab.data.formats import require_columns
from trimtab.data.prompts import Stores, build_prompt_store, build_prompt_stores, input_column, load_prompt_rows
from trimtab.data.sources import load_rows

HELD_OUT = "heldout"


def load_tail_stores(options: TailOptions, tokenizer: PreTrainedTokenizerBase) -> Stores:
    rows = {what: replaced(found, options.input_key, options) for what, found in load_prompt_rows(options).items()}
    stores, reports = build_prompt_stores(rows, tokenizer, options)
    if options.evaluate_heldout_sampling:
        key = options.heldout_input_key or options.input_key
        assert options.heldout_prompt_data is not None
        found = load_rows(
            options.heldout_prompt_data,
            probabilities=None,
            split=options.prompt_split,
            max_samples=options.eval_max_samples,
            seed=options.seed,
            flag="--heldout_prompt_data",
            name_sources=True,
        )
        require_columns(found.column_names, {"--heldout_input_key": options.heldout_input_key})
        stores[HELD_OUT], reports[HELD_OUT] = build_prompt_store(
            replaced(found, key, options), tokenizer, dataclasses.replace(options, input_key=key), what="held-out"
        )
    return stores, reports


def replaced(rows: Dataset, key: str, options: TailOptions) -> Dataset:
    """The rows with --single_prompt as their prompt."""
    if options.single_prompt is None:
        return rows
    column = input_column(rows.column_names, key)
    return rows.remove_columns(column).add_column(column, [options.single_prompt] * len(rows))
