"""One source becomes its splits: a file, a folder, a saved data set, a Python loader, `type@folder`, a hub name."""

import contextlib
import glob
import hashlib
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
from datasets import Dataset, DatasetDict

from trimtab.config.data_options import no_data_in, refuse_empty
from trimtab.config.jobs import SupervisedOptions
from trimtab.data.data_files import (
    InFiles,
    Interleaved,
    Numbered,
    SelectedRows,
    available,
    first_line,
    first_rows,
    interleave,
    joined,
    json_fault,
    load_within_limit,
    locations_of,
    remember,
)
from trimtab.data.formats import SOURCE_COLUMN
from trimtab.data.hub import hub_or_cache, looks_like_hub_name
from trimtab.errors import Interrupted, UserError

logger = logging.getLogger(__name__)

FILE_TYPES = {
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
}


def load_splits(
    source: str, split: str = "train", flag: str = "--dataset", most: int | None = None
) -> dict[str, Dataset]:
    """Every split of one source by name; `split` only tells a Python loader which one is wanted, and `flag` the user
    which option names the source. `most`: how many rows of a split are wanted, where that is known."""
    path = Path(source).expanduser()
    if path.is_dir():
        return _load_folder(path)
    if path.is_file():
        return _load_python(path, split) if path.suffix == ".py" else _load_file(path, most)
    if "@" in source:
        kind, _, folder = source.partition("@")
        return _load_typed(kind, folder)
    if _file_type(path) or path.suffix == ".py" or not looks_like_hub_name(source):
        raise UserError(f"cannot find '{source}': no such file or folder (see {flag})")
    return _load_hub(source)


def _load_file(path: Path, most: int | None) -> dict[str, Dataset]:
    kind = _file_type(path)
    if kind is None:
        raise UserError(f"cannot read {path}: known file types are {', '.join(FILE_TYPES)} (also .gz) and .py")
    first = first_rows(path, most) if kind == "parquet" and most is not None else None
    if first is None:
        rows = _read_files(kind, {"train": [path]})["train"]
    else:
        rows = remember(first[0], InFiles(kind, (path,)), available=first[1])
    return {"train": rows, _split_in_name(Path(path.name)): rows}


