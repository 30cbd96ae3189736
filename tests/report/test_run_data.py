import json

import pytest

from tests.report.pages import FIGURES, rl_row, write_async_run, write_episode_run, write_rl_run, write_run
from trimtab.report import run_data as module
from trimtab.report.run_data import FollowedLines, FollowedRun, read_run
from trimtab.train.metrics import MetricsFile


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def write(path, steps, resume_from=None):
    file = MetricsFile(path, resume_from=resume_from)
    for step in steps:
        file.write({"step": step, "text": "ü" * 20})
    file.close()


def looked(followed):
    void, rows = followed.new_rows()
    return void, [row["step"] for row in rows]


def test_only_what_is_new_is_told_and_read(path, monkeypatch):
    write(path, range(1, 500))
    followed = FollowedLines(path)
    assert looked(followed) == (False, list(range(1, 500)))
    size = path.stat().st_size
    with path.open("a") as file:
        file.write('{"step": 500}\n')
    read = []
    reading_lines = FollowedLines._read

    def counted(self, file, size):
        reading = file.read
        counting = type("Counting", (), {"seek": file.seek, "read": lambda _, n: read.append(n) or reading(n)})
        counting.__enter__, counting.__exit__ = lambda self: self, lambda *_: file.close()
        return reading_lines(self, counting(), size)

    monkeypatch.setattr(FollowedLines, "_read", counted)
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
    assert looked(followed)[1] == [7] and followed.unreadable == []


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
    assert looked(followed)[1] == [1, 2] and followed.unreadable == [2, 4, 5, 6]


KINDS = {
    **{job: (write_run, job) for job in FIGURES},
    **{job: (write_rl_run, job) for job in ("ppo", "grpo", "tail")},
    "async": (write_async_run, 12),
    "agents": (write_episode_run, 12),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_followed_is_the_run_that_is_read_at_its_end(kind, tmp_path):
    write, word = KINDS[kind]
    whole = write(tmp_path / "whole", word)
    growing = FollowedRun(tmp_path / "growing")
    assert not growing.refresh() or not growing.begun
    (tmp_path / "growing").mkdir()
    lines = {path.name: path.read_bytes().splitlines(keepends=True) for path in whole.glob("*.jsonl")}
    for path in whole.glob("*"):
        if path.name not in lines:
            (tmp_path / "growing" / path.name).write_bytes(path.read_bytes())
    for part in range(3):
        for name, rows in lines.items():
            third = -(-len(rows) // 3)
            with (tmp_path / "growing" / name).open("ab") as file:
                file.writelines(rows[part * third :][:third])
        assert growing.refresh()
    assert not growing.refresh()
    there, expected = growing.run, read_run(whole)
    for name in ("rows", "options", "manifest", "samples", "rewards", "rollouts", "spans", "job"):
        assert getattr(there, name) == getattr(expected, name), name


def test_rows_taken_back_are_gone(tmp_path):
    folder = write_rl_run(tmp_path / "run", steps=9)
    followed = FollowedRun(folder)
    followed.refresh()
    rows = [rl_row(step, 9, False, False) for step in range(1, 4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert followed.refresh() and followed.run.rows[-1]["step"] == 3


def test_of_many_iterations_the_first_and_the_newest_answers_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_ITERATIONS", 4)
    followed = FollowedRun(write_rl_run(tmp_path / "run", steps=20))
    followed.refresh()
    assert sorted({row["step"] for row in followed.run.rollouts}) == [1, 18, 19, 20]
