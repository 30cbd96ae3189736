"""Sequences of tokens, all in flat arrays."""

import dataclasses
import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import tokenizers
import transformers
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trimtab.data.data_files import available, locations_of
from trimtab.data.rendering import CHUNK_ROWS, RowRenderer, progress, render_all
from trimtab.errors import UserError
from trimtab.files import reason, replacing


@dataclass(frozen=True)
class TokenDataset:
    """N sequences: sequence i is ids[offsets[i]:offsets[i + 1]]. A sequence's first token is never marked trained."""

    ids: np.ndarray
    trained: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray | None = None
    """Which row of the data each sequence, or pair of sequences, comes from; no part of the content."""
    fingerprint: str = ""
    """Hash of the content; computed when not given."""

    @classmethod
    def of(cls, arrays: dict[str, np.ndarray]) -> "TokenDataset":
        """The sequences among the arrays of a store."""
        return cls(arrays["ids"], arrays["trained"], arrays["offsets"], arrays.get("rows"))

    def __post_init__(self) -> None:
        if not self.fingerprint:
            object.__setattr__(self, "fingerprint", content_hash(self.ids, self.trained, self.offsets))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def example(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, trained) of one sequence."""
        if not 0 <= index < len(self):
            raise IndexError(f"no sequence {index} in a store of {len(self)}")
        here = slice(self.offsets[index], self.offsets[index + 1])
        return self.ids[here], self.trained[here]


def content_hash(*arrays: np.ndarray, of: str = "") -> str:
    """Hash of the arrays, continuing from the hash `of` something that goes with them."""
    digest = hashlib.blake2b(of.encode(), digest_size=16)
    for array in arrays:
        digest.update(str((array.dtype.str, array.shape)).encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


# ---- What became of the rows, for people and for the manifest.


QUANTILES = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass
class DataReport:
    """Counts of rows and tokens. Jobs whose rows have more to tell extend it."""

    what: str
    layout: str
    rows_read: int = 0
    rows_available: int = 0
    """Rows that the files hold; more than were read where an option limits them."""
    rows_kept: int = 0
    rows_truncated: int = 0
    rows_over_long: int = 0
    rows_empty: int = 0
    rows_also_trained: int = 0
    """Of the rows to evaluate on: those whose prompt is trained on too."""
    max_len: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    lengths: dict[str, int] = field(default_factory=dict)

    noun: ClassVar[str] = "rows"
    """What a row is called in this job."""
    marked: ClassVar[str] = "trained"
    """What is done with the marked tokens."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def count(self, trained: np.ndarray, lengths: np.ndarray) -> None:
        """Takes down the figures of the sequences that were kept."""
        self.tokens = len(trained)
        self.trained_tokens = int(trained.sum())
        ordered = np.sort(lengths)
        self.lengths = {name: int(ordered[round(q * (len(ordered) - 1))]) for name, q in QUANTILES.items()}

    @property
    def in_files(self) -> int:
        return max(self.rows_available, self.rows_read)

    def beyond_limit(self) -> list[str]:
        """A line about the rows that were not read, if there are any."""
        beyond = self.in_files - self.rows_read
        flag = "--eval_max_samples" if self.what == "evaluation" else "--max_samples"
        return [f"{beyond:,} {self.noun} left out: beyond {flag} {self.rows_read:,}"] if beyond else []

    def seen_in_training(self) -> list[str]:
        """A line about the rows that are not held out, if there are any."""
        seen, of = self.rows_also_trained, self.rows_kept
        which = "all of them have" if seen == of else f"{seen:,} of {of:,} {self.noun} have"
        return [f"{self.what} data: {which} a prompt that is trained on too: not held out"] if seen else []

    def lines(self) -> list[str]:
        """For people."""
        share = self.trained_tokens / max(self.tokens, 1)
        text = [
            f"{self.what} data: {self.rows_kept:,} of {self.in_files:,} {self.noun} ({self.layout}), "
            f"{self.tokens:,} tokens, {self.trained_tokens:,} of them {self.marked} ({share:.0%})",
            "lengths: " + ", ".join(f"{name} {value:,}" for name, value in self.lengths.items()),
        ]
        text += [*self.beyond_limit(), *self.seen_in_training()]
        if self.rows_truncated:
            text.append(f"{self.rows_truncated:,} {self.noun} cut to {self.max_len:,} tokens (--max_len)")
        if self.rows_over_long:
            text.append(
                f"{self.rows_over_long:,} {self.noun} left out: nothing to learn within {self.max_len:,} tokens "
                "(--max_len)"
            )
        if self.rows_empty:
            text.append(f"{self.rows_empty:,} {self.noun} left out: empty response")
        return text


