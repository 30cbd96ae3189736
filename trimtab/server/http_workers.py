"""HTTP workers: processes that parse requests and write responses, while one other process runs the engine.

    python -m trimtab.server.http_workers HANDLE

The engine's process starts `HTTPWorkerProcesses` and connects to them with `HTTPWorkers`, in place of a uvicorn server.
The first worker loads the tokenizer and forks the others; all accept from one listening socket. A worker requests
completions from the engine's process (ipc.py), and forwards requests of sessions unchanged, because the engine's
process keeps the sessions. So the engine's interpreter has little to do besides the engine's work. Workers end with the
engine's process.
"""

import asyncio
import contextlib
import gc
import itertools
import json
import logging
import os
import resource
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from transformers import PreTrainedTokenizerBase

from trimtab.data.tokenizer import load_tokenizer
from trimtab.distributed.serialization import frame
from trimtab.errors import UserError
from trimtab.models.pretrained import quiet_transformers
from trimtab.rollout.trajectory import Trajectory
from trimtab.sandbox.process import WorkerProcess
from trimtab.sandbox.worker import begin_worker
from trimtab.server import ipc
from trimtab.server.endpoints import make_policy_app
from trimtab.server.http import LOGS, DrainingServer, StreamedResponse, make_server, rate_limit_logs, reports_of
from trimtab.server.ipc import MessageProtocol
from trimtab.server.request_params import ServerDefaults
from trimtab.server.request_queue import CompletionRequest, PolicyMetrics, QueuedRequest, Report, RequestQueue
from trimtab.server.sessions import ServedPolicy, SessionStore

log = logging.getLogger(__name__)

MOST_WORKERS = 64
RESULTS_AT_ONCE = 32  # per message batch, so that workers start early when many sequences finish together
SECONDS_TO_END = 5.0  # after the drain limit

Headers = list[tuple[bytes, bytes]]


# ---- the engine's process


class HTTPWorkerProcesses:
    """The worker processes. They are started before the model is loaded, because starting takes a while."""

    def __init__(self, count: int, tokenizer: str, **settings: Any):
        """`tokenizer`, `settings`: the arguments of load_tokenizer."""
        self.count, self._tokenizer = count, {"tokenizer": tokenizer, "how": settings}
        self._process, self._opened = WorkerProcess("trimtab.server.http_workers", []), False

    def open(self, listening: socket.socket, settings: dict[str, Any]) -> list[socket.socket]:
        """Let them accept connections; returns a socket to each worker."""
        self._opened = True
        pairs = [socket.socketpair() for _ in range(self.count)]
        with contextlib.ExitStack() as theirs:
            ends = [theirs.enter_context(end) for _, end in pairs]
            try:
                socket.send_fds(self._process.socket, [b"."], [end.fileno() for end in (listening, *ends)])
                self._process.socket.sendall(frame(json.dumps({**self._tokenizer, **settings}).encode()))
            except OSError:
                raise UserError(f"--http_processes: {self._process.exit_reason()}") from None
        return [end for end, _ in pairs]

    def close(self) -> None:
        if self._opened:
            self._process.leave()
        else:  # nothing to finish
            self._process.kill()


