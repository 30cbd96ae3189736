"""A reward server in a thread of this process, for as long as a test needs it."""

import contextlib
import socket
import threading
from collections.abc import Iterator

from trimtab.rewards.types import Reward
from trimtab.server.http import address, bind, make_server
from trimtab.server.reward_server import make_reward_app


class Running:
    def __init__(self, reward: Reward, drain_seconds: float = 30.0, **how):
        listening = bind("127.0.0.1", 0)
        self.url = address(listening)
        self.server = make_server(make_reward_app(reward, **how), drain_seconds)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listening]}, daemon=True)
        self.thread.start()

    def connect(self, **how) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), **how)

    def stop(self) -> None:
        """Ask it to end, as a signal would."""
        self.server.drain()


@contextlib.contextmanager
def running(reward: Reward, **how) -> Iterator[Running]:
    server = Running(reward, **how)
    try:
        yield server
    finally:
        server.stop()
        server.thread.join(30)
        assert not server.thread.is_alive()
