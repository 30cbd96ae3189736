"""The user's own data files: where a row stands in them, why one cannot be read, and how much one may unpack to.

Data sets have no room for where their rows stand, so a note of it is kept beside them for as long as they live. Looking
for a line reads the file again; that happens only when there is something to complain about.
"""

import csv
import gzip
import json
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO, TypeVar

import datasets
import pyarrow
import pyarrow.ipc
from datasets import Dataset
from pyarrow import parquet

from trimtab.errors import UserError, error_chain

Result = TypeVar("Result")


class RowLocations(Protocol):
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
class SelectedRows:
    """Rows that are these rows of others."""

    of: RowLocations
    rows: Sequence[int]

    def names(self, rows: Sequence[int]) -> list[str]:
        return self.of.names([int(self.rows[row]) for row in rows])


@dataclass(frozen=True)
class Joined:
    """Rows of several, one after the other."""

    parts: tuple[RowLocations, ...]
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
        return SelectedRows(self.joined, interleave(numbers, self.weights, self.seed)["row"]).names(rows)


def interleave(parts: list[Dataset], weights: Sequence[float], seed: int) -> Dataset:
    return datasets.interleave_datasets(
        parts, probabilities=list(weights), seed=seed, stopping_strategy="first_exhausted"
    )


_known: weakref.WeakKeyDictionary[Dataset, RowLocations] = weakref.WeakKeyDictionary()
_available: weakref.WeakKeyDictionary[Dataset, int] = weakref.WeakKeyDictionary()


def remember(rows: Dataset, places: RowLocations | None = None, *, available: int | None = None) -> Dataset:
    """Note where the rows stand, and how many there are where these are the first of them."""
    if places is not None:
        _known[rows] = places
    if available is not None:
        _available[rows] = available
    return rows


def available(rows: Dataset) -> int:
    """How many rows their files hold."""
    return _available.get(rows, len(rows))


def locations_of(rows: Dataset, what: str) -> RowLocations:
    """Where the rows stand; `what` ("the train data") is the name where the place is unknown."""
    return _known.get(rows) or Numbered(what)


def located(action: Callable[[str], Result], row: int, places: RowLocations) -> Result:
    """What the action on a row gives. It is told where the row stands, in the user's words only if it complains."""
    try:
        return action(f"row {row + 1}")
    except UserError:
        return action(places.names([row])[0])


def joined(parts: Sequence[Dataset], what: str) -> Joined:
    return Joined(tuple(locations_of(part, what) for part in parts), tuple(map(len, parts)))


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
    if kind == "parquet":
        return parquet.read_metadata(path).num_rows
    with pyarrow.memory_map(str(path)) as source:
        return pyarrow.ipc.open_stream(source).read_all().num_rows


# ---- Why a data file could not be read, in one line: the dataset library says that it failed, this says where.


FAULTS_SHOWN = 200  # characters of a foreign message


def first_line(error: BaseException) -> str:
    """The most telling line of an exception and its causes, short enough for one line of output."""
    error = list(error_chain(error, contexts=False))[-1]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= FAULTS_SHOWN else text[: FAULTS_SHOWN - 3] + "..."


def open_text(path: Path, newline: str | None = None) -> TextIO:
    opener = gzip.open if path.suffix == ".gz" else open
    return opener(path, "rt", encoding="utf-8", newline=newline)


def read_text(path: Path) -> str:
    with open_text(path) as file:
        return file.read()


def json_fault(path: Path) -> str | None:
    """Where a JSON or JSON-lines file goes wrong ("file, line 3: ..."), or None if every line is an object."""
    try:
        text = read_text(path)
    except UnicodeDecodeError as error:
        return f"{path} is not UTF-8 text (byte {error.start})"
    except (OSError, EOFError) as error:
        return f"{path} cannot be read: {first_line(error)}"
    if text.lstrip().startswith("["):
        return _array_fault(path, text)
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            if number == 1 and _is_one_object(text):
                return None
            return f"{path}, line {number}: malformed JSON ({error.msg}, column {error.colno})"
        if not isinstance(value, dict):
            return f"{path}, line {number}: {_kind(value)} where an object like {{...}} is needed"
    return None


