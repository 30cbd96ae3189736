"""Agents around an engine: prompts become episodes of programs that ask this run's own server for their turns.

It is an engine itself, like agents/engine.py. The server is at 127.0.0.1 and answers nobody else. An agent that is
paused waits for the answer to its next request.
"""

import secrets
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from trimtab.agents.around import AroundEngine, Instances
from trimtab.agents.settings import PlaySettings
from trimtab.envs.types import Task
from trimtab.rollout.engine import Engine
from trimtab.rollout.episode import Episode
from trimtab.rollout.types import Sampling
from trimtab.serving.agent_session import ServedSession
from trimtab.serving.policy import ServedPolicy
from trimtab.serving.server import PolicyServer
from trimtab.serving.visit import Visit
from trimtab.serving.wanted import House

NAME = "policy"  # of the model
NO_LIMIT = 2**20  # tokens, where nobody knows the engine's context
SECONDS_TO_END = 2.0


class Agents(Instances, Protocol):
    """Programs."""

    def run(self, episode: int, task: Task, *, base_url: str, api_key: str, model: str) -> None: ...


class ServedAgents(AroundEngine[Visit]):
    def __init__(
        self,
        engine: Engine,
        pool: Agents,
        tokenizer: PreTrainedTokenizerBase,
        settings: PlaySettings | None = None,
    ):
        super().__init__(engine, pool, settings)
        self.pool = pool
        most = [limit for limit in (self.settings.episode_max_len, engine.context) if limit is not None]
        self.house = House((), len(tokenizer))
        policy = ServedPolicy(NAME, tokenizer, self.house, min(most, default=NO_LIMIT))
        self._token = secrets.token_urlsafe(24)
        self.server = PolicyServer(
            policy,
            token=self._token,
            version=lambda: engine.version,
            max_waiting=2**20,
            drain_seconds=SECONDS_TO_END,
            invited=True,
        )
        self._url: str | None = None

    def open_session(self, sampling: Sampling) -> ServedSession:
        self.house.stops, self.house.pinned = sampling.stop_token_ids, sampling
        if self._url is None:
            self._url = self.server.start()
        return ServedSession(self, sampling)

    # ---- what sessions ask

    def new_session(self) -> str:
        return secrets.token_hex(8)

    def run(self, visit: Visit) -> None:
        base_url = f"{self._url}/s/{visit.session}/v1"
        self.pool.run(visit.number, visit.task, base_url=base_url, api_key=self._token, model=NAME)

    def drop(self, visit: Visit) -> None:
        """Its program, where it still runs, has nobody to ask any more."""
        super().drop(visit)
        self.server.desk.let_go(visit.session)
        self.server.records.forget(visit.session)
        self.server.desk.give_up([visit.session])

    def park(self, visit: Visit, episode: Episode) -> None:
        """It may be asking for its next turn, which is not others' to draw."""
        self.server.desk.hold(visit.session)
        super().park(visit, episode)

    def unpark(self, episode: Episode | None) -> Visit | None:
        if (visit := super().unpark(episode)) is not None:
            self.server.desk.let_go(visit.session)
        return visit

    def close(self) -> None:
        """The agents and their server; the engine inside is its owner's to close."""
        super().close()
        if self._url is not None:
            self.server.stop()
            self.server.join()
