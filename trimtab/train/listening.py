"""Who else hears each row of metrics, as it is written: a function that the run was given in Python."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

Listener = Callable[[dict[str, Any]], object]

_listener: contextvars.ContextVar[Listener | None] = contextvars.ContextVar("listener", default=None)


@contextlib.contextmanager
def heard_by(listener: Listener | None) -> Iterator[None]:
    """Inside, runs of this process tell it every row."""
    before = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(before)


def tell(row: dict[str, Any]) -> None:
    """What the listener raises is its author's, and passes through."""
    if (listener := _listener.get()) is not None:
        listener(dict(row))
