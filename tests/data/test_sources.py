import gzip
import json

import datasets
import pytest

from tests.data.rows import chosen, load, write_jsonl
from trimtab.data.sources import load_evaluation_rows
from trimtab.errors import UserError


def numbered(start, count):
    return [{"text": str(number)} for number in range(start, start + count)]


def texts(rows):
    return list(rows["text"])


def evaluation(dataset, **changes):
    return load_evaluation_rows(chosen(dataset=str(dataset), **changes))


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "arrow", "jsonl.gz", "json.gz"])
def test_every_local_file_type_gives_the_same_rows(tmp_path, kind):
    rows = [{"text": "a"}, {"text": "b {}"}]
    path = tmp_path / f"data.{kind}"
    whole = datasets.Dataset.from_list(rows)
    if kind == "jsonl":
        write_jsonl(path, rows)
    elif kind == "json":
        path.write_text(json.dumps(rows, indent=1))
    elif kind.endswith(".gz"):
        lines = json.dumps(rows) if kind.startswith("json.") else "\n".join(map(json.dumps, rows))
        path.write_bytes(gzip.compress(lines.encode()))
    elif kind == "arrow":
        whole.save_to_disk(tmp_path / "saved")
        next((tmp_path / "saved").glob("*.arrow")).rename(path)
    else:
        getattr(whole, f"to_{kind}")(str(path))
    assert load(path).to_list() == rows


