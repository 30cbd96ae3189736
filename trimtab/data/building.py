"""From rows to a store, the same way for every job: look in the cache, or render, tokenise, cut and remember.

A job brings a renderer (a row becomes text), a collector (text becomes kept sequences) and a store.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trimtab.data import token_cache
from trimtab.data.data_report import DataReport
from trimtab.data.places import available, places_of
from trimtab.data.progress import progress
from trimtab.data.rendering import CHUNK_ROWS, RowRenderer, render_all
from trimtab.errors import UserError

Arrays = dict[str, np.ndarray]
AnyReport = TypeVar("AnyReport", bound=DataReport)


class IsDataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


Settings = TypeVar("Settings", bound=IsDataclass)


class Store(Protocol):
    @property
    def fingerprint(self) -> str: ...


class Rows(Protocol[AnyReport]):
    """Takes what became of the rows, chunk by chunk, and says what is kept of them."""

    tokenizer: PreTrainedTokenizerBase
    report: AnyReport

    def add(self, renderings: list[Any]) -> None: ...

    def finish(self) -> Arrays: ...


AnyStore = TypeVar("AnyStore", bound=Store)


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
        """The arrays of a TokenStore, and whatever else the job collects."""
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


def build_store(
    job: str,
    rows: Dataset,
    renderer: RowRenderer,
    collector: Rows[AnyReport],
    store_of: Callable[[Arrays], AnyStore],
    settings: Any,
    *,
    workers: int | None = None,
    most_workers: int | None = None,
) -> tuple[AnyStore, AnyReport]:
    """Renders, tokenises and truncates the rows, or finds the result of the same work in the cache."""
    report = collector.report
    renderer.places = places_of(rows, f"the {report.what} data")
    work = {"job": job, **dataclasses.asdict(settings)}
    key = token_cache.key(rows.select_columns(renderer.names), collector.tokenizer, work)
    report.rows_available = available(rows)
    if key is not None and (found := _from_cache(key, store_of, report)):
        return found
    chunks = render_all(rows, renderer, workers=workers, most_workers=most_workers)
    for chunk in progress(chunks, -(-len(rows) // CHUNK_ROWS), f"tokenising the {report.what} data"):
        collector.add(chunk)
    arrays = collector.finish()
    store = store_of(arrays)
    if key is not None:
        token_cache.save(key, arrays, {"fingerprint": store.fingerprint, "report": report.as_dict()})
    return store, report


def _from_cache(
    key: str, store_of: Callable[[Arrays], AnyStore], report: AnyReport
) -> tuple[AnyStore, AnyReport] | None:
    found = token_cache.load(key)
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
