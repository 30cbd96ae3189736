"""What a server asks of strangers: requests that arrive in time, and not too many connections; and its log is short."""

import asyncio
import contextlib
import logging
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADER_SECONDS = 10.0  # from a connection's first moment, or a request's first byte, to the end of its headers
MOST_CONNECTIONS = 1024
OTHER_DESCRIPTORS = 64  # what the process has open besides
LOG_SECONDS, LOG_LINES = 10.0, 20


def most_connections(wanted: int | None = None) -> int:
    """As many as wanted, or usual, if the system lets us have so many descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS if wanted is None else wanted
    descriptors = wanted + OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < descriptors:
        soft = descriptors if hard == resource.RLIM_INFINITY else min(descriptors, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, soft - OTHER_DESCRIPTORS)


def protocol_with_limits(connections: int) -> type[asyncio.Protocol]:
    """uvicorn's own protocol, which ends connections beyond `connections` and those whose headers take too long."""

    class Limited(AutoHTTPProtocol):  # type: ignore[valid-type, misc]  # whichever uvicorn found
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > connections:
                self._end(b"503 Service Unavailable", b"too many connections; try again")
                return
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, reason: Exception | None) -> None:
            self._stop_watching()
            super().connection_lost(reason)

        def _watch(self) -> None:
            """The clock runs while nothing, or half a request's headers, has come; more bytes do not set it back."""
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_watching()
            elif self._deadline is None:
                self._deadline = self.loop.call_later(HEADER_SECONDS, self._too_slow)

        def _stop_watching(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _too_slow(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self._end(b"408 Request Timeout", b"the request did not arrive in time")

        def _end(self, status: bytes, words: bytes) -> None:
            if not self.transport.is_closing():
                length = str(len(words)).encode()
                head = b"HTTP/1.1 " + status + b"\r\nConnection: close\r\nContent-Length: " + length + b"\r\n\r\n"
                self.transport.write(head + words)
                self.transport.close()

    return Limited


@dataclass
class Gate:
    """Where requests come in: how many are inside, and whether it is closed because the server is about to end."""

    closed: bool = False
    inside: int = 0
    give_up: Callable[[], None] = lambda: None
    """Ends what those inside still wait for."""

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        if self.closed:
            raise Closing
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1


class Closing(Exception):
    """The server is about to end; another one may answer."""


class FewLines(logging.Filter):
    """Lets so many lines of a logger pass in a stretch of time, and counts the rest."""

    def __init__(self) -> None:
        super().__init__()
        self._since, self._passed, self._dropped = 0.0, 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now - self._since >= LOG_SECONDS:
            if self._dropped:
                record.msg, record.args = f"{record.getMessage()} (after {self._dropped} lines left out)", None
            self._since, self._passed, self._dropped = now, 0, 0
        self._passed += 1
        self._dropped += self._passed > LOG_LINES
        return self._passed <= LOG_LINES


def keep_logs_short(*names: str) -> None:
    for name in names:
        logger = logging.getLogger(name)
        if not any(isinstance(known, FewLines) for known in logger.filters):
            logger.addFilter(FewLines())
