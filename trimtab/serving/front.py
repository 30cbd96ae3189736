"""A process of a server's HTTP side: it reads requests and writes replies, and has turns drawn by the engine's process.

    python -m trimtab.serving.front HANDLE

The first such process loads the tokenizer and forks into as many as are wanted, which accept at the same socket. What
belongs to a session is passed on as it came (fronts.py is the other side). They end with the engine's process.
"""

import asyncio
import contextlib
import gc
import itertools
import json
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import AsyncIterator, Iterable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from transformers import PreTrainedTokenizerBase

from trimtab.data.tokenizer import load_tokenizer
from trimtab.models.hugging_face import quiet_transformers
from trimtab.processes.within import begin
from trimtab.rollout.types import Rollout
from trimtab.serving import letters
from trimtab.serving.app import make_app
from trimtab.serving.drawing import Turn
from trimtab.serving.letters import Post
from trimtab.serving.metrics import Metrics
from trimtab.serving.policy import ServedPolicy
from trimtab.serving.records import Records
from trimtab.serving.wanted import House
from trimtab.web.server import Server, make_server

MOST_PROCESSES = 64


class Front(Post):
    """Asks the engine's process, and is told by it when to end."""

    def __init__(self, most_waiting: int):
        super().__init__()
        self.most_waiting = most_waiting
        self.server: Server | None = None
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

    async def draw(self, turn: Turn) -> list[Rollout]:
        number = next(self._numbers)
        content = await self._asked(number, letters.turn_letter(number, turn))
        return letters.read_rollouts(content, turn.prompt_ids)

    async def pass_on(self, request: Request, content: bytes) -> Response:
        number, scope = next(self._numbers), request.scope
        about = {
            "method": scope["method"],
            "path": scope["path"],
            "query": scope["query_string"].decode("latin-1"),
            "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in scope["headers"]],
        }
        asked = letters.whole_letter(letters.PASSED_ON, number, about, content)
        head, body = letters.read_whole(await self._asked(number, asked))
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
            self.send(letters.letter(letters.GONE, number))
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
            if kind == letters.DRAIN and self.server is not None:
                self.server.drain()
            elif kind == letters.END and self.server is not None:
                self.server.handle_exit(signal.SIGTERM, None)
            elif answer is None or answer.done():
                continue  # its client has gone
            elif kind == letters.FAILED:
                answer.set_exception(letters.read_error(content))
            else:
                answer.set_result(content)

    def connection_lost(self, error: Exception | None) -> None:
        """Without the engine's process there is nothing to say to anybody."""
        if not (self.server is not None and self.server.should_exit):
            os._exit(0)


class CountedElsewhere(Metrics):
    def __init__(self, front: Front):
        super().__init__()
        self.front = front

    def count(self, path: str, status: int) -> None:
        self.front.send(letters.letter(letters.COUNTED, 0, json.dumps([path, status]).encode()))


def work(post: socket.socket, listening: socket.socket, policy: ServedPolicy, about: dict[str, Any]) -> None:
    """Until told to end."""
    front = Front(about["max_waiting"])
    app = make_app(
        *(policy, front, Records(private=about["private"]), CountedElsewhere(front)),
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


def _connected(app: Starlette, front: Front, post: socket.socket) -> None:
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
    house = House(tuple(about["stops"]), about["vocabulary"])
    return ServedPolicy(about["name"], tokenizer, house, about["most_tokens"])


def main(handle: str) -> None:
    connection = begin(handle, resource.getrlimit(resource.RLIMIT_DATA)[1])
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
