import gzip
import json

import datasets
import pytest

from tests.data.rows import chosen, load, write_jsonl
from trimtab.data.data_files import locations_of
from trimtab.data.examples import build_sft_dataset
from trimtab.errors import UserError

GOOD, BAD = {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None}
OPTIONS = chosen(max_len=8)


def complaint(rows, tokenizer):
    with pytest.raises(UserError) as caught:
        build_sft_dataset(rows, tokenizer, OPTIONS)
    return str(caught.value)


def test_a_complaint_names_file_and_line_in_a_mixture_of_files(tmp_path, make_tokenizer):
    first = write_jsonl(tmp_path / "a.jsonl", [GOOD] * 5)
    second = write_jsonl(tmp_path / "b.jsonl", [GOOD] * 3 + [BAD], blank_lines=2)
    rows = load(f"{first},{second}")
    assert complaint(rows, make_tokenizer()).startswith(f"{second}, line 6: column 'completion' holds nothing")


def test_lines_are_right_in_every_kind_of_file(tmp_path):
    (tmp_path / "a.csv").write_text('prompt,completion\n"two\nlines",x\ny,z\n')
    (tmp_path / "a.json").write_text(json.dumps([GOOD, GOOD]))
    (tmp_path / "b.json").write_text(json.dumps(GOOD, indent=1))
    (tmp_path / "a.txt").write_text("x\ny\n")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'\n{"a": 1}\n{"a": 2}\n'))
    datasets.Dataset.from_list([GOOD, GOOD]).to_parquet(tmp_path / "a.parquet")
    wanted = {"a.csv": "line 4", "a.json": "item 2", "a.jsonl.gz": "line 3", "a.parquet": "row 2", "a.txt": "line 2"}
    for name, words in wanted.items():
        assert locations_of(load(tmp_path / name), "").names([1]) == [f"{tmp_path / name}, {words}"]
    assert locations_of(load(tmp_path / "b.json"), "").names([0]) == [f"{tmp_path / 'b.json'}, row 1"]


def test_slices_folders_and_first_rows_keep_their_places(tmp_path):
    write_jsonl(tmp_path / "d" / "a.jsonl", [{"text": f"a{i}"} for i in range(3)])
    write_jsonl(tmp_path / "d" / "b.jsonl", [{"text": f"b{i}"} for i in range(3)])
    rows = load(tmp_path / "d", split="train[2:5]", max_samples=2)
    assert list(rows["text"]) == ["a2", "b0"]
    assert locations_of(rows, "").names([1, 0]) == [f"{tmp_path}/d/b.jsonl, line 1", f"{tmp_path}/d/a.jsonl, line 3"]


def test_interleaved_rows_are_found_in_their_own_files(tmp_path):
    files = [
        write_jsonl(tmp_path / f"{k}.jsonl", [{"text": f"{k}.jsonl, line {i}"} for i in range(1, 9)]) for k in "ab"
    ]
    rows = load(",".join(map(str, files)), "0.5,0.5")
    named = locations_of(rows, "").names(range(len(rows)))
    assert named == [f"{tmp_path}/{text}" for text in rows["text"]] and len({n[:-1] for n in named}) == 2


def test_a_store_knows_the_row_of_every_sequence(tmp_path, make_tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", [GOOD, {**GOOD, "completion": ""}, {**GOOD, "prompt": "long " * 9}, GOOD])
    for _ in range(2):  # made, and from the cache
        store, _ = build_sft_dataset(load(path), make_tokenizer(), OPTIONS)
        assert store.rows.tolist() == [0, 3]


def test_counts_name_the_rows_of_the_files(tmp_path, make_tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", [GOOD] * 5)
    for most, kept in ((2, 2), (1000, 10), (2, 2)):  # the last one comes from the cache
        _, report = build_sft_dataset(load(f"{path},{path}", max_samples=most), make_tokenizer(), OPTIONS)
        assert report.lines()[0].startswith(f"train data: {kept} of 10 rows")
