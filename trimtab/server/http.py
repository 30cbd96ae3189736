"""The HTTP core of the policy server, the reward server and the live page: bind, protect, authenticate, drain.

A server binds a socket, limits its connections and how long a client may take to send a request, authenticates
requests, limits their bodies, turns errors into responses, writes metrics for Prometheus, and on SIGTERM or SIGINT
answers accepted requests within a limit. uvicorn and Starlette do the rest.
"""

import asyncio
import contextlib
import ipaddress
import json
import logging
import resource
import secrets
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from trimtab.errors import UserError

log = logging.getLogger(__name__)

HEADER_SECONDS = 10.0  # from the start of a connection, or a request's first byte, to the end of its headers
BODY_SECONDS = 120.0  # until a request has arrived completely
# Longer than clients keep an idle connection (httpx: 5 s). A server that closes first may do so while a request is
# being sent.
IDLE_SECONDS = 75
DRAIN_SECONDS = 30.0
SECONDS_TO_SEND = 2  # to send the last responses
# Most clients read the response only after sending everything, and would report a connection closed meanwhile as an
# unexplained error. So the rest of a body that is too large is read and discarded, up to this size.
MOST_DISCARDED = 2**30
MOST_CONNECTIONS = 1024
OTHER_DESCRIPTORS = 64  # open descriptors besides connections
BACKLOG = 2048
ACCEPTED_AT_ONCE = 64
LOG_SECONDS, LOG_LINES = 10.0, 20
OWN_LOGS = ("http", "http_workers", "endpoints", "request_queue", "reward_server")  # modules of this package
LOGS = ("uvicorn.error", "asyncio", *(f"trimtab.server.{name}" for name in OWN_LOGS))


# ---- errors


class HTTPError(Exception):
    """A refused request, with the status, message and headers of its response. `code`: the error code of OpenAI's
    protocol."""

    code: str | None = None

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.headers = status, headers or {}


class Overloaded(HTTPError):
    """Too many requests are waiting; the client may retry."""

    code = "overloaded"

    def __init__(self, message: str):
        super().__init__(503, message, {"Retry-After": "1"})


class ServerClosing(HTTPError):
    """The server is draining; another server may answer."""

    code = "closing"

    def __init__(self, message: str = "the server is about to end; ask another one, or try again"):
        super().__init__(503, message, {"Retry-After": "1", "Connection": "close"})


def as_http_error(error: Exception) -> HTTPError:
    """The HTTP error for a failed request. Unexpected errors are logged."""
    if isinstance(error, HTTPError):
        return error
    log.error("a request failed", exc_info=error)
    return HTTPError(500, "the server failed; its log says why")


# ---- authentication and bodies


def bearer_token(request: Request) -> str:
    return request.headers.get("authorization", "").removeprefix("Bearer ")


def is_loopback_host(host: str) -> bool:
    """Whether a Host header names the loopback address, with any port, since tunnels change it. A website whose name
    resolves to this machine (DNS rebinding) sends another name."""
    name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    return name.lower() == "localhost" or is_loopback(name)


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def authenticate(request: Request, token: str | None) -> None:
    """Raise HTTPError without the right bearer token. `token` None: none is needed, but a server on a loopback address
    must be called by a loopback name."""
    if token is None:
        here, _ = request.scope.get("server") or ("", None)
        if is_loopback(here) and not is_loopback_host(request.headers.get("host", "")):
            raise HTTPError(421, "call this server by 127.0.0.1 or localhost, or start it with a --bearer_token")
    elif not secrets.compare_digest(bearer_token(request).encode(), token.encode()):
        raise HTTPError(401, "a bearer token is needed, and it must be the right one")


