"""A server whose HTTP side is processes of its own (front.py), as the engine's process sees them.

They ask for turns, which are drawn at the desk, and pass on what belongs to sessions, which the app answers here. So
this interpreter has little to do but the engine's work.
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
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from transformers import PreTrainedTokenizerBase

from trimtab.data.tokenizer import load_tokenizer
from trimtab.errors import UserError
from trimtab.models.hugging_face import quiet_transformers
from trimtab.rollout.trajectory import Rollout
from trimtab.sandbox.channel import Channel
from trimtab.sandbox.process import WorkerProcess
from trimtab.sandbox.worker import begin_worker
from trimtab.server import ipc
from trimtab.server.endpoints import make_policy_app
from trimtab.server.http import DrainingServer, make_server, rate_limit_logs
from trimtab.server.ipc import Post
from trimtab.server.request_params import ServerDefaults
from trimtab.server.request_queue import CompletionRequest, LocalBackend, PolicyMetrics, QueuedRequest
from trimtab.server.sessions import ServedPolicy, SessionStore

log = logging.getLogger(__name__)

SENT_AT_ONCE = 32  # answers: where many end together, the processes begin with the first ones
SECONDS_TO_END = 5.0  # beyond the limit of what was accepted


class HTTPWorkerProcesses:
    """As many as wanted. They need a while to start, before it is known what they serve."""

    def __init__(self, count: int, tokenizer: str, **how: Any):
        """`tokenizer`, `how`: what load_tokenizer is given."""
        self.count, self._tokenizer = count, {"tokenizer": tokenizer, "how": how}
        self._child, self._opened = WorkerProcess("trimtab.server.http_workers", []), False

    def open(self, listening: socket.socket, about: dict[str, Any]) -> list[socket.socket]:
        """They begin to accept; our ends of the connections to them."""
        self._opened = True
        pairs = [socket.socketpair() for _ in range(self.count)]
        with contextlib.ExitStack() as theirs:
            ends = [theirs.enter_context(end) for _, end in pairs]
            try:
                socket.send_fds(self._child.socket, [b"."], [end.fileno() for end in (listening, *ends)])
                Channel(self._child.socket).send(json.dumps({**self._tokenizer, **about}).encode())
            except OSError:
                raise UserError(f"--http_processes: {self._child.how_it_died()}") from None
        return [end for end, _ in pairs]

    def close(self) -> None:
        if self._opened:
            self._child.leave()
        else:  # they have nothing to tidy up
            self._child.kill()


class HTTPWorkers:
    """In the place of a web server; what it needs of one (server/http.py)."""

    def __init__(
        self,
        processes: HTTPWorkerProcesses,
        app: Starlette,
        drawing: LocalBackend,
        metrics: PolicyMetrics,
        about: dict[str, Any],
        drain_seconds: float,
    ):
        """`about`: what the processes must know."""
        self.app, self.drawing, self.metrics = app, drawing, metrics
        self.settled: deque[tuple[WorkerConnection, int]] = deque()  # whose answers may be there
        self._processes, self._about, self._drain_seconds = processes, about, drain_seconds
        self._fronts: list[WorkerConnection] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = self._told = False
        # What a process has let in before it hears of the end is answered here, too: the app's own gate stays open.
        self._closing = False
        rate_limit_logs("asyncio", __name__, *about["logs"])

    def run(self, sockets: Sequence[socket.socket]) -> None:
        with self._signals():
            try:
                asyncio.run(self._run(sockets[0]))
            finally:
                self._processes.close()

    async def _run(self, listening: socket.socket) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        with listening:
            ends = self._processes.open(listening, self._about)
            for end in ends:
                self._fronts.append(
                    (await self._loop.create_unix_connection(lambda: WorkerConnection(self), sock=end))[1]
                )
            if self._closing:
                self.drain()
            await self._ended.wait()
        if not self._closing:
            raise UserError("the processes of the server's HTTP side have ended; what they said is above")

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
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
        """Told once, what was accepted is answered; told again, nothing more."""
        self._told, again = True, self._told
        self._from_anywhere(lambda: self._tell(ipc.END)) if again else self.drain()

    def drain(self) -> None:
        self._closing = True
        self._from_anywhere(self._drain)

    def _drain(self) -> None:
        self._tell(ipc.DRAIN)
        assert self._loop is not None
        self._loop.call_later(self._drain_seconds + SECONDS_TO_END, self._ended.set)

    def _tell(self, kind: int) -> None:
        for front in self._fronts:
            front.send(ipc.letter(kind, 0))

    def _from_anywhere(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended
            if self._loop is not None:
                self._loop.call_soon_threadsafe(work)

    # ---- what fronts say

    def lost(self, front: "WorkerConnection") -> None:
        self._fronts = [other for other in self._fronts if other is not front]
        if not self._closing:
            log.error("a process of the server's HTTP side has ended; %d are left", len(self._fronts))
        if not self._fronts:
            self._ended.set()

    def settle(self, front: "WorkerConnection", number: int) -> None:
        """From any thread: an answer is there, or will not be."""
        self.settled.append((front, number))
        if not self._woken:
            self._woken = True
            self._from_anywhere(self._deliver)

    def _deliver(self) -> None:
        self._woken = False
        while self.settled:
            outgoing: dict[WorkerConnection, list[bytes]] = {}
            for _ in range(min(len(self.settled), SENT_AT_ONCE)):
                front, number = self.settled.popleft()
                if (letter := front.outcome(number)) is not None:
                    outgoing.setdefault(front, []).append(letter)
            for front, found in outgoing.items():
                front.send(*found)


@dataclass
class ForwardedRequest:
    """A request that is answered here as a whole."""

    task: asyncio.Task[None]
    left: asyncio.Event  # its client has


class WorkerConnection(Post):
    """One of them."""

    def __init__(self, office: HTTPWorkers):
        super().__init__()
        self.office = office
        self._asks: dict[int, list[QueuedRequest]] = {}
        self._passed: dict[int, ForwardedRequest] = {}

    def read(self, come: Iterable[tuple[int, int, bytes]]) -> None:
        for kind, number, content in come:
            if kind == ipc.ASKED:
                self._ask(number, content)
            elif kind == ipc.GONE:
                self._gone(number)
            elif kind == ipc.PASSED_ON:
                left = asyncio.Event()
                task = asyncio.get_running_loop().create_task(self._answer(number, content, left))
                self._passed[number] = ForwardedRequest(task, left)
            elif kind == ipc.COUNTED:
                self.office.metrics.count(*json.loads(content))

    def connection_lost(self, error: Exception | None) -> None:
        for number in [*self._asks, *self._passed]:
            self._gone(number)
        self.office.lost(self)

    def _gone(self, number: int) -> None:
        for ask in self._asks.pop(number, ()):
            ask.answer.cancel()
        if number in self._passed:
            self._passed[number].left.set()

    # ---- turns

    def _ask(self, number: int, content: bytes) -> None:
        drawing = self.office.drawing
        try:
            asks = drawing.asks(ipc.read_turn(content))
            drawing.desk.ask(*asks)
        except Exception as error:
            self.send(ipc.failed_letter(number, error))
            return
        self._asks[number] = asks
        for ask in asks:
            ask.answer.add_done_callback(partial(self._settled, number))

    def _settled(self, number: int, answer: Any) -> None:
        self.office.settle(self, number)

    def outcome(self, number: int) -> bytes | None:
        """Of a request, if it has one: all its answers, or the first thing that went wrong."""
        asks = self._asks.get(number, [])
        done = [ask.answer for ask in asks if ask.answer.done()]
        error = next((e for answer in done if (e := _error(answer)) is not None), None)
        if not asks or (error is None and len(done) < len(asks)):
            return None
        del self._asks[number]
        if error is None:
            return ipc.drawn_letter(number, [answer.result() for answer in done])
        for ask in asks:
            ask.answer.cancel()
        return ipc.failed_letter(number, error)

    # ---- requests that are answered here

    async def _answer(self, number: int, content: bytes, left: asyncio.Event) -> None:
        about, body = ipc.read_whole(content)
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in about["headers"]]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": about["method"],
            "path": about["path"],
            "raw_path": about["path"].encode(),
            "root_path": "",
            "query_string": about["query"].encode("latin-1"),
            "headers": headers,
            "client": None,
            "server": None,
        }
        begun = False
        sent: dict[str, Any] = {"status": 500, "headers": []}
        said = bytearray()

        async def receive() -> dict[str, Any]:
            nonlocal begun
            if begun:
                await left.wait()
                return {"type": "http.disconnect"}
            begun = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                sent["status"] = message["status"]
                sent["headers"] = [[n.decode("latin-1"), v.decode("latin-1")] for n, v in message["headers"]]
            else:
                said.extend(message.get("body", b""))

        try:
            await self.office.app(scope, receive, send)
            self.send(ipc.whole_letter(ipc.ANSWERED, number, sent, bytes(said)))
        except Exception as error:
            log.error("a request failed", exc_info=error)
            self.send(ipc.failed_letter(number, error))
        finally:
            del self._passed[number]


def _error(answer: Any) -> BaseException | None:
    return RuntimeError("given up") if answer.cancelled() else answer.exception()


# ---- A process of a server's HTTP side: it reads requests and writes replies, and has turns drawn


MOST_PROCESSES = 64


class EngineConnection(Post):
    """Asks the engine's process, and is told by it when to end."""

    def __init__(self, most_waiting: int):
        super().__init__()
        self.most_waiting = most_waiting
        self.server: DrainingServer | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._closed: Exception | None = None

    # ---- what the endpoints ask

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def closed(self) -> bool:
        return self._closed is not None

    async def draw(self, turn: CompletionRequest) -> list[Rollout]:
        number = next(self._numbers)
        content = await self._asked(number, ipc.turn_letter(number, turn))
        return ipc.read_rollouts(content, turn.prompt_ids)

    async def pass_on(self, request: Request, content: bytes) -> Response:
        number, scope = next(self._numbers), request.scope
        about = {
            "method": scope["method"],
            "path": scope["path"],
            "query": scope["query_string"].decode("latin-1"),
            "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in scope["headers"]],
        }
        asked = ipc.whole_letter(ipc.PASSED_ON, number, about, content)
        head, body = ipc.read_whole(await self._asked(number, asked))
        response = Response(body, head["status"])
        response.raw_headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in head["headers"]]
        return response

    async def _asked(self, number: int, letter: bytes) -> bytes:
        if self._closed is not None:
            raise self._closed
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(letter)
            return await answer
        except asyncio.CancelledError:
            self.send(ipc.letter(ipc.GONE, number))
            raise
        finally:
            self._waiting.pop(number, None)

    def close(self, error: Exception) -> None:
        self._closed = self._closed or error
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)

    # ---- what the engine's process says

    def read(self, come: Iterable[tuple[int, int, bytes]]) -> None:
        for kind, number, content in come:
            answer = self._waiting.get(number)
            if kind == ipc.DRAIN and self.server is not None:
                self.server.drain()
            elif kind == ipc.END and self.server is not None:
                self.server.handle_exit(signal.SIGTERM, None)
            elif answer is None or answer.done():
                continue  # its client has gone
            elif kind == ipc.FAILED:
                answer.set_exception(ipc.read_error(content))
            else:
                answer.set_result(content)

    def connection_lost(self, error: Exception | None) -> None:
        """Without the engine's process there is nothing to say to anybody."""
        if not (self.server is not None and self.server.should_exit):
            os._exit(0)


