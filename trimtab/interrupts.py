"""Ctrl-C, SIGTERM and SIGHUP (the terminal went away): finish the micro-batch, save, leave. A second Ctrl-C leaves at
once."""

import contextlib
import signal
import threading
from collections.abc import Iterator

from trimtab.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def handled_signals() -> list[signal.Signals]:
    """Those of SIGNALS that this process was not started to ignore, as nohup has SIGHUP ignored."""
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in SIGNALS if not (nohup and number == signal.SIGHUP)]


class StopRequest:
    """Inside `with`, the first signal is remembered instead of raised."""

    def __init__(self, *, at_once: bool = False):
        """`at_once`: raise it as Interrupted too, for work that may stop anywhere."""
        self.signal: int | None = None
        self.at_once = at_once
        self._received = False
        self._previous: dict = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in handled_signals():
                self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def number(self) -> int:
        """The signal to leave with: SIGTERM where another process of this run has got one and this one has not."""
        return self.signal or signal.SIGTERM

    def requested(self) -> bool:
        return self.signal is not None

    def hear(self, number: int) -> None:
        """Another process of this run has got this signal."""
        self.signal = self.signal or number

    def _remember(self, number: int, _frame) -> None:
        if self._received:  # the first is what we leave with
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self._received, self.signal = True, self.signal or number
        if self.at_once:
            raise Interrupted(number, "stopped")


@contextlib.contextmanager
def unheard_by_children() -> Iterator[None]:
    """Processes that are started inside do not hear the signals that the run's whole group gets (from `timeout`, a
    scheduler, a terminal that goes away): they end with the run, which may need them to finish what it is doing. What
    comes meanwhile reaches this process afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