async def read_body(request: Request, max_bytes: int, advice: str) -> bytes:
    """The request's body. HTTPError: it is too large or too slow; `advice`: for a body that is too large."""
    body, size = bytearray(), 0
    # Otherwise the unread rest of a body would be parsed as the next request.
    closing = {"Connection": "close"}
    too_large = HTTPError(413, f"the request has more than {max_bytes} bytes; {advice}", closing)
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes and "expect" in request.headers:
        raise too_large  # at once: the client waits for permission to send its body
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                size += len(piece)
                if size <= max_bytes:
                    body += piece
                elif size > MOST_DISCARDED:
                    break
    except TimeoutError:
        raise HTTPError(408, f"the request was not whole after {BODY_SECONDS:g} s", closing) from None
    if size > max_bytes:
        raise too_large
    return bytes(body)


def json_object(content: bytes) -> dict[str, Any]:
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise HTTPError(400, f"the request is not JSON: {str(error)[:100]}") from None
    if not isinstance(body, dict):
        raise HTTPError(422, f"the request must be a JSON object, not {type(body).__name__}")
    return body


# ---- admission of requests


@dataclass
class RequestGate:
    """Counts active requests, and admits no more once the server drains."""

    closed: bool = False
    inside: int = 0
    give_up: Callable[[], None] = lambda: None
    """Fails all active requests."""

    @contextlib.contextmanager
    def entered(self, *, admitted: bool = False) -> Iterator[None]:
        """`admitted`: the request was inside before."""
        if self.closed and not admitted:
            raise ServerClosing
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1


async def answer_json(
    request: Request,
    gate: RequestGate,
    answer: Callable[[dict[str, Any], bytes], Awaitable[Response]],
    error_response: Callable[[Exception], Response],
    *,
    token: str | None,
    max_bytes: int,
    advice: str,
) -> Response:
    """Admit a POST request, authenticate it, read its JSON, and answer it; any error becomes a response. `answer` gets
    the JSON object and its text."""
    try:
        with gate.entered():
            authenticate(request, token)
            content = await read_body(request, max_bytes, advice)
            return await answer(json_object(content), content)
    except Exception as error:
        return error_response(error)


# ---- responses that are sent as they come

Made = TypeVar("Made")


async def until_disconnect(receive: Receive, answer: Awaitable[Made]) -> Made:
    """Await an answer, and cancel it when the client disconnects."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    answering, leaving = asyncio.ensure_future(answer), asyncio.create_task(disconnected())
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientDisconnect
        return await answering
    finally:
        answering.cancel()
        leaving.cancel()


async def reports_of(start: Callable[[Callable[[Any], None]], Awaitable[Any]]) -> AsyncGenerator[Any]:
    """What a coroutine reports while it runs, and then its result. Closing the generator cancels it."""
    arrived: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
    work = asyncio.ensure_future(start(lambda report: arrived.put_nowait((report,))))

    def ended(done: asyncio.Future[Any]) -> None:
        done.cancelled() or done.exception()  # else asyncio would log the error of work that nobody waits for
        arrived.put_nowait(())

    work.add_done_callback(ended)
    try:
        while found := await arrived.get():
            yield found[0]
        yield await work
    finally:
        work.cancel()


class StreamedResponse(StreamingResponse):
    """Server-sent events. If their source fails, the last one is the error; when the client disconnects, it is closed.
    The server does not end before."""

    gate: RequestGate
    error_response: Callable[[Exception], Response]

    def __init__(self, events: AsyncIterator[bytes], status: int = 200):
        super().__init__(events, status, {"Cache-Control": "no-cache"}, "text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_all() -> None:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for event in self.body_iterator:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except Exception as error:
                event = b"data: " + bytes(self.error_response(error).body) + b"\n\n"
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        with self.gate.entered(admitted=True), contextlib.suppress(ClientDisconnect):
            await until_disconnect(receive, send_all())


# ---- metrics


class ServerMetrics:
    """Counters of a server, as a page in Prometheus' text format."""

    prefix: str
    labels: tuple[str, ...]  # of requests

    def __init__(self) -> None:
        self.requests: Counter[tuple[Any, ...]] = Counter()
        self.seconds = 0.0  # time spent working

    def count(self, *labels: Any) -> None:
        self.requests[labels] += 1

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - began

    def page(self, counters: dict[str, Any], gauges: dict[str, int]) -> str:
        lines = [f"# TYPE {self.prefix}_requests_total counter"]
        for values, count in sorted(self.requests.items()):
            shown = ",".join(f'{label}="{value}"' for label, value in zip(self.labels, values))
            lines.append(f"{self.prefix}_requests_total{{{shown}}} {count}")
        for kind, numbers in (("counter", counters), ("gauge", gauges)):
            for name, value in numbers.items():
                lines += [f"# TYPE {self.prefix}_{name} {kind}", f"{self.prefix}_{name} {value}"]
        return "\n".join(lines) + "\n"