class HTTPWorkers:
    """A server that uses worker processes, with the interface of `http.DrainingServer`."""

    def __init__(
        self,
        processes: HTTPWorkerProcesses,
        app: Starlette,
        queue: RequestQueue,
        settings: dict[str, Any],
    ):
        """`settings`: of the workers (see `run_worker`)."""
        self.app, self.queue = app, queue
        # Messages to make and send: of requests whose results may be complete, and of new tokens.
        self.outgoing: deque[tuple[WorkerConnection, Callable[[], bytes | None]]] = deque()
        self._processes, self._settings = processes, settings
        self._connections: list[WorkerConnection] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._delivering = self._signaled = False
        # The app's own gate stays open, so that a request accepted before a worker received DRAIN is answered.
        self._closing = False
        rate_limit_logs(*LOGS)

    def run(self, sockets: Sequence[socket.socket]) -> None:
        with self._signal_handlers():
            try:
                asyncio.run(self._run(sockets[0]))
            finally:
                self._processes.close()

    async def _run(self, listening: socket.socket) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        with listening:
            for end in self._processes.open(listening, self._settings):
                _, connection = await self._loop.create_unix_connection(lambda: WorkerConnection(self), sock=end)
                self._connections.append(connection)
            if self._closing:
                self.drain()
            await self._ended.wait()
        if not self._closing:
            raise UserError("the processes of the server's HTTP side have ended; what they said is above")

    @contextlib.contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains; the second ends at once."""
        self._signaled, again = True, self._signaled
        self._call_in_loop(partial(self._broadcast, ipc.STOP)) if again else self.drain()

    def drain(self) -> None:
        """Answer accepted requests, then end. From any thread."""
        self._closing = True
        self._call_in_loop(self._drain)

    def _drain(self) -> None:
        self._broadcast(ipc.DRAIN)
        assert self._loop is not None
        self._loop.call_later(self._settings["drain_seconds"] + SECONDS_TO_END, self._ended.set)

    def _broadcast(self, kind: int) -> None:
        for connection in self._connections:
            connection.send(ipc.encode(kind, 0))

    def _call_in_loop(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            if self._loop is not None:
                self._loop.call_soon_threadsafe(work)

    # ---- called by connections

    def lost(self, connection: "WorkerConnection") -> None:
        self._connections = [other for other in self._connections if other is not connection]
        if not self._closing:
            log.error("a process of the server's HTTP side has ended; %d are left", len(self._connections))
        if not self._connections:
            self._ended.set()

    def queue_message(self, connection: "WorkerConnection", make: Callable[[], bytes | None]) -> None:
        """Make and send a message in the loop, after those before it. Callable from any thread; the loop is woken once
        for many."""
        self.outgoing.append((connection, make))
        if not self._delivering:
            self._delivering = True
            self._call_in_loop(self._deliver)

    def _deliver(self) -> None:
        self._delivering = False
        while self.outgoing:
            made: dict[WorkerConnection, list[bytes]] = {}
            for _ in range(min(len(self.outgoing), RESULTS_AT_ONCE)):
                connection, make = self.outgoing.popleft()
                if (message := make()) is not None:
                    made.setdefault(connection, []).append(message)
            for connection, messages in made.items():
                connection.send(*messages)


class WorkerConnection(MessageProtocol):
    """The engine's end of the connection to one worker."""

    def __init__(self, workers: HTTPWorkers):
        super().__init__()
        self.workers = workers
        self._requests: dict[int, list[QueuedRequest]] = {}
        self._forwarded: dict[int, tuple[asyncio.Task[None], asyncio.Event]] = {}  # with: client has left

    def received(self, kind: int, number: int, content: memoryview) -> None:
        if kind == ipc.COMPLETE:
            self._complete(number, content)
        elif kind == ipc.CANCEL:
            self._cancel(number)
        elif kind == ipc.FORWARD:
            disconnected = asyncio.Event()
            task = asyncio.get_running_loop().create_task(self._respond(number, content, disconnected))
            self._forwarded[number] = task, disconnected
        elif kind == ipc.COUNT:
            self.workers.queue.metrics.count(*json.loads(content.tobytes()))

    def connection_lost(self, error: Exception | None) -> None:
        for number in [*self._requests, *self._forwarded]:
            self._cancel(number)
        self.workers.lost(self)

    def _cancel(self, number: int) -> None:
        for request in self._requests.pop(number, ()):
            request.result.cancel()
        if number in self._forwarded:
            self._forwarded[number][1].set()

    # ---- completions

    def _complete(self, number: int, content: memoryview) -> None:
        def report(answer: int, piece: Trajectory) -> None:
            self.workers.queue_message(self, partial(ipc.encode_piece, number, answer, piece))

        try:
            request = ipc.decode_request(content)
            requests = self.workers.queue.put_all(request, report if request.stream else None)
        except Exception as error:
            self.send(ipc.encode_error(number, error))
            return
        self._requests[number] = requests
        for one in requests:
            one.result.add_done_callback(lambda _: self.workers.queue_message(self, partial(self.result, number)))

    def result(self, number: int) -> bytes | None:
        """The message with all results of a request, or with its first error; None: results are missing."""
        requests = self._requests.get(number, [])
        done = [request.result for request in requests if request.result.done()]
        errors = [RuntimeError("given up") if result.cancelled() else result.exception() for result in done]
        error = next((error for error in errors if error is not None), None)
        if not requests or (error is None and len(done) < len(requests)):
            return None
        del self._requests[number]
        if error is None:
            return ipc.encode_trajectories(number, [result.result() for result in done])
        for request in requests:
            request.result.cancel()
        return ipc.encode_error(number, error)

    # ---- forwarded HTTP requests

    async def _respond(self, number: int, content: memoryview, disconnected: asyncio.Event) -> None:
        """Run the app on the request, as an ASGI server would."""
        head, body = ipc.decode_http(content)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": head["method"],
            "path": head["path"],
            "raw_path": head["path"].encode(),
            "root_path": "",
            "query_string": head["query"].encode("latin-1"),
            "headers": _headers_from_json(head["headers"]),
            "client": None,
            "server": None,
        }
        begun = False
        response: dict[str, Any] = {"status": 500, "headers": [], "more": False}
        rest = b""

        async def receive() -> dict[str, Any]:
            nonlocal begun
            if begun:
                await disconnected.wait()
                return {"type": "http.disconnect"}
            begun = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            nonlocal rest
            if message["type"] == "http.response.start":
                response.update(status=message["status"], headers=_headers_to_json(message["headers"]))
            elif message.get("more_body"):
                self.send(ipc.encode_http(ipc.MORE, number, {**response, "more": True}, message.get("body", b"")))
            else:
                rest = message.get("body", b"")

        try:
            await self.workers.app(scope, receive, send)
            self.send(ipc.encode_http(ipc.RESPONSE, number, response, rest))
        except Exception as error:
            log.error("a request failed", exc_info=error)
            self.send(ipc.encode_error(number, error))
        finally:
            del self._forwarded[number]


