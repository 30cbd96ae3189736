"""Ctrl-C and SIGTERM: finish the micro-batch, save, leave. A second Ctrl-C leaves at once."""

import signal
import threading


class StopRequest:
    """Inside `with`, the first signal is remembered instead of raised."""

    def __init__(self):
        self.signal: int | None = None
        self._previous: dict = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def number(self) -> int:
        """The signal to leave with: SIGTERM where another process of this run has got one and this one has not."""
        return self.signal or signal.SIGTERM

    def _remember(self, number: int, _frame) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number
