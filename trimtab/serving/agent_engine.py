"""Agents around an engine: prompts become episodes of programs that ask this run's own server for their turns.

It is an engine itself, like agents/engine.py. The server is at 127.0.0.1 and answers nobody else. An agent that is
paused waits for the answer to its next request.
"""

import itertools
import secrets
from collections.abc import Collection, Generator, Sequence
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from trimtab.agents.settings import PlaySettings
from trimtab.envs.episode import Episode
from trimtab.envs.replies import Reply
from trimtab.envs.types import Task
from trimtab.errors import UserError
from trimtab.rollout.engine import Engine
from trimtab.rollout.types import Rollout, Sampling
from trimtab.serving.agent_session import ServedSession
from trimtab.serving.policy import ServedPolicy
from trimtab.serving.server import PolicyServer
from trimtab.serving.visit import Visit
from trimtab.serving.wanted import House

NAME = "policy"  # of the model
NO_LIMIT = 2**20  # tokens, where nobody knows the engine's context
SECONDS_TO_END = 2.0


class Agents(Protocol):
    """Programs at work elsewhere (envs/pool.py). Nothing of this waits but `finished`."""

    def run(self, episode: int, task: Task, *, base_url: str, api_key: str, model: str) -> None: ...

    def drop(self, episode: int) -> None: ...

    def finished(self, seconds: float) -> list[Reply]: ...

    def close(self) -> None: ...


class ServedAgents:
    def __init__(
        self,
        engine: Engine,
        pool: Agents,
        tokenizer: PreTrainedTokenizerBase,
        settings: PlaySettings | None = None,
    ):
        self.engine, self.pool, self.settings = engine, pool, settings or PlaySettings()
        self.numbers = itertools.count()
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
        self._session: ServedSession | None = None
        self._parked: dict[int, tuple[Episode, Visit]] = {}  # by the identity of what was handed over
        self._inbox: dict[int, Reply] = {}  # for those that are parked

    # ---- answers

    def generate(self, prompts: Sequence[list[int]], sampling: Sampling, **options: Any) -> list[Rollout]:
        rollouts = list(self.stream(prompts, sampling, **options))
        return sorted(rollouts, key=lambda r: (r.prompt, r.sample, r.branch))

    def stream(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        *,
        seeds: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
        tasks: Sequence[Task] | None = None,
    ) -> Generator[Rollout]:
        """`limits` are the rows'; an agent says itself how long its turns may be."""
        with self.session(sampling) as session:
            for index, ids in enumerate(prompts):
                seed = None if seeds is None else seeds[index]
                session.add(ids, seed=seed, task=None if tasks is None else tasks[index])
            yield from session

    def session(self, sampling: Sampling) -> ServedSession:
        if self._session is not None:
            raise UserError("the engine is at work already; take all its answers first, or close their stream")
        self.house.stops, self.house.pinned = sampling.stop_token_ids, sampling
        if self._url is None:
            self._url = self.server.start()
        self._session = ServedSession(self, sampling)
        return self._session

    def abort(self, prompts: Collection[int] | None = None) -> None:
        if self._session is not None:
            self._session.abort(prompts)

    # ---- what sessions ask

    def new_session(self) -> str:
        return secrets.token_hex(8)

    def run(self, visit: Visit) -> None:
        base_url = f"{self._url}/s/{visit.session}/v1"
        self.pool.run(visit.number, visit.task, base_url=base_url, api_key=self._token, model=NAME)

    def drop(self, visit: Visit) -> None:
        """Its program, where it still runs, has nobody to ask any more."""
        self.pool.drop(visit.number)
        self._inbox.pop(visit.number, None)
        self.server.records.forget(visit.session)
        self.server.desk.give_up([visit.session])

    def replies(self) -> list[Reply]:
        """Also what has come in the meantime for those that went on; what comes for parked ones is kept."""
        parked = {visit.number for _, visit in self._parked.values()}
        found = [self._inbox.pop(number) for number in list(self._inbox) if number not in parked]
        for reply in self.pool.finished(0.0):
            if reply.episode in parked:
                self._inbox[reply.episode] = reply
            else:
                found.append(reply)
        return found

    def park(self, visit: Visit, episode: Episode) -> None:
        """Let it wait for whoever goes on from this very record."""
        self._parked[id(episode)] = (episode, visit)

    def unpark(self, episode: Episode | None) -> Visit | None:
        return self._parked.pop(id(episode), (None, None))[1]

    def parked(self) -> set[int]:
        return set(self._parked)

    def give_up(self, records: Collection[int]) -> None:
        """Nobody has gone on from these."""
        for record in records:
            if (found := self._parked.pop(record, None)) is not None:
                self.drop(found[1])

    def ended(self) -> None:
        self._session = None

    # ---- the engine inside

    @property
    def exact(self) -> bool:
        return self.engine.exact

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def context(self) -> int | None:
        return self.engine.context

    def weights_changed(self, version: int) -> None:
        self.engine.weights_changed(version)

    def sleep(self) -> None:
        self.engine.sleep()

    def rest(self) -> None:
        self.engine.rest()

    def wake(self) -> None:
        self.engine.wake()

    def close(self) -> None:
        """The agents and their server; the engine inside is its owner's to close."""
        self.give_up(list(self._parked))
        self.pool.close()
        if self._url is not None:
            self.server.stop()
            self.server.join()
