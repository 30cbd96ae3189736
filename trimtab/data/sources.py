"""Where rows come from: hub names, files, folders, saved data sets, Python loaders; one of them or a mixture.

Concatenated sources keep the union of their columns (a row lacks, as None, what its source lacks), and a column whose
type differs between sources is kept as JSON values, so that what a row says never depends on its neighbours.
"""

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from typing import Any, Protocol

import datasets
import pyarrow
from datasets import Dataset

from trimtab.data.faults import first_line
from trimtab.data.formats import SOURCE_COLUMN
from trimtab.data.places import Chosen, Interleaved, available, interleave, joined, places_of, remember
from trimtab.data.readers import agree_on_types, concatenate, explained, load_splits
from trimtab.errors import UserError

# What `load_rows` read last, so that `load_evaluation_rows` need not run a Python loader or ask the hub again.
_just_read: dict[tuple[str, str], dict[str, Dataset]] = {}

SPLIT_FLAGS = {
    "--dataset": "--dataset_split",
    "--eval_dataset": "--eval_split",
    "--prompt_data": "--prompt_split",
    "--heldout_prompt_data": "--prompt_split",
    "--pretrain_data": "--pretrain_split",
}
PROBABILITY_SLACK = 0.01  # "0.33,0.33,0.33" is meant as thirds


class EvaluationOptions(Protocol):
    @property
    def dataset(self) -> str: ...

    @property
    def dataset_split(self) -> str: ...

    @property
    def eval_dataset(self) -> str | None: ...

    @property
    def eval_split(self) -> str: ...

    @property
    def eval_max_samples(self) -> int | None: ...

    @property
    def seed(self) -> int: ...


def load_rows(
    sources: str,
    *,
    probabilities: str | None,
    split: str,
    max_samples: int | None,
    seed: int,
    flag: str = "--dataset",
    name_sources: bool = False,
) -> Dataset:
    """The rows of comma-separated sources, one after the other or interleaved with the given probabilities.

    At most `max_samples` of them; None: all. `flag` is the option that lists them; with `name_sources` each row says in
    SOURCE_COLUMN which one it is from.
    """
    names = _names(sources, flag)
    weights = _parse_probabilities(probabilities, names, f"{flag}_probs")
    _just_read.clear()
    with _quiet():
        most = max_samples if split.isalpha() else None  # not a slice, which counts all rows
        _just_read.update({(name, split): load_splits(name, split, flag, most) for name in dict.fromkeys(names)})
        parts = [_first_rows(_pick(_just_read[name, split], split, name, flag), max_samples) for name in names]
        if name_sources:
            parts = [_with_source(part, name) for name, part in zip(names, parts)]
        rows = _first_rows(_mix(parts, weights, seed, names), max_samples)
    if not len(rows):
        raise UserError(f"'{sources}' holds no rows in its split '{split}'")
    return rows


def load_evaluation_rows(options: EvaluationOptions) -> Dataset | None:
    """Rows of `--eval_dataset`, or without it the `test` splits that the training sources carry, or None."""
    if options.eval_dataset:
        return load_rows(
            options.eval_dataset,
            probabilities=None,
            split=options.eval_split,
            max_samples=options.eval_max_samples,
            seed=options.seed,
            flag="--eval_dataset",
        )
    if re.search(r"\btest\b", options.dataset_split):
        return None  # already trained on
    names, parts = [], []
    with _quiet():
        for name in _names(options.dataset, "--dataset"):
            here = (name, options.dataset_split)
            splits = _just_read.pop(here) if here in _just_read else load_splits(*here)
            test = splits.get("test")
            # A lone file called test.jsonl answers to both names; it is the training data.
            if test is not None and test is not splits.get("train") and len(test):
                names.append(name)
                parts.append(_first_rows(test, options.eval_max_samples))
        if not parts:
            return None
        return _first_rows(_mix(parts, None, options.seed, names), options.eval_max_samples)


def _with_source(rows: Dataset, name: str) -> Dataset:
    named = rows.add_column(SOURCE_COLUMN, [_short(name)] * len(rows))
    return remember(named, places_of(rows, name), available=available(rows))


def _short(name: str) -> str:
    """A file's or folder's own name; a hub name as it is."""
    place = os.path.expanduser(name)
    return os.path.basename(os.path.normpath(place)) if os.path.exists(place) else name


def _pick(splits: dict[str, Dataset], split: str, source: str, flag: str) -> Dataset:
    """One split, or a slice or sum of splits in the notation of `datasets` ("train[:10%]")."""
    if split in splits:
        return splits[split]
    if len(splits) == 1 and split in ("train", "test"):
        return next(iter(splits.values()))  # a lone file has no splits; whatever it is called, it is what was named
    found = ", ".join(sorted(splits))
    try:
        instructions = datasets.ReadInstruction.from_spec(split).to_absolute({k: len(v) for k, v in splits.items()})
    except (ValueError, AssertionError) as error:
        raise UserError(
            f"'{source}' has no split '{split}': found {found} (see {SPLIT_FLAGS.get(flag, flag)})"
        ) from error
    parts = [_slice(splits[part.splitname], range(part.from_, part.to), source) for part in instructions]
    return concatenate(parts, source)


def _mix(parts: list[Dataset], weights: list[float] | None, seed: int, names: list[str]) -> Dataset:
    if weights is None or len(parts) == 1:
        return concatenate(parts, ", ".join(names))
    with explained(f"cannot interleave the sources {', '.join(names)}"):
        mixed = interleave(agree_on_types(parts), weights, seed)
    return remember(mixed, Interleaved(joined(parts, "the data"), tuple(weights), seed))


def _first_rows(rows: Dataset, count: int | None) -> Dataset:
    if count is None or len(rows) <= count:
        return rows
    return remember(_slice(rows, range(count), "the data"), available=available(rows))


def _slice(rows: Dataset, which: range, what: str) -> Dataset:
    return remember(rows.select(which), Chosen(places_of(rows, what), which))


def _names(sources: str, flag: str) -> list[str]:
    names = [name.strip() for name in (sources or "").split(",") if name.strip()]
    if not names:
        raise UserError(f"{flag} is empty: name at least one data set, file or folder")
    return names


def _parse_probabilities(text: str | None, names: list[str], flag: str) -> list[float] | None:
    if text is None or not text.strip():
        return None
    try:
        weights = [float(word) for word in text.split(",")]
    except ValueError:
        raise UserError(f"{flag} '{text}' is not a list of numbers such as 0.7,0.3") from None
    if len(weights) != len(names):
        raise UserError(f"{flag} has {len(weights)} numbers for {len(names)} data sets: give one for each")
    total = sum(weights)
    if min(weights) < 0 or not abs(total - 1) <= PROBABILITY_SLACK:
        raise UserError(f"{flag} '{text}' must be non-negative and sum to 1, not {total:g}")
    return [weight / total for weight in weights]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no log lines of the dataset library: errors come back as exceptions."""
    bars = not datasets.are_progress_bars_disabled()
    level = datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()


def own_rows(rows: list[dict[str, Any]], source: str, flag: str) -> Dataset:
    """Rows that an environment brings. Where it says everything itself, its name stands for the prompt. `flag`: the
    option that names it."""
    named = [{**row, "prompt": row.get("prompt") or source, SOURCE_COLUMN: source} for row in rows]
    if not named:
        raise UserError(f"{flag} gives no rows; name prompts")
    try:
        return Dataset.from_list(named)
    except pyarrow.ArrowException as error:
        raise UserError(f"{flag}: its rows are not alike ({first_line(error)}); name prompts") from error
