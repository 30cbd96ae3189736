import time
from pathlib import Path

import pytest

from trimtab.distributed.launch import launch

CRASH = "tests.distributed.crash"


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(("what", "code"), [("raise", 1), ("kill", 137), ("refuse", 2)])
def test_one_that_fails_takes_the_others_down_at_once(capfd, rank, what, code):
    began = time.monotonic()
    assert launch(CRASH, [rank, what], 2) == code
    assert time.monotonic() - began < 15
    shown = capfd.readouterr().err
    if what == "raise":
        assert "the worker's own words" in shown
    if what == "refuse":
        assert "error: a mistake" in shown
    if what == "kill" and rank == "1":
        assert "process 1 was ended by signal 9" in shown


def test_all_that_finish_are_a_success():
    assert launch(CRASH, ["0", "finish"], 3) == 0


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="reads what Linux knows of sockets")
def test_nobody_outside_this_machine_can_reach_the_processes(tmp_path):
    assert launch("tests.distributed.listening", [str(tmp_path / "found")], 2) == 0
    found = (tmp_path / "found").read_text().split()
    assert len(found) >= 2 and set(found) == {"0100007F"}  # 127.0.0.1, its last byte first
