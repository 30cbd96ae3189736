"""Whose turn it is to use the model: calls of a Learner, one at a time, and between them a server's thread."""

import contextlib
import threading
from collections.abc import Iterator


class Turns:
    def __init__(self) -> None:
        self._calls = threading.RLock()
        self._state = threading.Condition()
        self._wanted = 0
        self._serving = False

    @property
    def wanted(self) -> bool:
        """Whether a call waits, or is at work: the server is to set down what it does."""
        return self._wanted > 0

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Inside, the model is this call's alone. A call may make another."""
        with self._state:
            self._wanted += 1
        try:
            with self._calls:
                with self._state:
                    self._state.wait_for(lambda: not self._serving)
                yield
        finally:
            with self._state:
                self._wanted -= 1
                self._state.notify_all()

    @contextlib.contextmanager
    def serve(self) -> Iterator[None]:
        """Inside, the model is the server's, who looks at `wanted`; calls go first."""
        with self._state:
            self._state.wait_for(lambda: not self._wanted and not self._serving)
            self._serving = True
        try:
            yield
        finally:
            with self._state:
                self._serving = False
                self._state.notify_all()