@dataclass
class PairReport(DataReport):
    rows_equal: int = 0
    """Pairs whose two sides are the same tokens."""
    prompts_shared: int = 0
    """Pairs whose two sides have the same prompt, token by token."""
    tokens_shared: int = 0
    """Tokens that both sides begin with, counted once a pair."""

    noun: ClassVar[str] = "pairs"

    def lines(self) -> list[str]:
        share = self.tokens_shared / max(self.tokens, 1)
        text = super().lines()
        text.append(
            f"{self.prompts_shared:,} pairs share their prompt; {self.tokens_shared:,} tokens ({share:.0%}) need "
            "not be read twice"
        )
        if self.rows_equal:
            text.append(f"{self.rows_equal:,} pairs prefer nothing: chosen and rejected are the same")
        return text


@dataclass
class LabelledReport(DataReport):
    rows_desirable: int = 0

    def lines(self) -> list[str]:
        undesirable = self.rows_kept - self.rows_desirable
        return [*super().lines(), f"{self.rows_desirable:,} answers are desirable, {undesirable:,} are not"]


@dataclass
class StepReport(DataReport):
    labels: dict[str, int] = field(default_factory=dict)
    """How often each label stands at a step; empty when they are probabilities."""

    marked: ClassVar[str] = "steps"

    def lines(self) -> list[str]:
        counts = ", ".join(f"{count:,} x '{label}'" for label, count in self.labels.items())
        return [*super().lines(), f"labels: {counts or 'probabilities'}"]


# ---- Which prompts to evaluate on are trained on too: what is measured on them is not held out.


def count_shared(trained: Iterator[bytes], evaluated: Iterator[bytes]) -> int:
    """How many of the second occur among the first."""
    looked_for = list(evaluated)
    wanted = set(looked_for)
    found = wanted.intersection(trained)
    return sum(beginning in found for beginning in looked_for)


def beginnings(
    ids: np.ndarray, offsets: np.ndarray, marked: np.ndarray | None = None, every: int = 1
) -> Iterator[bytes]:
    """The tokens of every sequence up to the first marked one: its prompt. A text that is marked all over counts as a
    whole. `every`: 2 for pairs, whose sides have one prompt."""
    for begin, end in zip(offsets[:-1:every].tolist(), offsets[1::every].tolist()):
        stop = end
        if marked is not None and (first := int(marked[begin:end].argmax())) > 1:
            stop = begin + first
        yield ids[begin:stop].tobytes()


# ---- From rows to a store, the same way for every job: look in the cache, or render, tokenise, cut and remember
#
# A job brings a renderer (a row becomes text), a collector (text becomes kept sequences) and a store.


Arrays = dict[str, np.ndarray]
AnyReport = TypeVar("AnyReport", bound=DataReport)


class IsDataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


Settings = TypeVar("Settings", bound=IsDataclass)


class Store(Protocol):
    @property
    def fingerprint(self) -> str: ...


class RowCollector(Protocol[AnyReport]):
    """Takes what became of the rows, chunk by chunk, and says what is kept of them."""

    tokenizer: PreTrainedTokenizerBase
    report: AnyReport

    def add(self, renderings: list[Any]) -> None: ...

    def finish(self) -> Arrays: ...


AnyDataset = TypeVar("AnyDataset", bound=Store)


