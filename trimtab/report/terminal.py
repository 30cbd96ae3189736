"""`trimtab watch` in a terminal: printed once, or on an alternate screen that follows the runs until q."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from trimtab.report.run_data import Condition, FollowedRun
from trimtab.report.terminal_view import Watched, lines_of, overview

SEQUENCES = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[C": "right",
    b"\x1b[D": "left",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1bOC": "right",
    b"\x1bOD": "left",
    b"\x1b[Z": "back tab",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\t": "tab",
    b"\x1b": "escape",
}
REST = 0.05
"""Seconds that the rest of a key's bytes may take over a slow line."""


@contextmanager
def single_keys() -> Iterator[None]:
    """Inside, keys come at once and are not shown; Ctrl-C is still an interrupt."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def keys_within(seconds: float) -> list[str]:
    """The keys that were pressed, as soon as there is one; empty when the time is over. The end of the input is "q"."""
    descriptor = sys.stdin.fileno()
    if not select.select([descriptor], [], [], max(0.0, seconds))[0]:
        return []
    pressed = os.read(descriptor, 1024)
    if not pressed:
        return ["q"]
    if pressed == b"\x1b" and select.select([descriptor], [], [], REST)[0]:
        pressed += os.read(descriptor, 1024)
    return keys_in(pressed)


def keys_in(pressed: bytes) -> list[str]:
    """The names of keys; unknown sequences are nothing."""
    found = []
    while pressed:
        known = next((code for code in SEQUENCES if pressed.startswith(code)), None)
        if known and (known != b"\x1b" or len(pressed) == 1):
            found.append(SEQUENCES[known])
            pressed = pressed[len(known) :]
        elif pressed[:1] == b"\x1b":
            # Up to the letter or ~ that ends a sequence.
            end = next((place for place, byte in enumerate(pressed[2:], 2) if 64 <= byte <= 126), len(pressed))
            pressed = pressed[end + 1 :]
        else:
            found += [pressed[:1].decode(errors="ignore")]
            pressed = pressed[1:]
    return found


# ---- The screen.


LOOK_AT_SIZE = 0.5
"""Seconds after which a changed size of the terminal is noticed."""
ASCII = str.maketrans("▁▂▃▄▅▆▇█●■━─·…→←↑↓\u00a0", "_.,-=+*#*#=--.><^v ")
HELP = """\
→ or n, ← or p     next, previous answer of the iteration
b, w               its best, its worst answer
[, ]               an earlier, a later iteration (the newest is followed)
↑, ↓, page up/down scroll a long answer
tab, 1 to 9        another run; 0: all of them
?                  this help
q                  leave (the run goes on)"""


def watch_in_terminal(folders: Sequence[Path], *, every: float, once: bool, wait: bool) -> None:
    console = Console(highlight=False)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # answers are of any language, terminals are not
    runs = [Watched(FollowedRun(folder)) for folder in folders]
    if once or not sys.stdin.isatty() or not console.is_terminal or console.is_dumb_terminal:
        _print_once(console, runs, every, wait)
    else:
        _Screen(console, runs, every).follow()


def _print_once(console: Console, runs: Sequence[Watched], every: float, wait: bool) -> None:
    """How things stand; `wait`: as soon as there is something."""
    for number, watched in enumerate(runs):
        watched.refresh()
        while wait and watched.state.condition is Condition.AWAITED:
            time.sleep(every)
            watched.refresh()
        if number:
            console.print()
        for line in _written(console, lines_of(watched, console.width, None)):
            console.print(line, no_wrap=True, crop=False, soft_wrap=True)


class _Screen:
    def __init__(self, console: Console, runs: Sequence[Watched], every: float):
        self.console, self.runs, self.every = console, runs, every
        self.shown = 1 if len(runs) == 1 else 0  # 0: all of them
        self.helping = False

    def follow(self) -> None:
        """Until q, Ctrl-C or a signal; the terminal is left as it was, and lent out by Ctrl-Z."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _leave)
        while True:
            signal.signal(signal.SIGTSTP, _suspend)
            try:
                with single_keys(), Live(console=self.console, screen=True, auto_refresh=False) as live:
                    return self._loop(live)
            except KeyboardInterrupt:
                return
            except _Suspended:
                signal.signal(signal.SIGTSTP, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTSTP)  # and on from here, when the shell says so

    def _loop(self, live: Live) -> None:
        due, size = 0.0, None
        while True:
            now = time.monotonic()
            if now >= due:
                for watched in self.runs:
                    watched.refresh()
                due = now + self.every
                size = None  # the times since the last row go on
            if size != (size := self.console.size):
                live.update(self._picture(*size), refresh=True)
            keys = keys_within(min(due - time.monotonic(), LOOK_AT_SIZE))
            if any(self.press(key) for key in keys):
                return
            size = None if keys else size

    def press(self, key: str) -> bool:
        """Whether it means to leave."""
        if key in ("q", "Q") or (key == "escape" and not self.helping):
            return True
        if self.helping or key in ("?", "h"):
            self.helping = not self.helping
            return False
        several = len(self.runs) > 1
        if several and key in ("tab", "back tab"):
            self.shown = (self.shown + (1 if key == "tab" else -1)) % (len(self.runs) + 1)
        elif several and key.isdecimal() and int(key) <= len(self.runs):
            self.shown = int(key)
        elif self.shown:
            self._look(self.runs[self.shown - 1], key)
        return False

    def _look(self, watched: Watched, key: str) -> None:
        shelf = watched.shelf
        lines = {"up": -1, "down": 1, "page up": -10, "page down": 10}
        if key in lines:
            watched.scrolled = max(0, watched.scrolled + lines[key])
            return
        watched.scrolled = 0
        if key in ("n", "right", "p", "left"):
            shelf.turn(1 if key in ("n", "right") else -1)
        elif key in ("b", "w"):
            shelf.jump("best" if key == "b" else "worst")
        elif key in ("[", "]"):
            shelf.go(-1 if key == "[" else 1)

    def _picture(self, width: int, height: int) -> Group:
        if self.helping:
            lines = [Text("trimtab watch", style="bold"), Text(), *map(Text, HELP.splitlines())]
        elif self.shown:
            lines = lines_of(self.runs[self.shown - 1], width, height - 1)
        else:
            lines = overview(self.runs, width, height - 1)
        lines = lines[: height - 1]
        lines += [Text()] * (height - 1 - len(lines))
        for line in lines:
            line.no_wrap = True
        return Group(*_written(self.console, [*lines, self._foot(width)]))

    def _foot(self, width: int) -> Text:
        words = ["q quit", "? help"]
        if len(self.runs) > 1:
            where = f"{self.shown} of {len(self.runs)}" if self.shown else f"all {len(self.runs)}"
            words.append(f"tab runs ({where})")
        if self.shown and self.runs[self.shown - 1].shelf.shown() is not None:
            words += ["n p answers", "b w best/worst", "[ ] iterations"]
        line = Text("  ".join(words), style="dim", no_wrap=True)
        line.truncate(width, overflow="ellipsis")
        return line


def _written(console: Console, lines: list[Text]) -> list[Text]:
    """With the signs that the terminal has."""
    if not console.encoding.lower().startswith("utf"):
        for line in lines:
            line.plain = line.plain.translate(ASCII)
    return lines


class _Suspended(Exception):
    pass


def _suspend(_number: int, _frame: FrameType | None) -> None:
    raise _Suspended


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
