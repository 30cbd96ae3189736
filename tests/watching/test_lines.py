import json

import pytest

from trimtab.train.metrics import MetricsFile
from trimtab.watching.lines import FollowedLines


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def write(path, steps, resume_from=None):
    file = MetricsFile(path, resume_from=resume_from)
    for step in steps:
        file.write({"step": step, "text": "ü" * 20})
    file.close()


def looked(followed):
    void, rows = followed.news()
    return void, [row["step"] for row in rows]


def test_only_what_is_new_is_told_and_read(path, monkeypatch):
    write(path, range(1, 500))
    followed = FollowedLines(path)
    assert looked(followed) == (False, list(range(1, 500)))
    size = path.stat().st_size
    with path.open("a") as file:
        file.write('{"step": 500}\n')
    read = []
    rows = FollowedLines._rows

    def counted(self, file, size):
        reading = file.read
        counting = type("Counting", (), {"seek": file.seek, "read": lambda _, n: read.append(n) or reading(n)})
        counting.__enter__, counting.__exit__ = lambda self: self, lambda *_: file.close()
        return rows(self, counting(), size)

    monkeypatch.setattr(FollowedLines, "_rows", counted)
    assert looked(followed) == (False, [500])
    assert sum(read) == path.stat().st_size - size
    assert looked(followed) == (False, [])


def test_a_half_written_line_waits_for_its_end(path):
    followed = FollowedLines(path)
    line = json.dumps({"step": 7, "text": "früh"}, ensure_ascii=False).encode() + b"\n"
    for cut in range(1, len(line)):
        path.write_bytes(line[:cut])
        looked(followed)
    with path.open("ab") as file:
        file.write(line[-1:])
    assert looked(followed)[1] == [7] and followed.unreadable == 0


def test_a_folder_that_is_not_there_yet_is_no_mistake(tmp_path):
    followed = FollowedLines(tmp_path / "later" / "metrics.jsonl")
    assert looked(followed) == (False, []) and followed.written is None
    write(tmp_path / "later" / "metrics.jsonl", [1])
    assert looked(followed) == (False, [1])


def test_rows_that_a_resumed_run_took_back_are_void(path):
    write(path, range(1, 9))
    followed = FollowedLines(path)
    looked(followed)
    write(path, [5, 6], resume_from=4)
    assert looked(followed) == (True, [1, 2, 3, 4, 5, 6])


def test_a_new_run_in_the_folder_makes_the_old_rows_void(path):
    write(path, range(1, 4))
    followed = FollowedLines(path)
    looked(followed)
    write(path, range(1, 9))  # the old file is set aside
    assert looked(followed) == (True, list(range(1, 9)))


def test_a_file_written_anew_in_its_place_is_seen_even_if_it_has_grown(path):
    path.write_text('{"step": 1}\n{"step": 2}\n')
    followed = FollowedLines(path)
    looked(followed)
    path.write_text('{"step": 9}\n{"step": 10}\n{"step": 11}\n')
    assert looked(followed) == (True, [9, 10, 11])
    path.write_text("")
    assert looked(followed) == (True, [])
    path.unlink()
    assert looked(followed) == (False, [])


def test_what_is_no_row_is_left_out_and_counted(path):
    path.write_bytes(b'{"step": 1}\nnonsense\n\n[1]\n\xff\xfe\n' + b"[" * 100_000 + b'\n{"step": 2}\n')
    followed = FollowedLines(path)
    assert looked(followed)[1] == [1, 2] and followed.unreadable == 4
