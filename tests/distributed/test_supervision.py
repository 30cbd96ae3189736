import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.crash import is_alive
from trimtab.distributed.supervision import _signal_in_words, _was_requested, launch_processes

CRASH = "tests.distributed.crash"


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(("what", "code"), [("raise", 1), ("kill", 137), ("refuse", 2)])
def test_one_that_fails_takes_the_others_down_at_once(capfd, rank, what, code):
    began = time.monotonic()
    assert launch_processes(CRASH, [rank, what], 2) == code
    assert time.monotonic() - began < 15
    shown = capfd.readouterr().err
    if what == "raise":
        assert "the worker's own words" in shown
    if what == "refuse":
        assert "error: a mistake" in shown
    if what == "kill":
        why = "the system was short of memory, as its log says (dmesg), or somebody or a scheduler ended it"
        assert f"process {rank} was ended by signal 9 (SIGKILL: {why})\n" in shown


def test_after_a_killed_process_the_last_line_says_where_to_go_on(capfd):
    def go_on() -> str:
        return "the last checkpoint is here"

    assert launch_processes(CRASH, ["1", "kill"], 2, go_on=go_on) == 137
    assert capfd.readouterr().err.endswith(" or a scheduler ended it)\nthe last checkpoint is here\n")
    assert launch_processes(CRASH, ["1", "refuse"], 2, go_on=go_on) == 2
    assert "here" not in capfd.readouterr().err, "one that could speak has said all"


@pytest.mark.parametrize("number, words", [(11, "11 (SIGSEGV: native code"), (1, "1 (SIGHUP)"), (99, "99")])
def test_a_signal_is_told_with_its_name_and_usual_cause(number, words):
    assert _signal_in_words(number).startswith(words)


def test_the_first_process_is_named_even_if_others_die_of_its_death(tmp_path, capfd):
    assert launch_processes(CRASH, ["0", "kill", "60", str(tmp_path)], 3) == 137
    shown = capfd.readouterr().err
    assert "process 0 was ended by signal 9" in shown and "closed by peer" not in shown


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    ("what", "words"),
    [("hang", "hangs: starting has not moved for 1 s"), ("stop", "has given no sign of life for 1 s")],
)
def test_one_that_hangs_is_named_and_ended(tmp_path, capfd, rank, what, words):
    began = time.monotonic()
    assert launch_processes(CRASH, [rank, what, "1", str(tmp_path)], 2, hang_timeout=1) == 1
    assert time.monotonic() - began < 25
    shown = capfd.readouterr().err
    assert f"process {rank} {words}" in shown and "--hang_timeout" in shown
    if what == "hang":
        assert "in hang_here" in shown  # where it stands


def test_processes_that_wait_for_a_slow_one_are_left_alone(tmp_path):
    assert launch_processes(CRASH, ["1", "finish late", "1", str(tmp_path)], 3, hang_timeout=1) == 0


LAUNCH = """
import sys
from trimtab.distributed.supervision import launch_processes
sys.exit(launch_processes(sys.argv[1], sys.argv[2:], 2))
"""


def launched(folder: Path, *before: str, **how) -> tuple[subprocess.Popen, list[Path]]:
    """A launcher whose two processes have begun and wait, and their notes."""
    words = [*before, sys.executable, "-c", LAUNCH, CRASH, "9", "wait", "60", str(folder)]
    launcher, notes = subprocess.Popen(words, **how), [folder / f"began{rank}" for rank in (0, 1)]
    wait_for(lambda: all(note.exists() and note.read_text() for note in notes))
    return launcher, notes


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGKILL, -9)]
)
def test_a_signal_to_the_launcher_reaches_every_process_and_none_outlives_it(tmp_path, number, code):
    # The tests themselves may run under nohup.
    launcher, notes = launched(tmp_path, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))
    launcher.send_signal(number)
    assert launcher.wait(20) == code
    wait_for(lambda: (tmp_path / "asked0").exists() and (tmp_path / "asked1").exists())
    wait_for(lambda: not any(is_alive(note) for note in notes))


def test_a_launcher_that_was_started_to_ignore_hangups_does(tmp_path):
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    launcher, notes = launched(tmp_path, "nohup", **silent)
    launcher.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert launcher.poll() is None and all(is_alive(note) for note in notes)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(20) == 143


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_process_that_left_because_of_a_signal_has_not_failed(number):
    assert _was_requested(128 + number, [])
    assert _was_requested(-number, [number]) and not _was_requested(-number, [])


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


def test_all_that_finish_are_a_success():
    assert launch_processes(CRASH, ["0", "finish"], 3) == 0


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="reads what Linux knows of sockets")
def test_nobody_outside_this_machine_can_reach_the_processes(tmp_path):
    assert launch_processes("tests.distributed.listening", [str(tmp_path / "found")], 2) == 0
    found = (tmp_path / "found").read_text().split()
    assert len(found) >= 2 and set(found) == {"0100007F"}  # 127.0.0.1, its last byte first
