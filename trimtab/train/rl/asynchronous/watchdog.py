"""Nothing hangs in silence: who waits for what is told when nothing has been done for too long."""

import time
from collections.abc import Callable, Sequence

from trimtab.errors import RunFailed
from trimtab.train.rl.answers import Wait

MOST_ROWS = 40  # of the table


class Stalled(RunFailed):
    """No token, no reward and no step for --async_timeout seconds. What the run holds is whole and can be saved."""


class Watchdog:
    def __init__(self, seconds: float):
        self.seconds = seconds
        self.moved()

    def moved(self) -> None:
        """Something was done."""
        self._last = time.monotonic()

    def check(self, waits: Callable[[], Sequence[Wait]]) -> None:
        if time.monotonic() - self._last < self.seconds:
            return
        found = waits()
        print(*table(found), sep="\n", flush=True)
        raise Stalled(
            f"no token, no reward and no step for {self.seconds:g} s (--async_timeout); {len(found)} answers are under "
            "way, and the table above says what they wait for"
        )


def table(waits: Sequence[Wait]) -> list[str]:
    """Who has waited longest comes first."""
    lines = [f"{'prompt':>8}{'answer':>8}{'tokens':>8}{'seconds':>9}  waits for"]
    found = sorted(waits, key=lambda wait: (-wait.seconds, wait.place, wait.sample))
    lines += [f"{w.place + 1:>8}{w.sample + 1:>8}{w.tokens:>8}{w.seconds:>9.1f}  {w.what}" for w in found[:MOST_ROWS]]
    return lines + ([f"and {len(found) - MOST_ROWS} more"] if len(found) > MOST_ROWS else [])