def test_csv_keeps_the_text_that_stands_there(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('text,answer,note\nx,04,NA\n"two\nlines",1.50,\ny,true,null\n')
    assert load(path).to_list() == [
        {"text": "x", "answer": "04", "note": "NA"},
        {"text": "two\nlines", "answer": "1.50", "note": None},
        {"text": "y", "answer": "true", "note": "null"},
    ]


def test_csv_files_of_one_folder_may_have_different_columns(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.csv").write_text("text,more\nx,1\n")
    (tmp_path / "d" / "b.csv").write_text("text\ny\n")
    assert load(tmp_path / "d").to_list() == [{"text": "x", "more": "1"}, {"text": "y", "more": None}]


@pytest.mark.parametrize("name", ["a[1].jsonl", "b*.jsonl", "c?.jsonl", "[d] (2).jsonl"])
def test_names_that_look_like_patterns_are_names(tmp_path, name):
    folder = tmp_path / "x [1]"
    path = write_jsonl(folder / name, numbered(0, 1))
    write_jsonl(folder / name.replace("*", "other").replace("?", "x"), numbered(0, 1))
    write_jsonl(path, numbered(7, 1))
    assert texts(load(path)) == ["7"]
    assert "7" in texts(load(folder))


def test_an_edited_file_is_read_again(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", numbered(0, 2))
    assert texts(load(path)) == ["0", "1"]
    write_jsonl(path, numbered(5, 2))
    assert texts(load(path)) == ["5", "6"]


def test_folder_files_become_splits_whatever_their_types(tmp_path):
    write_jsonl(tmp_path / "d" / "train.jsonl", numbered(0, 2))
    (tmp_path / "d" / "more_train.csv").write_text("text\nx\ny\n")
    write_jsonl(tmp_path / "d" / "test" / "part.jsonl", numbered(9, 1))
    (tmp_path / "d" / "LICENSE.txt").write_text("do what you like")
    assert sorted(map(str, texts(load(tmp_path / "d")))) == ["0", "1", "x", "y"]
    assert texts(load(tmp_path / "d", split="test")) == ["9"]


def test_saved_data_sets_are_loaded_with_and_without_splits(tmp_path):
    whole = datasets.Dataset.from_list(numbered(0, 3))
    whole.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=whole, test=whole.select([2])).save_to_disk(tmp_path / "two")
    assert texts(load(tmp_path / "one")) == ["0", "1", "2"]
    assert texts(load(tmp_path / "two", split="test")) == ["2"]


def test_type_at_folder_reads_only_that_type(tmp_path):
    write_jsonl(tmp_path / "d" / "a.jsonl", numbered(0, 1))
    (tmp_path / "d" / "b.csv").write_text("text\nx\n")
    (tmp_path / "d" / "c.txt").write_text("line one\nline two\n")
    assert texts(load(f"json@{tmp_path / 'd'}")) == ["0"]
    assert texts(load(f"csv@{tmp_path / 'd'}")) == ["x"]
    assert texts(load(f"text@{tmp_path / 'd'}")) == ["line one", "line two"]


@pytest.mark.parametrize(
    "body",
    [
        "def load_dataset(split):\n    return [{'text': split}]",
        "def load_dataset(split):\n    yield {'text': split}",
        "import datasets\ndef load_dataset(split):\n    return datasets.Dataset.from_list([{'text': split}])",
        "import datasets\ndef load_dataset(split):\n"
        "    return datasets.DatasetDict({s: datasets.Dataset.from_list([{'text': s}]) for s in ('train', 'test')})",
        "import datasets\nclass Mine(datasets.GeneratorBasedBuilder):\n"
        "    def _info(self):\n"
        "        return datasets.DatasetInfo(features=datasets.Features(text=datasets.Value('string')))\n"
        "    def _split_generators(self, manager):\n"
        "        return [datasets.SplitGenerator(name=s, gen_kwargs={'s': s}) for s in ('train', 'test')]\n"
        "    def _generate_examples(self, s):\n"
        "        yield 0, {'text': s}\n",
    ],
    ids=["list", "generator", "dataset", "dict", "builder"],
)
def test_python_loaders_run_and_say_so(tmp_path, caplog, body):
    path = tmp_path / "loader.py"
    path.write_text(body + "\n")
    assert texts(load(path, split="test")) == ["test"]
    assert "loader.py" in caplog.text and "Python code" in caplog.text


def test_a_python_loader_runs_once_for_training_and_evaluation_and_again_for_the_next_run(tmp_path):
    path, calls = tmp_path / "loader.py", tmp_path / "calls"
    path.write_text(
        f"def load_dataset(split):\n    open({str(calls)!r}, 'a').write('x')\n"
        "    return {s: [{'text': s}] for s in ('train', 'test')}\n"
    )
    for runs in ("x", "xx"):
        assert texts(load(path)) == ["train"]
        assert texts(evaluation(path)) == ["test"]
        assert calls.read_text() == runs


@pytest.mark.parametrize(
    "body, words",
    [
        ("x = 1", "defines neither"),
        ("def load_dataset(split):\n    raise KeyError('nope')", "failed: 'nope'"),
        ("def load_dataset(split):\n    return [1]", "row 1 is a int"),
    ],
)
def test_broken_python_loaders_are_one_line(tmp_path, body, words):
    path = tmp_path / "loader.py"
    path.write_text(body + "\n")
    with pytest.raises(UserError, match=words):
        load(path)


def test_sources_are_concatenated_in_order_and_capped_each_and_together(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", numbered(0, 5))
    second = write_jsonl(tmp_path / "b.jsonl", numbered(100, 5))
    assert texts(load(f"{first}, {second}")) == [*"01234", "100", "101", "102", "103", "104"]
    assert texts(load(f"{first},{second}", max_samples=3)) == ["0", "1", "2"]
    assert texts(load(f"{first},{second}", max_samples=7)) == [*"01234", "100", "101"]


def test_probabilities_interleave_by_seed(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", numbered(0, 200))
    second = write_jsonl(tmp_path / "b.jsonl", numbered(1000, 200))
    both = f"{first},{second}"
    mixed = texts(load(both, "0.9,0.1", seed=1))
    assert mixed == texts(load(both, "0.9,0.1", seed=1))
    assert mixed != texts(load(both, "0.9,0.1", seed=2))
    share = sum(len(text) < 4 for text in mixed) / len(mixed)
    assert 0.8 < share < 0.97
    assert [text for text in mixed if len(text) < 4] == [str(n) for n in range(200)]


@pytest.mark.parametrize("text", ["0.5", "0.5,0.9", "-0.5,1.5", "half,half"])
def test_bad_probabilities_are_refused(tmp_path, text):
    path = write_jsonl(tmp_path / "a.jsonl", numbered(0, 2))
    with pytest.raises(UserError, match="--dataset_probs"):
        load(f"{path},{path}", text)


def test_sources_with_other_columns_and_types_keep_what_each_row_says(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "x"}], "id": 1}])
    second = write_jsonl(
        tmp_path / "b.jsonl", [{"messages": [{"content": "y", "role": "user", "name": "z"}], "id": "b", "more": True}]
    )
    rows = load(f"{first},{second}").to_list()
    assert rows[0] == {"messages": [{"role": "user", "content": "x"}], "id": 1, "more": None}
    assert rows[1] == {"messages": [{"content": "y", "role": "user", "name": "z"}], "id": "b", "more": True}


