"""Environments of a policy whose layers are cut over processes. All of these ask the same and draw the same; the first
has the environments, and the others hear from it what came back."""

from dataclasses import asdict
from typing import Any

from trimtab.agents.engine import World
from trimtab.distributed.peers import Peers
from trimtab.envs.loaded import About
from trimtab.envs.replies import Broken, Ended, Opened, Reply, Stepped
from trimtab.envs.types import Step, Task, Turn

KINDS: dict[str, type[Reply]] = {kind.__name__: kind for kind in (Opened, Stepped, Ended, Broken)}


class LedPool:
    def __init__(self, pool: World | None, peers: Peers):
        """`pool`: of the first process."""
        assert (pool is not None) == peers.leads, "the first has the environments, and no other"
        self._pool, self._peers = pool, peers
        self.about = About(**peers.gather(None if pool is None else asdict(pool.about))[0])

    def reset(self, episode: int, task: Task) -> None:
        if self._pool is not None:
            self._pool.reset(episode, task)

    def step(self, episode: int, turn: Turn) -> None:
        if self._pool is not None:
            self._pool.step(episode, turn)

    def end(self, episode: int) -> None:
        if self._pool is not None:
            self._pool.end(episode)

    def drop(self, episode: int) -> None:
        if self._pool is not None:
            self._pool.drop(episode)

    def finished(self, seconds: float) -> list[Reply]:
        own = [] if self._pool is None else [_plain(reply) for reply in self._pool.finished(seconds)]
        return [_reply(*told) for told in self._peers.gather(own)[0]]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def _plain(reply: Reply) -> list[Any]:
    return [type(reply).__name__, asdict(reply)]


def _reply(kind: str, values: dict[str, Any]) -> Reply:
    step = {"step": Step(**values["step"])} if kind == Stepped.__name__ else {}
    return KINDS[kind](**{**values, **step})
