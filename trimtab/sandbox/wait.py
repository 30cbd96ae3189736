"""Waiting for what another process or machine computes: told when it takes long, over when the run is told to stop."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import TypeVar

Value = TypeVar("Value")

PATIENCE = 10.0  # seconds of silence
LOOK_EVERY = 0.05  # seconds after which a signal is noticed


class RunStopped(Exception):
    """The run was told to stop while it waited for a reward."""


class Waiting:
    """The waits of one reward."""

    def __init__(self, stopped: Callable[[], bool] = lambda: False):
        """`stopped`: whether the run has been told to stop."""
        self.stopped = stopped
        self._told_after = PATIENCE

    def until(self, ready: Callable[[float], bool], seconds: float, told: str | None = None) -> bool:
        """Whether it was ready within so many seconds. `ready` waits for as long as it is told to; `told` is what a
        person reads who waits with it."""
        began = time.monotonic()
        while not ready(min(LOOK_EVERY, max(0.0, began + seconds - time.monotonic()))):
            self.look(time.monotonic() - began, told)
            if time.monotonic() - began >= seconds:
                return False
        return True

    def results(self, parts: Sequence[Future[Value]], told: str) -> list[Value]:
        """What all of them come to, in order; the first failure is raised in its place."""
        began = time.monotonic()
        try:
            for part in parts:
                while wait_for([part], LOOK_EVERY).not_done:
                    self.look(time.monotonic() - began, told)
            return [part.result() for part in parts]
        finally:
            for part in parts:
                part.cancel()

    def look(self, passed: float, told: str | None) -> None:
        """Somebody has waited for so many seconds, and goes on if this returns."""
        if self.stopped():
            raise RunStopped
        if told is not None and passed >= self._told_after:
            # Twice as long before it is told again: a reward that is always slow is not news.
            self._told_after = 2 * passed
            print(f"waiting for {passed:.0f} s now: {told}", file=sys.stderr, flush=True)


def spoken(seconds: float) -> str:
    """A length of time, rounded up, in words."""
    return f"{math.ceil(seconds)} s" if seconds < 120 else f"{math.ceil(seconds / 60)} min"
