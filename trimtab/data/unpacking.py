"""Files that hold far more than they weigh: a few megabytes of Parquet or gzip may unpack to more than a disk.

They are read piece by piece, never a row group at once, and not beyond a limit; where only the first rows of a Parquet
file are wanted, only those are.
"""

import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
from datasets import Dataset
from pyarrow import parquet

from trimtab.errors import UserError

LIMIT_VARIABLE = "TRIMTAB_MAX_UNPACKED_GIB"
AT_LEAST = 2**30  # bytes that any files may unpack to,
TIMES = 50  # or so many times what they weigh: text gains 3 to 10 times
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
