import json

import pytest

from tests.report.pages import FIGURES, rl_row, write_async_run, write_episode_run, write_rl_run, write_run
from trimtab.report.read import read_run
from trimtab.watching import followed as module
from trimtab.watching.followed import FollowedRun

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