class RemoteMetrics(PolicyMetrics):
    def __init__(self, front: EngineConnection):
        super().__init__()
        self.front = front

    def count(self, path: str, status: int) -> None:
        self.front.send(ipc.letter(ipc.COUNTED, 0, json.dumps([path, status]).encode()))


def work(post: socket.socket, listening: socket.socket, policy: ServedPolicy, about: dict[str, Any]) -> None:
    """Until told to end."""
    front = EngineConnection(about["max_waiting"])
    app = make_policy_app(
        *(policy, front, SessionStore(private=about["private"]), RemoteMetrics(front)),
        token=about["token"],
        max_bytes=about["max_bytes"],
        elsewhere=front.pass_on,
    )
    _connected(app, front, post)
    # One connection at a time, so that those that come together are shared out; uvloop would take all that are there.
    server = front.server = make_server(
        app, about["drain_seconds"], logs=about["logs"], accepted_at_once=1, loop="asyncio"
    )
    server.run(sockets=[listening])


def _connected(app: Starlette, front: EngineConnection, post: socket.socket) -> None:
    """The app with a connection to the engine's process for as long as it runs."""
    inner = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: front, sock=post)
        async with inner(app):
            yield
        transport.close()

    app.router.lifespan_context = lifespan


def served_policy(about: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> ServedPolicy:
    house = ServerDefaults(tuple(about["stops"]), about["vocabulary"])
    return ServedPolicy(about["name"], tokenizer, house, about["most_tokens"])


def main(handle: str) -> None:
    connection = begin_worker(handle, resource.getrlimit(resource.RLIMIT_DATA)[1])
    with socket.socket(fileno=os.dup(connection.fileno())) as engine:
        descriptors = socket.recv_fds(engine, 1, 1 + MOST_PROCESSES)[1]
    if not descriptors:  # the engine's process has ended before it could say anything
        return
    about = json.loads(connection.recv_bytes())
    listening, *posts = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    quiet_transformers()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not be there in the forks
    policy = served_policy(about, load_tokenizer(about["tokenizer"], **about["how"]))
    policy.name_all()  # once for all
    gc.collect()
    gc.freeze()  # what is there now stays, and stays shared
    forks = []
    for number, post in enumerate(posts):
        if (fork := os.fork()) == 0:
            for other in posts[:number] + posts[number + 1 :]:
                other.close()
            code = 1
            try:
                work(post, listening, policy, about)
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        forks.append(fork)
        post.close()
    listening.close()
    for fork in forks:
        os.waitpid(fork, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
