"""The command as a person has it: on a terminal, and without one."""

import os
import pty
import re
import select
import signal
import sys
import time

import pytest

from tests.report.pages import rl_row, write_metrics, write_rl_run, write_run
from trimtab.report.terminal import keys_in


def test_without_a_terminal_it_prints_how_things_stand_and_leaves(tmp_path, trimtab):
    write_rl_run(tmp_path / "a")
    write_run(tmp_path / "b")
    text = trimtab(f"watch {tmp_path}/a {tmp_path}/b {tmp_path}/a").said
    assert text.count("● finished") == 2 and "\x1b" not in text and "loss" in text


def test_only_wait_waits_for_a_run_of_which_nothing_can_be_read(tmp_path, trimtab):
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\x00 no row\n")
    text = trimtab(f"watch {tmp_path} --once").said
    assert "no run here yet" in text and "metrics.jsonl: 1 unreadable line left out" in text


def test_a_folder_that_may_not_be_read_is_one_line(tmp_path, trimtab, monkeypatch):
    write_run(tmp_path / "run")

    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refused)
    assert "run: cannot be read (Permission denied)" in trimtab(f"watch {tmp_path}/run").mistake


@pytest.mark.parametrize(
    "pressed, keys",
    [
        (b"q", ["q"]),
        (b"\x1b[A\x1b[B\x1bOC", ["up", "down", "right"]),
        (b"\x1b", ["escape"]),
        (b"\t\x1b[Zn", ["tab", "back tab", "n"]),
        (b"\x1b[1;5Cn", ["n"]),
        (b"\x1b[200~", []),
        ("é".encode(), ["", ""]),
    ],
)
def test_keys_are_told_from_their_bytes(pressed, keys):
    assert keys_in(pressed) == keys


class Terminal:
    """`trimtab watch` in a terminal of 100 x 30."""

    def __init__(self, folder):
        self.process, self.descriptor = pty.fork()
        if not self.process:
            os.environ |= {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
            words = ["-m", "trimtab.cli.main", "watch", str(folder), "--every", "0.1"]
            os.execv(sys.executable, [sys.executable, *words])
        self.seen = ""

    def until(self, text: str) -> str:
        """What the screen was told until this text came."""
        end = time.monotonic() + 60
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} did not come; {self.seen[-2000:]!r}"
            if select.select([self.descriptor], [], [], 1)[0]:
                try:
                    self.seen += re.sub(r"\x1b\[[0-9;]*m", "", os.read(self.descriptor, 1 << 16).decode())
                except OSError:  # the other end is closed
                    break
        before, found, self.seen = self.seen.partition(text)
        assert found, before
        return before + found

    def press(self, keys: bytes) -> None:
        os.write(self.descriptor, keys)


def test_it_follows_a_run_answers_keys_and_leaves_the_terminal_as_it_was(tmp_path):
    folder = write_rl_run(tmp_path / "run", steps=5)
    terminal = Terminal(folder)
    assert "\x1b[?1049h" in terminal.until("iteration 5 of 5")  # a screen of its own
    write_metrics(folder, [rl_row(step, 7, False, False) for step in range(1, 7)])
    terminal.until("iteration 6 of 5")
    terminal.press(b"w")
    terminal.until("worst 1 of 2 of iteration 5")
    terminal.press(b"?")
    terminal.until("this help")
    terminal.press(b"x[")
    terminal.until("worst 1 of 2 of iteration 4")
    os.kill(terminal.process, signal.SIGWINCH)
    terminal.press(b"q")
    terminal.until("\x1b[?1049l")
    assert os.waitpid(terminal.process, 0)[1] == 0
    os.close(terminal.descriptor)


def test_a_signal_gives_the_screen_back(tmp_path):
    terminal = Terminal(write_run(tmp_path / "run"))
    terminal.until("step 40 of 40")
    os.kill(terminal.process, signal.SIGTERM)
    terminal.until("\x1b[?1049l")
    assert os.waitstatus_to_exitcode(os.waitpid(terminal.process, 0)[1]) == 128 + signal.SIGTERM
    os.close(terminal.descriptor)
