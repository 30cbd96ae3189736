import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.examples.claims_at_hand import CLAIMS, grid

import forks  # isort: skip


def say(words: str) -> list[str]:
    return [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(CLAIMS)!r}); import grid; {words}"]


def rows_of(folder: Path, job: str) -> list[dict]:
    return [row for row in grid.read(folder / "results.jsonl") if row["job"] == job]


def test_a_job_waits_for_what_it_needs_and_its_rows_are_kept(tmp_path: Path) -> None:
    product = tmp_path / "model"
    jobs = [
        grid.Job("second", say(f"grid.tell(seen=open({str(product)!r}).read(), seconds=1e9)"), needs=("first",)),
        grid.Job("first", say(f"open({str(product)!r}, 'w').write('made'); grid.tell(a=1); grid.tell(a=2)")),
    ]
    assert grid.run(jobs, tmp_path, at_once=2) == []
    assert [row["a"] for row in rows_of(tmp_path, "first")] == [1, 2]
    (second,) = rows_of(tmp_path, "second")
    assert second["seen"] == "made" and second["state"] == "done" and second["seconds"] != 1e9


def test_what_is_done_is_not_run_again_unless_a_product_that_is_needed_is_gone(tmp_path: Path) -> None:
    product, count = tmp_path / "model", tmp_path / "count"
    make = say(f"open({str(product)!r}, 'w'); open({str(count)!r}, 'a').write('x')")
    first = grid.Job("first", make, product=product)
    second = grid.Job("second", say(f"open({str(product)!r})"), needs=("first",))
    grid.run([first], tmp_path)
    product.unlink()
    grid.run([first], tmp_path)
    assert count.read_text() == "x"  # nobody needs it
    assert grid.run([first, second], tmp_path) == []
    assert count.read_text() == "xx"
    assert len(rows_of(tmp_path, "first")) == 1


def test_at_the_limit_jobs_are_cut_off_with_what_they_told_and_others_not_begun(tmp_path: Path, capsys) -> None:
    jobs = [
        grid.Job("endless", say("grid.tell(step=1); import time; time.sleep(60)")),
        grid.Job("long", say("grid.tell(step=1)"), seconds=50),
    ]
    begun = time.monotonic()
    assert grid.run(jobs, tmp_path, limit=1) == ["endless", "long"]
    assert time.monotonic() - begun < 30
    (row,) = rows_of(tmp_path, "endless")
    assert row["state"] == "cut" and row["step"] == 1
    assert rows_of(tmp_path, "long") == []
    assert "not done: endless, long" in capsys.readouterr().out


def test_a_row_that_was_being_written_when_its_job_was_ended_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert grid.read(tmp_path / "rows") == [{"step": 1}, {"step": 2}]


def test_what_needs_a_failed_job_is_left_out_and_the_rest_is_run(tmp_path: Path, capsys) -> None:
    jobs = [
        grid.Job("broken", say("grid.tell(step=1); raise SystemExit('no such model')")),
        grid.Job("after", say("grid.tell(step=1)"), needs=("broken",)),
        grid.Job("apart", say("grid.tell(step=1)")),
    ]
    assert grid.run(jobs, tmp_path) == ["after", "broken"]
    assert rows_of(tmp_path, "broken")[0]["state"] == "failed"
    assert rows_of(tmp_path, "apart")[0]["state"] == "done"
    assert "no such model" in capsys.readouterr().err


def test_no_job_outlives_a_grid_that_is_ended(tmp_path: Path) -> None:
    said = tmp_path / "pid"
    endless = say(f"import os, time; open({str(said)!r}, 'w').write(str(os.getpid())); time.sleep(60)")
    words = f"grid.run([grid.Job('endless', {endless!r})], {str(tmp_path / 'runs')!r})"
    begun = subprocess.Popen(say(words), stdout=subprocess.DEVNULL)
    while not (said.exists() and said.read_text()):
        time.sleep(0.02)
    begun.terminate()
    assert begun.wait(timeout=30) == 143
    assert rows_of(tmp_path / "runs", "endless")[0]["state"] == "cut"
    with pytest.raises(ProcessLookupError):
        os.kill(int(said.read_text()), 0)


def script(folder: Path, name: str, words: str) -> list[str]:
    path = folder / f"{name}.py"
    path.write_text(f"import sys; sys.path.insert(0, {str(CLAIMS)!r}); import grid, os, time\n{words}\n")
    return [sys.executable, str(path), "word"]


def test_forks_are_as_processes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(forks, "ready", lambda: True)
    about = "print('said'); grid.tell(words=sys.argv[1:], name=__name__, pid=os.getpid(), group=os.getpgid(0))"
    endless = "grid.tell(child=os.fork() or os.getpid()); time.sleep(60)"
    jobs = [
        grid.Job("fine", script(tmp_path, "fine", about)),
        grid.Job("broken", script(tmp_path, "broken", "print('first'); raise SystemExit('no such model')")),
        grid.Job("endless", script(tmp_path, "endless", endless), needs=("fine",)),
        grid.Job("command", say("grid.tell(step=1)")),
    ]
    assert grid.run(jobs, tmp_path, at_once=4, limit=2) == ["broken", "endless"]
    (row,) = rows_of(tmp_path, "fine")
    assert row["state"] == "done" and row["words"] == ["word"] and row["name"] == "__main__"
    assert row["pid"] == row["group"] != os.getpid()
    assert (tmp_path / "fine.log").read_text().splitlines() == [" ".join(jobs[0].command), "said"]
    assert (tmp_path / "broken.log").read_text().splitlines()[1:] == ["first", "no such model"]
    assert [row["state"] for row in rows_of(tmp_path, "broken")] == ["failed"]
    told = rows_of(tmp_path, "endless")
    assert [row["state"] for row in told] == ["cut", "cut"]
    assert rows_of(tmp_path, "command")[0]["state"] == "done"
    for pid in {row["child"] for row in told}:  # what a job has started ends with it
        for _ in range(100):
            if not Path(f"/proc/{pid}").exists() or "State:\tZ" in Path(f"/proc/{pid}/status").read_text():
                break
            time.sleep(0.02)
        else:
            raise AssertionError("it is still there")


def test_a_process_that_may_have_used_torch_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    assert not forks.ready.__wrapped__()
