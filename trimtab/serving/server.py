"""The parts of a policy server, put together: in a process of its own, or in a thread of one that does other things."""

import socket
import sys
import threading
from collections.abc import Callable

from trimtab.rollout.engine import Engine
from trimtab.rollout.types import Sampling
from trimtab.serving.app import MOST_BYTES, make_app
from trimtab.serving.desk import MOST_WAITING, Desk, Driver, EngineFailed
from trimtab.serving.drawing import DrawingHere
from trimtab.serving.fronts import FrontProcesses, Fronts
from trimtab.serving.metrics import Metrics
from trimtab.serving.policy import ServedPolicy
from trimtab.serving.records import Records
from trimtab.web.server import DRAIN_SECONDS, SECONDS_TO_SEND, Server, address, bind, make_server, serve_until_told

INVITED_CONNECTIONS = 2**16  # all episodes of an iteration are under way at once, each with one of its own
# The engine's thread comes to its next step this soon while replies are written. Python's own 5 ms are several steps.
SWITCH_SECONDS = 0.0002
LOGS = ["trimtab.serving.refusals", "trimtab.serving.desk"]


class PolicyServer:
    def __init__(
        self,
        policy: ServedPolicy,
        *,
        token: str | None = None,
        seed: int = 0,
        version: Callable[[], int] = lambda: 0,
        max_bytes: int = MOST_BYTES,
        max_waiting: int = MOST_WAITING,
        drain_seconds: float = DRAIN_SECONDS,
        invited: bool = False,
        private: bool = False,
        processes: FrontProcesses | None = None,
    ):
        """`token`: what requests must bring; `seed`: of requests that bring none; `version`: of the weights; `invited`:
        only sessions that were opened in this process are answered; `private`: the server names sessions itself;
        `processes`: that have the HTTP side, and are ended with the server."""
        self.policy, self.metrics, self.records = policy, Metrics(), Records(invited=invited, private=private)
        self.desk = Desk(self.metrics, max_waiting)
        drawing = DrawingHere(self.desk, seed)
        app = make_app(
            *(policy, drawing, self.records, self.metrics),
            token=token,
            version=version,
            max_bytes=max_bytes,
        )
        self.gate = app.state.gate
        self._server: Server | Fronts
        if processes is None:
            connections = INVITED_CONNECTIONS if invited else None
            self._server = make_server(app, drain_seconds, logs=LOGS, connections=connections)
        else:
            about = {
                "name": policy.name,
                "stops": list(policy.house.stops),
                "vocabulary": policy.house.vocabulary,
                "most_tokens": policy.most_tokens,
                "token": token,
                "private": private,
                "max_bytes": max_bytes,
                "max_waiting": max_waiting,
                "drain_seconds": drain_seconds,
                "logs": LOGS,
            }
            self._server = Fronts(processes, app, drawing, self.metrics, about, drain_seconds)
        self._driver: Driver | None = None
        self._thread: threading.Thread | None = None
        sys.setswitchinterval(SWITCH_SECONDS)

    def drive(self, engine: Engine) -> None:
        """Have this engine answer, in a thread of its own. Without it, whoever has a session works at the desk."""
        usual = Sampling(stop_token_ids=self.policy.house.stops)
        self._driver = Driver(engine, self.desk, usual, self.policy.most_tokens)

    def run(self, listening: socket.socket) -> bool:
        """In the main thread until SIGINT or SIGTERM; whether nothing is being drawn any more."""
        try:
            serve_until_told(self._server, listening)
        finally:
            ended = self._end()
        return ended

    def start(self, port: int = 0) -> str:
        """In a thread, at this port, or a free one, of this machine's own address, which is returned."""
        listening = bind("127.0.0.1", port)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listening]}, name="policy server", daemon=True
        )
        self._thread.start()
        return address(listening)

    def stop(self) -> None:
        """Answer those inside, then end; whoever comes later is sent away."""
        self._server.drain()

    def join(self) -> None:
        assert self._thread is not None, "it was started"
        self._thread.join()
        self._end()

    def _end(self) -> bool:
        self.desk.close(EngineFailed("the server has ended"))
        if self._driver is None:
            return True
        self._driver.thread.join(SECONDS_TO_SEND)
        return not self._driver.thread.is_alive()