def _headers_to_json(headers: Headers) -> list[list[str]]:
    return [[name.decode("latin-1"), value.decode("latin-1")] for name, value in headers]


def _headers_from_json(headers: list[list[str]]) -> Headers:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


# ---- a worker's process


class EngineConnection(MessageProtocol):
    """A worker's end of the connection to the engine's process; the `CompletionBackend` of its endpoints."""

    def __init__(self, most_waiting: int):
        super().__init__()
        self.most_waiting = most_waiting
        self.server: DrainingServer | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[memoryview]] = {}
        self._reports: dict[int, Callable[[memoryview], None]] = {}  # for messages before the reply
        self._closed: Exception | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def closed(self) -> bool:
        return self._closed is not None

    async def complete(self, request: CompletionRequest, report: Report | None = None) -> list[Trajectory]:
        number = next(self._numbers)

        def received(content: memoryview) -> None:
            assert report is not None, "the request is streamed"
            report(*ipc.decode_piece(content))

        content = await self._reply(number, ipc.encode_request(number, request), received)
        return ipc.decode_trajectories(content, request.prompt_ids)

    async def forward(self, request: Request, body: bytes) -> Response:
        """The response of the engine's process to a whole HTTP request, as it comes."""
        number, scope = next(self._numbers), request.scope
        head = {
            "method": scope["method"],
            "path": scope["path"],
            "query": scope["query_string"].decode("latin-1"),
            "headers": _headers_to_json(scope["headers"]),
        }
        message = ipc.encode_http(ipc.FORWARD, number, head, body)
        arriving = reports_of(lambda report: self._reply(number, message, report))
        about, content = ipc.decode_http(await anext(arriving))

        async def parts() -> AsyncIterator[bytes]:
            yield content
            async for part in arriving:
                yield ipc.decode_http(part)[1]

        status = about["status"]
        response = StreamedResponse(parts(), status) if about["more"] else Response(content, status)
        response.raw_headers = _headers_from_json(about["headers"])
        return response

    async def _reply(self, number: int, message: bytes, report: Callable[[memoryview], None]) -> memoryview:
        if self._closed is not None:
            raise self._closed
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._reports[number] = report
        try:
            self.send(message)
            return await reply
        except asyncio.CancelledError:
            self.send(ipc.encode(ipc.CANCEL, number))
            raise
        finally:
            self._waiting.pop(number, None)
            self._reports.pop(number, None)

    def close(self, error: Exception) -> None:
        self._closed = self._closed or error
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(error)

    def received(self, kind: int, number: int, content: memoryview) -> None:
        reply = self._waiting.get(number)
        if kind == ipc.DRAIN and self.server is not None:
            self.server.drain()
        elif kind == ipc.STOP and self.server is not None:
            self.server.handle_exit(signal.SIGTERM, None)
        elif reply is None or reply.done():
            return  # the client has disconnected
        elif kind in (ipc.PIECE, ipc.MORE):
            self._reports[number](content)
        elif kind == ipc.FAILED:
            reply.set_exception(ipc.decode_error(content))
        else:
            reply.set_result(content)

    def connection_lost(self, error: Exception | None) -> None:
        """Exit: without the engine's process a worker cannot answer anything."""
        if not (self.server is not None and self.server.should_exit):
            os._exit(0)


