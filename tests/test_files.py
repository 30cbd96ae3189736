"""Files are whole or absent, whatever happens while they are written."""

import os

import pytest

from tests import warm
from trimtab import files
from trimtab.errors import UserError
from trimtab.files import UNFINISHED, is_locked, locked, replacing, write_json, write_text, writing


def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(tmp_path):
    path = tmp_path / "page.html"
    write_text(path, "old")
    with pytest.raises(ZeroDivisionError), replacing(path) as beside:
        beside.write_text("half of the ne")
        raise ZeroDivisionError
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("page.html", "old")]


def _killed_while_writing(path):
    with replacing(path) as beside:
        beside.write_text("half of the ne")
        os._exit(9)


def test_a_process_killed_while_it_writes_leaves_what_was_there(tmp_path):
    path = tmp_path / "manifest.json"
    write_json(path, {"step": 1})
    assert warm.call(_killed_while_writing, path) == 9
    assert path.read_text() == '{\n  "step": 1\n}\n'
    left = [found.name for found in tmp_path.iterdir() if found != path]
    assert left and all(name.startswith(UNFINISHED) for name in left), "whoever cleans up knows it by its name"


def test_what_takes_its_place_is_on_disk_before(tmp_path, monkeypatch):
    flushed, order = [], []
    monkeypatch.setattr(
        files.os, "fsync", lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    )
    replace = os.replace
    monkeypatch.setattr(files.os, "replace", lambda *places: (order.append(list(flushed)), replace(*places)))
    with replacing(tmp_path / "model") as beside:
        (beside / "inner").mkdir(parents=True)
        (beside / "inner" / "weights").write_text("1")
    (before,) = order
    assert before == [str(beside / "inner" / "weights"), str(beside / "inner"), str(beside)]
    assert flushed[len(before) :] == [str(tmp_path)], "and its new name afterwards"


def test_a_folder_replaces_a_folder_and_a_file_never_does(tmp_path):
    (tmp_path / "entry").mkdir()
    (tmp_path / "entry" / "stale").touch()
    with replacing(tmp_path / "entry") as beside:
        beside.mkdir()
        (beside / "fresh").touch()
    assert [path.name for path in (tmp_path / "entry").iterdir()] == ["fresh"]
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path / "entry", "text")
    assert [path.name for path in tmp_path.rglob("*")] == ["entry", "fresh"]


def test_a_name_may_be_as_long_as_the_system_allows(tmp_path):
    write_text(tmp_path / ("n" * 255), "text")
    assert [len(path.name) for path in tmp_path.iterdir()] == [255]


def test_two_writers_in_one_process_do_not_meet(tmp_path):
    path = tmp_path / "file"
    with replacing(path) as one, replacing(path) as other:
        one.write_text("one")
        other.write_text("other")
    assert path.read_text() == "one"


def test_a_failure_is_one_line_with_its_reason_and_what_to_do(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match=r"^--output x: cannot write \((File exists|Not a directory)\); choose another$"),
        writing("--output x: cannot write", "choose another"),
    ):
        write_text(tmp_path / "file" / "inside", "text")


def test_a_lock_of_another_process_is_seen_and_not_taken(tmp_path):
    assert is_locked(tmp_path) is False
    told, tell = os.pipe()
    wait, go = os.pipe()
    child = os.fork()
    if not child:
        with locked("save_path", tmp_path):
            os.write(tell, b"locked")
            os.read(wait, 1)
        os._exit(0)
    try:
        os.read(told, 6)
        assert is_locked(tmp_path) is True
        with pytest.raises(UserError, match="another run is at work there"), locked("save_path", tmp_path):
            pass
    finally:
        os.write(go, b"!")
        os.waitpid(child, 0)
    assert is_locked(tmp_path) is False


def test_to_ask_for_ones_own_lock_does_not_lose_it(tmp_path):
    with locked("save_path", tmp_path):
        assert is_locked(tmp_path) is True
        child = os.fork()
        if not child:
            files._locked_here.clear()  # as in any other process
            os._exit(0 if is_locked(tmp_path) else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert is_locked(tmp_path) is False
