"""A server whose HTTP side is processes of its own (front.py), as the engine's process sees them.

They ask for turns, which are drawn at the desk, and pass on what belongs to sessions, which the app answers here. So
this interpreter has little to do but the engine's work.
"""

import asyncio
import contextlib
import json
import logging
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

from starlette.applications import Starlette

from trimtab.errors import UserError
from trimtab.processes.channel import Channel
from trimtab.processes.child import Child
from trimtab.serving import letters
from trimtab.serving.desk import Ask
from trimtab.serving.drawing import DrawingHere
from trimtab.serving.letters import Post
from trimtab.serving.metrics import Metrics
from trimtab.web.manners import keep_logs_short

log = logging.getLogger(__name__)

SENT_AT_ONCE = 32  # answers: where many end together, the processes begin with the first ones
SECONDS_TO_END = 5.0  # beyond the limit of what was accepted


class FrontProcesses:
    """As many as wanted. They need a while to start, before it is known what they serve."""

    def __init__(self, count: int, tokenizer: str, **how: Any):
        """`tokenizer`, `how`: what load_tokenizer is given."""
        self.count, self._tokenizer = count, {"tokenizer": tokenizer, "how": how}
        self._child, self._opened = Child("trimtab.serving.front", []), False

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


class Fronts:
    """In the place of a web server; what it needs of one (web/server.py)."""

    def __init__(
        self,
        processes: FrontProcesses,
        app: Starlette,
        drawing: DrawingHere,
        metrics: Metrics,
        about: dict[str, Any],
        drain_seconds: float,
    ):
        """`about`: what the processes must know."""
        self.app, self.drawing, self.metrics = app, drawing, metrics
        self.settled: deque[tuple[Front, int]] = deque()  # whose answers may be there
        self._processes, self._about, self._drain_seconds = processes, about, drain_seconds
        self._fronts: list[Front] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = self._told = False
        # What a process has let in before it hears of the end is answered here, too: the app's own gate stays open.
        self._closing = False
        keep_logs_short("asyncio", __name__, *about["logs"])

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
                self._fronts.append((await self._loop.create_unix_connection(lambda: Front(self), sock=end))[1])
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
        self._from_anywhere(lambda: self._tell(letters.END)) if again else self.drain()

    def drain(self) -> None:
        self._closing = True
        self._from_anywhere(self._drain)

    def _drain(self) -> None:
        self._tell(letters.DRAIN)
        assert self._loop is not None
        self._loop.call_later(self._drain_seconds + SECONDS_TO_END, self._ended.set)

    def _tell(self, kind: int) -> None:
        for front in self._fronts:
            front.send(letters.letter(kind, 0))

    def _from_anywhere(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended
            if self._loop is not None:
                self._loop.call_soon_threadsafe(work)

    # ---- what fronts say

    def lost(self, front: "Front") -> None:
        self._fronts = [other for other in self._fronts if other is not front]
        if not self._closing:
            log.error("a process of the server's HTTP side has ended; %d are left", len(self._fronts))
        if not self._fronts:
            self._ended.set()

    def settle(self, front: "Front", number: int) -> None:
        """From any thread: an answer is there, or will not be."""
        self.settled.append((front, number))
        if not self._woken:
            self._woken = True
            self._from_anywhere(self._deliver)

    def _deliver(self) -> None:
        self._woken = False
        while self.settled:
            outgoing: dict[Front, list[bytes]] = {}
            for _ in range(min(len(self.settled), SENT_AT_ONCE)):
                front, number = self.settled.popleft()
                if (letter := front.outcome(number)) is not None:
                    outgoing.setdefault(front, []).append(letter)
            for front, found in outgoing.items():
                front.send(*found)


@dataclass
class Passed:
    """A request that is answered here as a whole."""

    task: asyncio.Task[None]
    left: asyncio.Event  # its client has


class Front(Post):
    """One of them."""

    def __init__(self, office: Fronts):
        super().__init__()
        self.office = office
        self._asks: dict[int, list[Ask]] = {}
        self._passed: dict[int, Passed] = {}

    def read(self, come: Iterable[tuple[int, int, bytes]]) -> None:
        for kind, number, content in come:
            if kind == letters.ASKED:
                self._ask(number, content)
            elif kind == letters.GONE:
                self._gone(number)
            elif kind == letters.PASSED_ON:
                left = asyncio.Event()
                task = asyncio.get_running_loop().create_task(self._answer(number, content, left))
                self._passed[number] = Passed(task, left)
            elif kind == letters.COUNTED:
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
            asks = drawing.asks(letters.read_turn(content))
            drawing.desk.ask(*asks)
        except Exception as error:
            self.send(letters.failed_letter(number, error))
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
            return letters.drawn_letter(number, [answer.result() for answer in done])
        for ask in asks:
            ask.answer.cancel()
        return letters.failed_letter(number, error)

    # ---- requests that are answered here

    async def _answer(self, number: int, content: bytes, left: asyncio.Event) -> None:
        about, body = letters.read_whole(content)
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
            self.send(letters.whole_letter(letters.ANSWERED, number, sent, bytes(said)))
        except Exception as error:
            log.error("a request failed", exc_info=error)
            self.send(letters.failed_letter(number, error))
        finally:
            del self._passed[number]


def _error(answer: Any) -> BaseException | None:
    return RuntimeError("given up") if answer.cancelled() else answer.exception()
