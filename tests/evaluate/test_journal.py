import json

import pytest

from trimtab.errors import UserError
from trimtab.evaluate.journal import Journal

SETTINGS = {"seed": 1, "rows": (0, 4)}


def begun(tmp_path, rank=0, **changes):
    journal = Journal(str(tmp_path / "out.jsonl"), SETTINGS | changes)
    journal.open(rank)
    return journal


def test_what_was_written_is_known_to_whoever_comes_next(tmp_path):
    first = begun(tmp_path)
    first.write(2, {"text": "ü\n"})  # neither closed nor finished
    assert Journal(str(tmp_path / "out.jsonl"), SETTINGS).done == {2: {"text": "ü\n"}}


@pytest.mark.parametrize("torn", ['[3, "ab', '[3, "abc"]', "\x00"])
def test_a_line_that_was_cut_off_counts_as_not_written(tmp_path, torn):
    first = begun(tmp_path)
    first.write(0, "a")
    first.close()
    with (first.folder / "0.jsonl").open("a") as file:
        file.write(torn)
    second = begun(tmp_path)
    assert second.done == {0: "a"}
    second.write(3, "again")
    second.gather()
    assert second.done == {0: "a", 3: "again"}


def test_processes_write_apart_and_know_each_other_in_the_end(tmp_path):
    journals = [begun(tmp_path, rank) for rank in range(2)]
    for rank, journal in enumerate(journals):
        journal.write(rank, f"by {rank}")
    journals[0].gather()
    assert journals[0].done == {0: "by 0", 1: "by 1"}


def test_the_output_is_whole_and_nothing_else_is_left(tmp_path):
    (tmp_path / "out.jsonl").write_text("old\n")
    journal = begun(tmp_path)
    journal.write(0, "a")
    assert (tmp_path / "out.jsonl").read_text() == "old\n"
    journal.close()
    journal.finish([{"x": "ü"}, {"x": 2}])
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [{"x": "ü"}, {"x": 2}]
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_unfinished_work_of_other_settings_is_refused_and_kept(tmp_path):
    begun(tmp_path).write(0, "a")
    with pytest.raises(UserError, match=r"out.jsonl.partial holds unfinished work with another seed: repeat"):
        Journal(str(tmp_path / "out.jsonl"), SETTINGS | {"seed": 2})
    assert Journal(str(tmp_path / "out.jsonl"), SETTINGS).done == {0: "a"}


def test_what_is_unset_need_not_have_been_known(tmp_path):
    """A later version has more settings."""
    begun(tmp_path, sampling={"temperature": 1.0}).write(0, "a")
    assert begun(tmp_path, sampling={"temperature": 1.0, "prompt_log_probs": None}).done == {0: "a"}
    with pytest.raises(UserError, match="another sampling"):
        begun(tmp_path, sampling={"temperature": 1.0, "prompt_log_probs": 0})


def test_what_may_be_corrected_binds_when_an_item_is_finished(tmp_path):
    def opened(**changes):
        journal = Journal(str(tmp_path / "out.jsonl"), SETTINGS | changes, correctable=("reward",))
        journal.open(0)
        return journal

    opened(reward="broken").close()
    with pytest.raises(UserError, match="another seed"):
        opened(reward="broken", seed=2)
    opened(reward="mended").write(0, "a")
    with pytest.raises(UserError, match="another reward"):
        opened(reward="other")
    assert opened(reward="mended").done == {0: "a"}


def test_a_place_that_cannot_be_written_to_is_told_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--output_path .*file/out.jsonl: cannot write there"):
        begun(tmp_path / "file")


@pytest.mark.parametrize("line", [b"garbage", b"\xff\xfe\x00", b"5", b"[1]", b'["x", 2]', b"[" * 100_000])
def test_a_line_that_is_no_item_is_named_and_nothing_is_thrown_away(tmp_path, line):
    first = begun(tmp_path)
    first.write(0, "a")
    first.close()
    path = first.folder / "0.jsonl"
    path.write_bytes(content := path.read_bytes() + line + b"\n")
    with pytest.raises(UserError, match=r"--output_path .*line 2 of .*0\.jsonl is no finished item"):
        begun(tmp_path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("content", [b"garbage", b"\xff", b"[]"])
def test_settings_that_cannot_be_read_are_named(tmp_path, content):
    first = begun(tmp_path)
    (first.folder / "settings.json").write_bytes(content)
    with pytest.raises(UserError, match=r"settings\.json does not tell what work it is"):
        begun(tmp_path)