def _load_folder(folder: Path) -> dict[str, Dataset]:
    saved_one = (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    if saved_one or (folder / "dataset_dict.json").is_file():
        with explained(f"cannot load the saved data set {folder}"):
            saved = datasets.load_from_disk(str(folder))
        return _numbered(dict(saved) if isinstance(saved, DatasetDict) else {"train": saved}, str(folder))
    card = folder / "README.md"
    if card.is_file() and re.search(r"^configs:", card.read_text(errors="replace"), re.MULTILINE):
        return _call_library(str(folder), f"cannot load the folder {folder}")
    by_kind: dict[str, dict[str, list[Path]]] = {}
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
        kind = _file_type(path)
        # A .txt beside data files is usually a licence or a note; `text@folder` asks for them.
        if kind and kind != "text" and path.is_file() and not hidden:
            by_kind.setdefault(kind, {}).setdefault(_split_in_name(path.relative_to(folder)), []).append(path)
    if not by_kind:
        raise no_data_in(folder)
    parts: dict[str, list[Dataset]] = {}
    for kind, files in by_kind.items():
        for name, rows in _read_files(kind, files).items():
            parts.setdefault(name, []).append(rows)
    return {name: concatenate(rows, str(folder)) for name, rows in parts.items()}


def _load_typed(kind: str, folder: str) -> dict[str, Dataset]:
    if kind in {"json", "csv", "parquet", "arrow", "text"}:
        path = Path(folder).expanduser()
        if path.is_file():
            return _read_files(kind, {"train": [path]})
        if not path.is_dir():
            raise UserError(f"cannot find the folder '{folder}' of '{kind}@{folder}'")
        files: dict[str, list[Path]] = {}
        for file in sorted(path.rglob("*")):
            if file.is_file() and _file_type(file) == kind:
                files.setdefault(_split_in_name(file.relative_to(path)), []).append(file)
        if not files:
            raise UserError(f"no {kind} files in {path} (from '{kind}@{folder}')")
        return _read_files(kind, files)
    if not looks_like_hub_name(kind):
        raise UserError(f"cannot load '{kind}@{folder}': '{kind}' is neither a file type nor a hub name")
    return _load_hub(kind, data_dir=folder)


def _load_hub(name: str, **arguments: str) -> dict[str, Dataset]:
    with hub_or_cache() as reachable:
        if reachable:
            return _call_library(name, f"cannot load '{name}'", **arguments)
        try:
            return _call_library(name, "", **arguments)
        except UserError as error:
            raise UserError(
                f"cannot load '{name}': no such local path, and the hub cannot be reached "
                "(check the spelling, or the network and HF_HUB_OFFLINE)"
            ) from error


def _load_python(path: Path, split: str) -> dict[str, Dataset]:
    """Runs a loader: either `load_dataset(split)` or a `datasets.GeneratorBasedBuilder`."""
    logger.warning("running %s, a data loader you chose, as Python code", path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    name = f"trimtab_loader_{re.sub(r'[^A-Za-z0-9]', '_', path.stem)}_{digest}"
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None and specification.loader is not None, "only files that end with .py come here"
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # the builder's class is looked up there
    with explained(f"the data loader {path} failed"):
        specification.loader.exec_module(module)
        function = module.__dict__.get("load_dataset")
        if function is not None and function is not datasets.load_dataset:
            loaded = function(split)
            loaded = loaded if isinstance(loaded, dict) else {split: loaded}
            return _numbered({key: _as_dataset(rows, path) for key, rows in loaded.items()}, str(path))
        for value in list(module.__dict__.values()):
            is_builder = isinstance(value, type) and issubclass(value, datasets.GeneratorBasedBuilder)
            if is_builder and value.__module__ == name:
                builder = value(hash=digest, data_dir=str(path.parent))
                builder.download_and_prepare()
                return _numbered(dict(builder.as_dataset()), str(path))
    raise UserError(f"{path} defines neither load_dataset(split) nor a datasets.GeneratorBasedBuilder")


def _as_dataset(rows: Dataset | Iterable[dict[str, Any]], path: Path) -> Dataset:
    if isinstance(rows, Dataset):
        return rows
    listed = list(rows)
    for number, row in enumerate(listed, start=1):
        if not isinstance(row, dict):
            raise UserError(f"{path}: row {number} is a {type(row).__name__}, a dict is needed")
    return Dataset.from_list(listed, on_mixed_types="use_json")


def _read_files(kind: str, files: dict[str, list[Path]]) -> dict[str, Dataset]:
    every = [path for paths in files.values() for path in paths]
    for path in every:
        with explained(f"cannot read {path}"):
            refuse_empty(path)
    # The library takes names for patterns.
    data_files = {name: [glob.escape(str(path.resolve())) for path in paths] for name, paths in files.items()}
    try:
        if kind == "csv":
            return {name: concatenate([_read_csv(path) for path in paths], name) for name, paths in files.items()}
        loaded = load_within_limit(kind, data_files, every)
        if kind == "json":
            for rows in loaded.values():
                rows.data.validate(full=True)  # bytes that are not UTF-8 get this far unseen
        return {name: remember(rows, InFiles(kind, tuple(files[name]))) for name, rows in loaded.items()}
    except (UserError, Interrupted):
        raise
    except Exception as error:
        if "corresponds to no data" in str(error):
            raise UserError(f"{every[0]} is empty: it holds no rows") from error
        where = str(every[0]) if len(every) == 1 else f"one of {len(every)} files such as {every[0]}"
        fault = next(filter(None, map(json_fault, every)), None) if kind == "json" else None
        raise UserError(fault or f"cannot read {where} as {kind}: {first_line(error)}") from error


def _read_csv(path: Path) -> Dataset:
    """CSV has no types: a value is the text that stands there (04 is not 4), and an empty one is nothing."""
    import pandas

    columns = pandas.read_csv(path, nrows=0).columns
    text = datasets.Features({column: datasets.Value("string") for column in columns})
    data_files = {"train": [glob.escape(str(path.resolve()))]}
    rows = load_within_limit("csv", data_files, [path], features=text, keep_default_na=False, na_values=[""])["train"]
    return remember(rows, InFiles("csv", (path,)))


def _call_library(name: str, failure: str, **arguments: str) -> dict[str, Dataset]:
    with explained(failure):
        return _numbered(dict(datasets.load_dataset(name, **arguments)), name)


def _numbered(splits: dict[str, Dataset], source: str) -> dict[str, Dataset]:
    """The splits, whose rows are known by their numbers."""
    return {name: remember(rows, Numbered(f"{source} ({name})")) for name, rows in splits.items()}


def concatenate(parts: list[Dataset], what: str) -> Dataset:
    if len(parts) == 1:
        return parts[0]
    with explained(f"cannot join the rows of {what}"):
        whole = datasets.concatenate_datasets(agree_on_types(parts))
    return remember(whole, joined(parts, what), available=sum(map(available, parts)))


def agree_on_types(parts: list[Dataset]) -> list[Dataset]:
    types: dict[str, list[Any]] = {}
    for part in parts:
        for column, feature in part.features.items():
            types.setdefault(column, []).append(feature)
    for column, features in types.items():
        known = [feature for feature in features if feature != datasets.Value("null")]
        if any(feature != known[0] for feature in known):
            parts = [part.cast_column(column, datasets.Json()) if column in part.features else part for part in parts]
    return parts


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Whatever fails inside becomes one line for the user."""
    try:
        yield
    except (UserError, Interrupted):
        raise
    except Exception as error:
        raise UserError(f"{what}: {first_line(error)}") from error


def _file_type(path: Path) -> str | None:
    suffixes = path.suffixes[:-1] if path.suffix == ".gz" else path.suffixes
    return FILE_TYPES.get(suffixes[-1].lower()) if suffixes else None


def _split_in_name(path: Path) -> str:
    """`train`, `test` or `validation` when a word of the file's or its folder's name says so, else `train`."""
    for part in reversed(path.parts):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in SPLIT_WORDS:
                return SPLIT_WORDS[word]
    return "train"


# ---- Where rows come from: hub names, files, folders, saved data sets, Python loaders; one of them or a mixture
#
# Concatenated sources keep the union of their columns (a row lacks, as None, what its source lacks), and a column
# whose type differs between sources is kept as JSON values, so that what a row says never depends on its
# neighbours.


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


def load_evaluation_rows(options: SupervisedOptions) -> Dataset | None:
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
    return remember(named, locations_of(rows, name), available=available(rows))


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
    return remember(rows.select(which), SelectedRows(locations_of(rows, what), which))


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
