"""Runs in a terminal: printed once, or on a screen of their own that follows them until q."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from trimtab.watching.followed import FollowedRun
from trimtab.watching.keys import keys_within, single_keys
from trimtab.watching.overview import overview
from trimtab.watching.state import Condition
from trimtab.watching.view import Watched, lines_of

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
