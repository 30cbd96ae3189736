"""Standard output that may go away while a run goes on: `| head`, a tee that died, a connection that dropped."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class SteadyStream:
    """A stream for text. Once it can no longer be written to, what is written is lost, and nobody fails."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._let_go()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._let_go()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _let_go(self) -> None:
        """Point the descriptor at nothing, for what is still in a buffer and for Python's own last flush."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


@contextmanager
def steady_output() -> Iterator[None]:
    """Inside, a standard output or error that goes away is no error."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (None if stream is None else SteadyStream(stream) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before
