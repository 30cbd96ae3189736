"""Environments of a policy whose layers are cut over processes. All of these ask the same and draw the same; the first
has the environments, and the others hear from it what came back."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from trimtab.agents.engine import World
from trimtab.distributed.peers import Peers
from trimtab.envs.adapter import EnvironmentInfo
from trimtab.envs.replies import Broken, Ended, Opened, Reply, Stepped
from trimtab.envs.types import Step, Task, Turn
from trimtab.errors import RunFailed, UserError

KINDS: dict[str, type[Reply]] = {kind.__name__: kind for kind in (Opened, Stepped, Ended, Broken)}


class LedPool:
    def __init__(self, open_world: Callable[[], World], peers: Peers):
        """`open_world`: called by the first process alone."""
        self._pool: World | None = None
        self._peers = peers
        self.about = EnvironmentInfo(**self._of_first(lambda: self._opened(open_world)))

    def _opened(self, open_world: Callable[[], World]) -> dict[str, Any]:
        self._pool = open_world()
        return asdict(self._pool.about)

    def _of_first(self, find: Callable[[], Any]) -> Any:
        """What the first process finds. If it cannot, all end with its words: nobody waits for more."""
        if not self._peers.leads:
            found, words, mistaken = self._peers.gather(None)[0]
            if words is not None:
                raise UserError(words) if mistaken else RunFailed(words)
            return found
        try:
            found = find()
        except Exception as error:
            self._peers.gather([None, str(error) or type(error).__name__, isinstance(error, UserError)])
            raise
        self._peers.gather([found, None, False])
        return found

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
        return [_reply(*told) for told in self._of_first(lambda: self._heard(seconds))]

    def _heard(self, seconds: float) -> list[list[Any]]:
        assert self._pool is not None, "the first has it"
        return [_plain(reply) for reply in self._pool.finished(seconds)]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def _plain(reply: Reply) -> list[Any]:
    return [type(reply).__name__, asdict(reply)]


def _reply(kind: str, values: dict[str, Any]) -> Reply:
    step = {"step": Step(**values["step"])} if kind == Stepped.__name__ else {}
    return KINDS[kind](**{**values, **step})