class RemoteMetrics(PolicyMetrics):
    """Counts requests in the engine's process."""

    def __init__(self, engine: EngineConnection):
        super().__init__()
        self.engine = engine

    def count(self, path: str, status: int) -> None:
        self.engine.send(ipc.encode(ipc.COUNT, 0, json.dumps([path, status]).encode()))


def run_worker(end: socket.socket, listening: socket.socket, policy: ServedPolicy, settings: dict[str, Any]) -> None:
    """Serve until the engine's process sends a stop. `end`: the worker's socket to it."""
    engine = EngineConnection(settings["max_waiting"])
    app = make_policy_app(
        *(policy, engine, SessionStore(private=settings["private"]), RemoteMetrics(engine)),
        token=settings["token"],
        max_bytes=settings["max_bytes"],
        forward=engine.forward,
    )
    inner = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: engine, sock=end)
        async with inner(app):
            yield
        transport.close()

    app.router.lifespan_context = lifespan
    # Accept one connection at a time, so that connections that arrive together are spread over the workers; uvloop
    # would accept all of them.
    server = engine.server = make_server(app, settings["drain_seconds"], accepted_at_once=1, loop="asyncio")
    server.run(sockets=[listening])


def worker_policy(settings: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> ServedPolicy:
    defaults = ServerDefaults(tuple(settings["stops"]), settings["vocabulary"])
    return ServedPolicy(settings["name"], tokenizer, defaults, settings["max_model_len"])


def main(handle: str) -> None:
    connection = begin_worker(handle, resource.getrlimit(resource.RLIMIT_DATA)[1])
    with socket.socket(fileno=os.dup(connection.fileno())) as engine:
        descriptors = socket.recv_fds(engine, 1, 1 + MOST_WORKERS)[1]
    if not descriptors:  # the engine's process has ended before it sent anything
        return
    settings = json.loads(connection.recv_bytes())
    listening, *ends = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    quiet_transformers()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would be missing in the forks
    policy = worker_policy(settings, load_tokenizer(settings["tokenizer"], **settings["how"]))
    policy.name_all()  # once for all forks
    gc.collect()
    gc.freeze()  # the forks share these objects' pages
    forks = []
    for number, end in enumerate(ends):
        if (fork := os.fork()) == 0:
            for other in ends[:number] + ends[number + 1 :]:
                other.close()
            code = 1
            try:
                run_worker(end, listening, policy, settings)
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        forks.append(fork)
        end.close()
    listening.close()
    for fork in forks:
        os.waitpid(fork, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
