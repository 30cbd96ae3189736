"""A small file that unpacks to a large one is read as far as needed, or refused in one line."""

import gzip
import resource

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from tests.data.rows import load
from trimtab.data import data_files
from trimtab.data.data_files import available
from trimtab.errors import UserError

ROWS, LETTERS = 3000, 100_000


@pytest.fixture(scope="module")
def bomb(tmp_path_factory):
    """Megabytes that unpack to 300: one long text, over and over, in one row group."""
    path = tmp_path_factory.mktemp("bomb") / "rows.parquet"
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * ROWS), pyarrow.array(["x" * LETTERS]))
    table = pyarrow.table({"number": pyarrow.array(range(ROWS)), "text": texts.cast(pyarrow.string())})
    parquet.write_table(table, path, compression="zstd")
    assert path.stat().st_size < 2**20
    return path


@pytest.fixture
def small_limit(monkeypatch, tmp_path):
    monkeypatch.setattr(data_files, "AT_LEAST", 2**24)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_only_the_rows_that_are_wanted_are_unpacked(bomb, small_limit):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = load(bomb, max_samples=32)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert rows["number"][:] == list(range(32)) and len(rows[31]["text"]) == LETTERS and available(rows) == ROWS
    assert grown < ROWS * LETTERS / 2, f"{grown} bytes"


def test_a_parquet_file_beyond_the_limit_is_refused_with_its_size(bomb, small_limit):
    with pytest.raises(UserError, match=r"rows.parquet: 0\.\d MiB on disk, but more than 16.0 MiB unpacked; .*_GIB"):
        load(bomb, max_samples=None)


def test_the_limit_can_be_set(bomb, small_limit, monkeypatch):
    monkeypatch.setenv(data_files.LIMIT_VARIABLE, "1")
    assert len(load(bomb, max_samples=None)) == ROWS
    monkeypatch.setenv(data_files.LIMIT_VARIABLE, "much")
    with pytest.raises(UserError, match="TRIMTAB_MAX_UNPACKED_GIB is 'much'"):
        load(bomb, max_samples=None)


@pytest.mark.parametrize(
    "ending, head, row", [("jsonl", b"", b'{"text": "%s"}\n'), ("csv", b"number,text\n", b"1,%s\n")]
)
def test_a_gzip_file_beyond_the_limit_is_refused_before_it_is_unpacked(small_limit, tmp_path, ending, head, row):
    path = tmp_path / f"rows.{ending}.gz"
    with gzip.open(path, "wb") as file:
        file.write(head)
        for _ in range(40):
            file.write(row % (b"x" * 2**20))
    with pytest.raises(UserError, match=rf"rows.{ending}.gz: 0\.\d MiB on disk, but more than 16.0 MiB unpacked"):
        load(path, max_samples=None)


@pytest.mark.parametrize("most", [2, 5, 6, None])
def test_rows_of_every_type_are_the_same_however_many_are_read(tmp_path, most):
    rows = [{"a": number, "b": [{"role": "user", "content": str(number)}], "c": None} for number in range(5)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    found = load(tmp_path / "rows.parquet", max_samples=most)
    assert list(found) == rows[:most] and found.features["a"] == datasets.Value("int64")
