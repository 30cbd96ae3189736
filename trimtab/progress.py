"""What a person sees while a run works: a bar on a terminal or in a notebook, a line now and then in a log file."""

import sys
import time
from html import escape
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

NOTEBOOK_SECONDS = 0.25  # between two pictures of a bar: each is a message to a browser


class RunProgress:
    def __init__(self, what: str, total: int, start: int = 0, *, every: int = 1, quiet_seconds: float = 5.0):
        """`every`: figures are refreshed every that many steps; in a log file at most every `quiet_seconds`."""
        self.console = Console(file=sys.stderr, highlight=False, force_jupyter=False)
        self.total, self.every, self.quiet_seconds = total, every, quiet_seconds
        self._last_line = -float("inf")
        self._began, self._start = time.monotonic(), start
        self._bar = None
        self._cell = notebook_display()
        self._text = ""
        if self._cell is None and self.console.is_terminal:
            self._bar = Progress(
                *(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}")),
                *(TextColumn("{task.fields[figures]}"), TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn()),
                console=self.console,
            )
            self._task = self._bar.add_task(what, total=total, completed=start, figures="")
            self._bar.start()
        self.what, self._done = what, start
        if self._cell is not None:
            self._cell.display(_html(self._picture()))

    def advance(self, done: int, figures: dict[str, str]) -> None:
        text = "  ".join(f"{name} {value}" for name, value in figures.items())
        if self._bar is not None:
            fields = {"figures": text} if done % self.every == 0 or done == self.total else {}
            self._bar.update(self._task, completed=done, **fields)
            return
        now, self._done = time.monotonic(), done
        if self._cell is not None:
            self._text = text if done % self.every == 0 or done == self.total else self._text
            if now - self._last_line >= NOTEBOOK_SECONDS or done == self.total:
                self._last_line = now
                self._cell.update(_html(self._picture()))
            return
        due = done % self.every == 0 and now - self._last_line >= self.quiet_seconds
        if due or done == self.total:
            self._last_line = now
            self.console.print(f"{self.what} {done}/{self.total}  {text}  ETA {self._eta()}")

    def say(self, line: str) -> None:
        self.console.print(line)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._cell is not None:
            self._cell.update(_html(self._picture()))

    def _eta(self) -> str:
        if self._done <= self._start < self.total:
            return "–"  # nothing to judge by yet
        per_step = (time.monotonic() - self._began) / max(1, self._done - self._start)
        return time.strftime("%H:%M:%S", time.gmtime(per_step * (self.total - self._done)))

    def _picture(self) -> str:
        return (
            f"<div style='font:13px system-ui,sans-serif'>{escape(self.what)} <progress value={self._done} "
            f"max={max(1, self.total)}></progress> {self._done}/{self.total} &nbsp; {escape(self._text)} &nbsp; "
            f"ETA {self._eta()}</div>"
        )


def notebook_display() -> Any:
    """A place in the cell's output that can be written again; None outside a notebook. Nothing is imported for it: who
    is in a notebook has IPython already."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    try:
        from IPython.display import DisplayHandle

        return DisplayHandle()
    except ImportError:
        return None


def _html(text: str) -> Any:
    from IPython.display import HTML

    return HTML(text)