def settings_of(kind: type[Settings], options: object) -> Settings:
    """The fields of a job's options that its tokens depend on; those a job does not have keep their default."""
    names = [field.name for field in dataclasses.fields(kind) if hasattr(options, field.name)]
    return kind(**{name: getattr(options, name) for name in names})


def workers_of(options: object, workers: int | None) -> dict[str, int | None]:
    """How many processes may render: exactly `workers`, or `--num_workers` at most where it is worth their start."""
    return {"workers": workers, "most_workers": getattr(options, "num_workers", None)}


def first_row(rows: Dataset, what: str) -> dict[str, Any]:
    if not len(rows):
        raise UserError(f"the {what} data hold no rows")
    return rows[0]


class Collector(Generic[AnyReport]):
    """Takes renderings, chunk by chunk, and keeps the token sequences there is something to learn from."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_len: int, report: AnyReport):
        self.tokenizer = tokenizer
        self.max_len = max_len
        self.report = report
        self._ids: list[np.ndarray] = []
        self._trained: list[np.ndarray] = []
        self._rows: list[int] = []
        self._seen = 0
        self._numbers: Iterator[int] = iter(())

    def add(self, renderings: list[Any]) -> None:
        present = [place for place, rendering in enumerate(renderings) if rendering is not None]
        self._numbers = iter([self._seen + place for place in present])
        self._seen += len(renderings)
        self.report.rows_empty += len(renderings) - len(present)
        self.add_present([renderings[place] for place in present])

    def add_present(self, renderings: list[Any]) -> None:
        """Calls `keep` once for each of them, in order."""
        raise NotImplementedError

    def keep(self, *sequences: tuple[np.ndarray, np.ndarray]) -> bool:
        """Keeps one row's sequences, cut to `max_len`; or counts why not, if one of them has nothing to learn."""
        number = next(self._numbers)
        if not all(trained.any() for _, trained in sequences):
            self.report.rows_empty += 1
            return False
        if not all(trained[: self.max_len].any() for _, trained in sequences):
            self.report.rows_over_long += 1
            return False
        self._rows.append(number)
        self.report.rows_kept += 1
        self.report.rows_truncated += any(len(ids) > self.max_len for ids, _ in sequences)
        for ids, trained in sequences:
            self._ids.append(ids[: self.max_len])
            self._trained.append(trained[: self.max_len])
        return True

    def finish(self) -> Arrays:
        """The arrays of a TokenDataset, and whatever else the job collects."""
        report = self.report
        if not self._ids:
            raise UserError(
                f"no row of the {report.what} data is left: of {report.rows_read:,}, {report.rows_over_long:,} have "
                f"nothing to learn within {self.max_len:,} tokens (raise --max_len), {report.rows_empty:,} are empty"
            )
        lengths = np.array([len(ids) for ids in self._ids], dtype=np.int64)
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
        trained = np.concatenate(self._trained)
        report.count(trained, lengths)
        rows = np.array(self._rows, dtype=np.int64)
        return {"ids": np.concatenate(self._ids), "trained": trained, "offsets": offsets, "rows": rows}