# ---- limits on connections, slow clients and logs


def connection_limit(wanted: int | None = None) -> int:
    """The wanted or default number of connections, limited by the available descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS if wanted is None else wanted
    descriptors = wanted + OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < descriptors:
        soft = descriptors if hard == resource.RLIM_INFINITY else min(descriptors, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, soft - OTHER_DESCRIPTORS)


def protocol_with_limits(connections: int) -> type[asyncio.Protocol]:
    """uvicorn's protocol with limits: it closes connections beyond `connections`, and those whose headers take too
    long."""

    class LimitedHTTPProtocol(AutoHTTPProtocol):  # type: ignore[valid-type, misc]  # whichever uvicorn found
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > connections:
                self._close_with(b"503 Service Unavailable", b"too many connections; try again")
                return
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, reason: Exception | None) -> None:
            self._stop_watching()
            super().connection_lost(reason)

        def _watch(self) -> None:
            """Run the timer while no request, or a part of its headers, has arrived; further bytes do not reset it."""
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
                self._close_with(b"408 Request Timeout", b"the request did not arrive in time")

        def _close_with(self, status: bytes, words: bytes) -> None:
            if not self.transport.is_closing():
                length = str(len(words)).encode()
                head = b"HTTP/1.1 " + status + b"\r\nConnection: close\r\nContent-Length: " + length + b"\r\n\r\n"
                self.transport.write(head + words)
                self.transport.close()

    return LimitedHTTPProtocol


class LogRateLimit(logging.Filter):
    """Passes LOG_LINES lines of a logger in LOG_SECONDS, and counts the rest."""

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


def rate_limit_logs(*names: str) -> None:
    for name in names:
        logger = logging.getLogger(name)
        if not any(isinstance(known, LogRateLimit) for known in logger.filters):
            logger.addFilter(LogRateLimit())


# ---- binding, serving, draining


def bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio sets TCP_NODELAY only if the protocol is given; it saves 40 ms for small responses.
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


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains on the first signal: admitted requests are answered within a time limit, new ones
    are refused. The second signal ends it at once."""

    def __init__(self, config: uvicorn.Config, gate: RequestGate, drain_seconds: float):
        super().__init__(config)
        self.gate, self.drain_seconds = gate, drain_seconds
        self._deadline = float("inf")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # uvicorn's backlog is small, because asyncio accepts that many connections at a time; here the kernel's is
        # restored.
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
    connections: int | None = None,
    accepted_at_once: int = ACCEPTED_AT_ONCE,
    loop: Literal["auto", "asyncio"] = "auto",
) -> DrainingServer:
    """A server for an app whose `app.state.gate` admits requests. `connections`: limit, reduced to the available
    descriptors; `accepted_at_once`: of connections that arrive together; `loop`: the event loop."""
    config = uvicorn.Config(
        app,
        http=protocol_with_limits(connection_limit(connections)),
        log_level="warning",
        access_log=False,
        lifespan="on",
        backlog=accepted_at_once,
        loop=loop,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=SECONDS_TO_SEND,
    )
    rate_limit_logs(*LOGS)
    return DrainingServer(config, app.state.gate, drain_seconds)


def run_until_signal(server: Any, listening: socket.socket) -> None:
    """Run a uvicorn server, or one like it, in the main thread, until SIGINT or SIGTERM."""
    # uvicorn raises the signal again when it has finished; it must not kill the process then.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    server.run(sockets=[listening])
