"""Where a row stands in the user's own files, so that a complaint can name file and line.

Data sets have no room for such a note, so it is kept beside them for as long as they live. Looking for a line reads the
file again; that happens only when there is something to complain about.
"""

import csv
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO, TypeVar

import datasets
from datasets import Dataset

from trimtab.data.faults import open_text
from trimtab.errors import UserError

Result = TypeVar("Result")


class Places(Protocol):
    def names(self, rows: Sequence[int]) -> list[str]:
        """Where each of these rows (counted from 0) stands."""
        ...


@dataclass(frozen=True)
class Numbered:
    """Rows of something that has no lines."""

    what: str

    def names(self, rows: Sequence[int]) -> list[str]:
        return [f"row {row + 1} of {self.what}" for row in rows]


@dataclass(frozen=True)
class InFiles:
    """Rows of files of one kind, read one after the other."""

    kind: str
    files: tuple[Path, ...]

    def names(self, rows: Sequence[int]) -> list[str]:
        found: dict[int, str] = {}
        before = 0
        for path in self.files:
            here, count = _look(path, self.kind, {row - before for row in rows})
            found |= {before + row: f"{path}, {words}" for row, words in here.items()}
            before += count
            if len(found) == len(set(rows)):
                break
        return [found.get(row, f"row {row + 1} of {self.files[0]}") for row in rows]


@dataclass(frozen=True)
class Chosen:
    """Rows that are these rows of others."""

    of: Places
    rows: Sequence[int]

    def names(self, rows: Sequence[int]) -> list[str]:
        return self.of.names([int(self.rows[row]) for row in rows])


@dataclass(frozen=True)
class Joined:
    """Rows of several, one after the other."""

    parts: tuple[Places, ...]
    lengths: tuple[int, ...]

    def names(self, rows: Sequence[int]) -> list[str]:
        found: dict[int, str] = {}
        before = 0
        for part, length in zip(self.parts, self.lengths):
            here = [row for row in rows if before <= row < before + length]
            if here:
                found |= dict(zip(here, part.names([row - before for row in here])))
            before += length
        return [found[row] for row in rows]


@dataclass(frozen=True)
class Interleaved:
    """Rows of several, drawn in turn by chance; the drawing is repeated with their numbers."""

    joined: Joined
    weights: tuple[float, ...]
    seed: int

    def names(self, rows: Sequence[int]) -> list[str]:
        ends = [sum(self.joined.lengths[: k + 1]) for k in range(len(self.weights))]
        numbers = [
            Dataset.from_dict({"row": range(end - length, end)}) for end, length in zip(ends, self.joined.lengths)
        ]
        return Chosen(self.joined, interleave(numbers, self.weights, self.seed)["row"]).names(rows)


def interleave(parts: list[Dataset], weights: Sequence[float], seed: int) -> Dataset:
    return datasets.interleave_datasets(
        parts, probabilities=list(weights), seed=seed, stopping_strategy="first_exhausted"
    )


_known: weakref.WeakKeyDictionary[Dataset, Places] = weakref.WeakKeyDictionary()
_available: weakref.WeakKeyDictionary[Dataset, int] = weakref.WeakKeyDictionary()


def remember(rows: Dataset, places: Places | None = None, *, available: int | None = None) -> Dataset:
    """Note where the rows stand, and how many there are where these are the first of them."""
    if places is not None:
        _known[rows] = places
    if available is not None:
        _available[rows] = available
    return rows


def available(rows: Dataset) -> int:
    """How many rows their files hold."""
    return _available.get(rows, len(rows))


def places_of(rows: Dataset, what: str) -> Places:
    """Where the rows stand; `what` ("the train data") is said where nobody knows."""
    return _known.get(rows) or Numbered(what)


def located(action: Callable[[str], Result], row: int, places: Places) -> Result:
    """What the action on a row gives. It is told where the row stands, in the user's words only if it complains."""
    try:
        return action(f"row {row + 1}")
    except UserError:
        return action(places.names([row])[0])


def joined(parts: Sequence[Dataset], what: str) -> Joined:
    return Joined(tuple(places_of(part, what) for part in parts), tuple(map(len, parts)))


def _look(path: Path, kind: str, wanted: set[int]) -> tuple[dict[int, str], int]:
    """The words for the wanted rows that a file holds, and how many rows it holds (as far as was read)."""
    if kind in ("parquet", "arrow"):
        count = _count(path, kind)
        return {row: f"row {row + 1}" for row in wanted if 0 <= row < count}, count
    found: dict[int, str] = {}
    count = 0
    with open_text(path, newline="" if kind == "csv" else None) as file:
        for words in _rows_in(file, kind):
            if count in wanted:
                found[count] = words
            count += 1
            if count > max(wanted):
                break
    return found, count


def _rows_in(file: TextIO, kind: str) -> Iterator[str]:
    """The words for every row of a text file."""
    if kind == "csv":
        reader = csv.reader(file)
        next(reader, None)
        before = reader.line_num
        for record in reader:
            if record:
                yield f"line {before + 1}"
            before = reader.line_num
        return
    lines = enumerate(file, start=1)
    if kind == "text":
        yield from (f"line {number}" for number, _ in lines)
        return
    row = 0
    for number, line in lines:
        if row == 0 and line.lstrip().startswith("["):
            yield from (f"item {item}" for item in range(1, 1 + len(json.loads(line + file.read()))))
            return
        if line.strip():
            row += 1
            # One object may stand on several lines; what has no line of its own has a number.
            yield f"line {number}" if line.rstrip().endswith("}") and line.lstrip().startswith("{") else f"row {row}"


def _count(path: Path, kind: str) -> int:
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    if kind == "parquet":
        return pyarrow.parquet.read_metadata(path).num_rows
    with pyarrow.memory_map(str(path)) as source:
        return pyarrow.ipc.open_stream(source).read_all().num_rows