def build_dataset(
    job: str,
    rows: Dataset,
    renderer: RowRenderer,
    collector: RowCollector[AnyReport],
    store_of: Callable[[Arrays], AnyDataset],
    settings: Any,
    *,
    workers: int | None = None,
    most_workers: int | None = None,
) -> tuple[AnyDataset, AnyReport]:
    """Renders, tokenises and truncates the rows, or finds the result of the same work in the cache."""
    report = collector.report
    renderer.places = locations_of(rows, f"the {report.what} data")
    work = {"job": job, **dataclasses.asdict(settings)}
    key = cache_key(rows.select_columns(renderer.names), collector.tokenizer, work)
    report.rows_available = available(rows)
    if key is not None and (found := _from_cache(key, store_of, report)):
        return found
    chunks = render_all(rows, renderer, workers=workers, most_workers=most_workers)
    for chunk in progress(chunks, -(-len(rows) // CHUNK_ROWS), f"tokenising the {report.what} data"):
        collector.add(chunk)
    arrays = collector.finish()
    store = store_of(arrays)
    if key is not None:
        save_cached(key, arrays, {"fingerprint": store.fingerprint, "report": report.as_dict()})
    return store, report


def _from_cache(
    key: str, store_of: Callable[[Arrays], AnyDataset], report: AnyReport
) -> tuple[AnyDataset, AnyReport] | None:
    found = load_cached(key)
    if found is None:
        return None
    arrays, notes = found
    try:
        store = store_of(arrays)
        fresh = {"what": report.what, "rows_available": report.rows_available}
        known = type(report)(**{**notes["report"], **fresh})
        intact = store.fingerprint == notes["fingerprint"]
    except (TypeError, KeyError, ValueError):
        return None
    return (store, known) if intact else None


def without_first(trained: np.ndarray) -> np.ndarray:
    """The mask without the sequence's first token, which nothing predicts."""
    trained[:1] = False
    return trained


def up_to_answer(ids: np.ndarray, trained: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sequence without what a template writes after the answer's end, so that it ends where the answer does."""
    marked = trained.nonzero()[0]
    end = marked[-1] + 1 if len(marked) else len(ids)
    return ids[:end], trained[:end]


# ---- Tokenised data on disk, in `$TRIMTAB_CACHE/tokens` or `~/.cache/trimtab/tokens`, one folder a key
#
# The key hashes the content of the columns in use (their Arrow bytes, about a gigabyte a second), the tokenizer, its
# chat template and the options that matter, so an edited file or option can never meet an old entry. An entry that is
# broken is made again; a cache that cannot be written is a line of warning. Nothing is ever evicted; deleting the
# folder is safe at any time.

logger = logging.getLogger(__name__)

FORMAT_VERSION = 4
NOTES = "notes.json"
HASH_ROWS = 10_000


def cache_folder() -> Path:
    return Path(os.environ.get("TRIMTAB_CACHE") or Path.home() / ".cache" / "trimtab") / "tokens"


def cache_key(rows: Dataset, tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]) -> str | None:
    """The name of the entry for this work, or None for a tokenizer that cannot be written down (a slow one)."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not tokenizer.is_fast or backend is None:
        return None
    serialised = json.loads(backend.to_str())
    serialised.pop("padding", None)  # left behind by earlier calls, set anew by each
    serialised.pop("truncation", None)
    parts = [
        FORMAT_VERSION,
        transformers.__version__,
        tokenizers.__version__,
        rows_hash(rows),
        type(tokenizer).__name__,
        serialised,
        {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        tokenizer.chat_template,
        settings,
    ]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def rows_hash(rows: Dataset) -> str:
    sink = _HashSink()
    writer = None
    for part in rows.with_format("arrow").iter(batch_size=HASH_ROWS):
        if writer is None:
            # The names of features that Arrow does not know (JSON values) are in the schema's metadata.
            writer = pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), part.schema)
        writer.write_table(part)
    if writer is not None:
        writer.close()
    return sink.digest.hexdigest()


class _HashSink:
    """A file that only remembers the hash of what was written."""

    closed = False

    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return len(data)

    def flush(self) -> None: ...

    def close(self) -> None: ...


def load_cached(name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """(arrays mapped from disk, notes), or None if there is no entry or it cannot be read."""
    entry = cache_folder() / name
    try:
        notes = json.loads((entry / NOTES).read_text())
        return {array: np.load(entry / f"{array}.npy", mmap_mode="r") for array in notes["arrays"]}, notes
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


def save_cached(name: str, arrays: dict[str, np.ndarray], notes: dict[str, Any]) -> None:
    """A reader sees a whole entry or none."""
    entry = cache_folder() / name
    try:
        # An entry that is there could not be used: else this one would not have been made.
        with replacing(entry) as beside:
            beside.mkdir()
            for array, values in arrays.items():
                np.save(beside / f"{array}.npy", values)
            (beside / NOTES).write_text(json.dumps({**notes, "arrays": list(arrays)}))
    except OSError as error:
        if not entry.exists():  # else another process was first with the same content
            logger.warning("tokenised data are not cached: cannot write %s (%s)", entry.parent, reason(error))
