"""What a person sees while a run works: a bar on a terminal, a line now and then in a log file."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class RunProgress:
    def __init__(self, what: str, total: int, start: int = 0, *, every: int = 1, quiet_seconds: float = 5.0):
        """`every`: figures are refreshed every that many steps; in a log file at most every `quiet_seconds`."""
        self.console = Console(file=sys.stderr, highlight=False)
        self.total, self.every, self.quiet_seconds = total, every, quiet_seconds
        self._last_line = -float("inf")
        self._began, self._start = time.monotonic(), start
        self._bar = None
        if self.console.is_terminal:
            self._bar = Progress(
                *(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}")),
                *(TextColumn("{task.fields[figures]}"), TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn()),
                console=self.console,
            )
            self._task = self._bar.add_task(what, total=total, completed=start, figures="")
            self._bar.start()
        self.what = what

    def advance(self, done: int, figures: dict[str, str]) -> None:
        text = "  ".join(f"{name} {value}" for name, value in figures.items())
        if self._bar is not None:
            fields = {"figures": text} if done % self.every == 0 or done == self.total else {}
            self._bar.update(self._task, completed=done, **fields)
            return
        now = time.monotonic()
        due = done % self.every == 0 and now - self._last_line >= self.quiet_seconds
        if due or done == self.total:
            self._last_line = now
            per_step = (now - self._began) / max(1, done - self._start)
            eta = time.strftime("%H:%M:%S", time.gmtime(per_step * (self.total - done)))
            self.console.print(f"{self.what} {done}/{self.total}  {text}  ETA {eta}")

    def say(self, line: str) -> None:
        self.console.print(line)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