def test_slices_of_a_split_are_understood(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", numbered(0, 10))
    assert texts(load(path, split="train[:20%]")) == ["0", "1"]


def test_evaluation_uses_the_test_split_if_there_is_one(tmp_path):
    write_jsonl(tmp_path / "both" / "train.jsonl", numbered(0, 2))
    write_jsonl(tmp_path / "both" / "test.jsonl", numbered(7, 2))
    alone = write_jsonl(tmp_path / "test.jsonl", numbered(0, 2))
    assert texts(evaluation(tmp_path / "both")) == ["7", "8"]
    assert texts(evaluation(f"{alone},{tmp_path / 'both'}", eval_max_samples=1)) == ["7"]
    assert evaluation(alone) is None
    assert evaluation(tmp_path / "both", dataset_split="test") is None


def test_an_evaluation_set_is_read_from_its_own_split(tmp_path):
    train = write_jsonl(tmp_path / "train.jsonl", numbered(0, 2))
    held_out = write_jsonl(tmp_path / "gsm_test.jsonl", numbered(4, 2))
    for split in ("train", "test"):
        assert texts(evaluation(train, eval_dataset=str(held_out), eval_split=split)) == ["4", "5"]


def error(source, **arguments):
    with pytest.raises(UserError) as caught:
        load(source, **arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_missing_files_are_named(tmp_path):
    assert "nothing.jsonl" in error(tmp_path / "nothing.jsonl")
    assert "no such file" in error("./nowhere/at/all")
    assert "loader.py" in error("loader.py")


@pytest.mark.parametrize(
    "flag, split_flag",
    [
        ("--pretrain_data", "--pretrain_split"),
        ("--heldout_prompt_data", "--prompt_split"),
        ("--file_path", "--file_path"),
    ],
)
def test_a_mistake_is_told_by_the_option_that_holds_it(tmp_path, flag, split_flag):
    assert error(tmp_path / "nothing.jsonl", flag=flag).endswith(f"(see {flag})")
    source = write_jsonl(tmp_path / "text.jsonl", numbered(0, 1))
    assert error(source, split="dev", flag=flag).endswith(f"found train (see {split_flag})")


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("a.jsonl", '{"a": 1}\n\n{"a": \n{"a": 2}\n', "line 3: malformed JSON"),
        ("a.jsonl", '{"a": 1}\n[1, 2]\n', "line 2: a list where an object"),
        ("a.json", '[{"a": 1},\n {"a": }]', "line 2: malformed JSON"),
        ("a.json", '[{"a": 1}, 7]', "item 2: a number"),
        ("a.jsonl", "", "is empty"),
        ("a.json", " \n\n", "is empty"),
        ("a.csv", "text\n", "is empty"),
        ("a.csv", 'x,y\n1,2\n1,2,3,4\n"', "a.csv"),
        ("a.parquet", "not a parquet file", "a.parquet"),
        ("a.xyz", "?", "known file types"),
    ],
)
def test_unreadable_files_are_one_line_with_the_place(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_text(content)
    message = error(path)
    assert words in message and str(path) in message


def test_malformed_compressed_json_is_found_by_line(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\nnonsense\n'))
    assert "line 2: malformed JSON" in error(path)


def test_text_that_is_not_utf8_is_said_so(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": "\xff\xfe"}\n')
    assert "a.jsonl is not UTF-8 text (byte 7)" in error(path)


def test_an_unknown_split_is_answered_with_those_found(tmp_path):
    write_jsonl(tmp_path / "d" / "train.jsonl", numbered(0, 1))
    write_jsonl(tmp_path / "d" / "test.jsonl", numbered(0, 1))
    assert "no split 'dev': found test, train" in error(tmp_path / "d", split="dev")


def test_a_folder_without_data_is_refused(tmp_path):
    (tmp_path / "d").mkdir()
    assert "no data in" in error(tmp_path / "d")


def test_a_hub_name_without_a_hub_fails_in_one_line():
    assert "cannot load 'org/name': no such local path, and the hub cannot be reached" in error("org/name")


def test_loading_prints_nothing(tmp_path, capfd):
    load(write_jsonl(tmp_path / "a.jsonl", numbered(0, 2)))
    (tmp_path / "b.jsonl").write_text("{nonsense")
    error(tmp_path / "b.jsonl")
    assert capfd.readouterr() == ("", "")


def test_a_lone_file_is_its_own_test_split(tmp_path):
    write_jsonl(tmp_path / "heldout.jsonl", numbered(0, 3))
    assert len(load(tmp_path / "heldout.jsonl", split="test")) == 3
