"""A progress bar that appears only when the work turns out to be long, and only to a person."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
PATIENCE_SECONDS = 2.0


def progress(items: Iterable[Item], total: int, label: str) -> Iterator[Item]:
    """Passes the items on; `total` is their number."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import Progress

    began = time.monotonic()
    bar, task = None, None
    try:
        for number, item in enumerate(items, start=1):
            yield item
            if bar is None and time.monotonic() - began > PATIENCE_SECONDS:
                bar = Progress(console=Console(stderr=True), transient=True)
                bar.start()
                task = bar.add_task(label, total=total)
            if bar is not None:
                bar.update(task, completed=number)
    finally:
        if bar is not None:
            bar.stop()
