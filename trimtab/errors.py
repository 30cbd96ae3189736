"""The ways a run ends early on purpose: errors for its user, and signals."""

import contextlib
import signal
import threading
from collections.abc import Iterator


def error_chain(error: BaseException | None, *, contexts: bool = True) -> Iterator[BaseException]:
    """An exception, then its cause, the cause of that and so on, each once: chains can be loops.

    `contexts`: where no cause was given, go on with the exception that was being handled.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (error.__context__ if contexts else None)


class Error(Exception):
    """What all of them are: whoever calls from Python catches this one."""


class UserError(Error):
    """A mistake its author can mend: shown as one line (what, where, what to do), exit code 2."""


class CannotWrite(UserError):
    """The disk is full, gone or not ours: what is in memory may still be saved elsewhere."""


class Interrupted(Error):
    """The user or the scheduler asked us to stop; everything needed to go on is on disk."""

    def __init__(self, signal_number: int, message: str):
        super().__init__(message)
        self.exit_code = 128 + signal_number


class RunFailed(Error):
    """Training itself went wrong and stopped before doing more harm: shown as one line, exit code 1."""


class OutOfMemory(Error):
    """A pass did not fit into memory. Nothing of the step it belongs to is left, so the step can be begun anew."""


# ---- Ctrl-C, SIGTERM and SIGHUP (the terminal went away): finish the micro-batch, save, leave. A second Ctrl-C leaves
# at once.

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