def _array_fault(path: Path, text: str) -> str | None:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        return f"{path}, line {error.lineno}: malformed JSON ({error.msg}, column {error.colno})"
    for number, value in enumerate(values, start=1):
        if not isinstance(value, dict):
            return f"{path}, item {number}: {_kind(value)} where an object like {{...}} is needed"
    return None


def _is_one_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except json.JSONDecodeError:
        return False


def _kind(value: object) -> str:
    names = {list: "a list", str: "a string", bool: "a truth value", int: "a number", float: "a number"}
    return names.get(type(value), "null" if value is None else type(value).__name__)


# ---- Files that hold far more than they weigh: a few megabytes of Parquet or gzip may unpack to more than a disk
#
# They are read piece by piece, never a row group at once, and not beyond a limit; where only the first rows of a
# Parquet file are wanted, only those are.

LIMIT_VARIABLE = "TRIMTAB_MAX_UNPACKED_GIB"
AT_LEAST = 2**30  # bytes that any files may unpack to,
TIMES = 50  # or this many times their compressed size: text grows 3 to 10 times
GZIP_TIMES = 1032  # the most that gzip can do
ROWS_AT_ONCE = 256
BYTES_AT_ONCE = 2**20


class Unpacked:
    """Counts what comes out of files, and stops at the limit."""

    def __init__(self, files: list[Path]):
        self.files, self.packed = files, sum(path.stat().st_size for path in files)
        self.limit = _limit() or max(AT_LEAST, TIMES * self.packed)
        self.size = 0

    def add(self, size: int) -> None:
        self.size += size
        if self.size > self.limit:
            named = str(self.files[0]) if len(self.files) == 1 else f"{len(self.files)} files such as {self.files[0]}"
            raise UserError(
                f"{named}: {_spoken(self.packed)} on disk, but more than {_spoken(self.limit)} unpacked; if that is "
                f"right, set the environment variable {LIMIT_VARIABLE} to as many GiB as it may be"
            )


def load_within_limit(
    kind: str, data_files: dict[str, list[str]], files: list[Path], **reading: Any
) -> dict[str, Dataset]:
    """What `datasets.load_dataset` reads from these files; `reading` is for the reader of their kind."""
    for path in files:
        if path.suffix == ".gz":
            _check_gzip(path)
    if kind == "parquet":
        reading["batch_size"] = ROWS_AT_ONCE
    builder = datasets.load_dataset_builder(kind, data_files=data_files, **reading)
    generate, unpacked = builder._generate_tables, Unpacked(files)

    def counted(*given: Any, **named: Any) -> Iterator[tuple[Any, pyarrow.Table]]:
        for key, table in generate(*given, **named):
            unpacked.add(table.nbytes)
            yield key, table

    builder._generate_tables = counted
    try:
        builder.download_and_prepare()
    except datasets.exceptions.DatasetGenerationError as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise
    return dict(builder.as_dataset())


def first_rows(path: Path, count: int) -> tuple[Dataset, int] | None:
    """The first rows of a Parquet file and how many it has; None: no more than that, or it cannot be read so."""
    try:
        file = parquet.ParquetFile(path)
        if file.metadata.num_rows <= count:
            return None
        unpacked, batches, rows = Unpacked([path]), [], 0
        for batch in file.iter_batches(batch_size=min(count, ROWS_AT_ONCE)):
            unpacked.add(batch.nbytes)
            batches.append(batch)
            rows += len(batch)
            if rows >= count:
                break
        features = datasets.Features.from_arrow_schema(file.schema_arrow)
        table = pyarrow.Table.from_batches(batches).slice(0, count).cast(features.arrow_schema)
    except (pyarrow.ArrowException, OSError, ValueError):
        return None  # which the dataset library will explain
    return Dataset(datasets.table.InMemoryTable(table)), file.metadata.num_rows


def _check_gzip(path: Path) -> None:
    unpacked = Unpacked([path])
    if unpacked.packed * GZIP_TIMES <= unpacked.limit:
        return
    with gzip.open(path, "rb") as file:
        while piece := file.read(BYTES_AT_ONCE):
            unpacked.add(len(piece))


def _limit() -> int | None:
    word = os.environ.get(LIMIT_VARIABLE)
    try:
        return None if not word else int(float(word) * 2**30)
    except (ValueError, OverflowError):
        raise UserError(f"{LIMIT_VARIABLE} is {word!r}: it must be a number of GiB") from None


def _spoken(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
