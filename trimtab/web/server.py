"""Bind, serve until SIGINT or SIGTERM, answer what has been accepted within a limit, end."""

import ipaddress
import signal
import socket
import time
from collections.abc import Sequence
from types import FrameType
from typing import Literal, Protocol

import uvicorn
from starlette.applications import Starlette

from trimtab.errors import UserError
from trimtab.web.manners import Gate, keep_logs_short, most_connections, protocol_with_limits

DRAIN_SECONDS = 30.0
SECONDS_TO_SEND = 2  # of replies, once all are there
# Longer than clients keep a connection that they do not use (httpx: 5 s). A server that hangs up first may do so while
# a request is on its way.
IDLE_SECONDS = 75
BACKLOG = 2048
ACCEPTED_AT_ONCE = 64


class Runs(Protocol):
    def run(self, sockets: list[socket.socket]) -> None: ...


def serve_until_told(server: Runs, listening: socket.socket) -> None:
    """In the main thread, until SIGINT or SIGTERM."""
    # uvicorn hands the signal on once it has finished; by then there is nothing left to stop.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    server.run(sockets=[listening])


class Server(uvicorn.Server):
    """Told to end, it answers those inside, within a limit, and turns others away; told again, it ends at once."""

    def __init__(self, config: uvicorn.Config, gate: Gate, drain_seconds: float):
        super().__init__(config)
        self.gate, self.drain_seconds = gate, drain_seconds
        self._deadline = float("inf")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # asyncio accepts a whole backlog at a time, and where descriptors are short it complains as often.
        for listening in sockets or []:
            listening.listen(BACKLOG)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.gate.closed:
            self.gate.give_up()
            super().handle_exit(sig, frame)
        self.drain()

    def drain(self) -> None:
        self.gate.closed = True
        self._deadline = min(self._deadline, time.monotonic() + self.drain_seconds)

    async def on_tick(self, counter: int) -> bool:
        if self.gate.closed and (not self.gate.inside or time.monotonic() >= self._deadline):
            self.gate.give_up()
            self.should_exit = True
        return await super().on_tick(counter)


def make_server(
    app: Starlette,
    drain_seconds: float = DRAIN_SECONDS,
    *,
    logs: Sequence[str] = (),
    connections: int | None = None,
    accepted_at_once: int = ACCEPTED_AT_ONCE,
    loop: Literal["auto", "asyncio"] = "auto",
) -> Server:
    """`app.state.gate` is where its requests come in; `logs`: loggers that are to be kept short; `connections`: at
    once, if the system lets us have so many; `accepted_at_once`: of those that come together; `loop`: whose
    events it runs by."""
    config = uvicorn.Config(
        app,
        http=protocol_with_limits(most_connections(connections)),
        log_level="warning",
        access_log=False,
        lifespan="on",
        backlog=accepted_at_once,
        loop=loop,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=SECONDS_TO_SEND,
    )
    keep_logs_short("uvicorn.error", "asyncio", *logs)
    return Server(config, app.state.gate, drain_seconds)


def bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if _is_ipv6(host) else socket.AF_INET
        # Only where the protocol is named does asyncio send small replies at once (TCP_NODELAY): 40 ms less.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"--host {host} --port {port}: cannot listen there ({reason}); choose another") from error
    return listening


def address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
