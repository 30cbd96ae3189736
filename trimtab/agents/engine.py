"""An environment around an engine: prompts become episodes, which come out as rollouts.

It is an engine itself, so that whatever asks one for answers can have episodes in their place.
"""

import itertools
import json
from collections.abc import Collection, Generator, Sequence
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from trimtab.agents.language import Language
from trimtab.agents.play import Play
from trimtab.agents.session import AgentSession
from trimtab.agents.settings import PlaySettings
from trimtab.envs.episode import Episode
from trimtab.envs.loaded import About
from trimtab.envs.replies import Reply
from trimtab.envs.types import Task, Turn
from trimtab.errors import UserError
from trimtab.rollout.engine import Engine
from trimtab.rollout.types import Rollout, Sampling

MOST_LANGUAGES = 64


class World(Protocol):
    """Environments at work elsewhere (envs/pool.py). Nothing of this waits but `finished`."""

    @property
    def about(self) -> About: ...

    def reset(self, episode: int, task: Task) -> None: ...

    def step(self, episode: int, turn: Turn) -> None: ...

    def end(self, episode: int) -> None: ...

    def drop(self, episode: int) -> None: ...

    def finished(self, seconds: float) -> list[Reply]: ...

    def close(self) -> None: ...


class AgentEngine:
    def __init__(
        self,
        engine: Engine,
        pool: World,
        tokenizer: PreTrainedTokenizerBase,
        settings: PlaySettings | None = None,
    ):
        assert pool.about.kind == "environment", "an agent asks for its turns itself"
        self.engine, self.pool, self.tokenizer = engine, pool, tokenizer
        self.settings = settings or PlaySettings()
        self.numbers = itertools.count()
        self._languages: dict[str, Language] = {}
        self._session: AgentSession | None = None
        self._parked: dict[int, tuple[Episode, Play]] = {}  # by the identity of what was handed over
        self._inbox: dict[int, Reply] = {}  # for those that are parked
        self.language(pool.about.tools, ())  # a chat template that cannot serve them is refused now

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
        for name, values in (("seeds", seeds), ("limits", limits), ("tasks", tasks)):
            if values is not None and len(values) != len(prompts):
                raise UserError(f"{len(values)} {name} for {len(prompts)} prompts; one for each is needed")
        with self.session(sampling) as session:
            for index, ids in enumerate(prompts):
                seed, limit = (None if values is None else values[index] for values in (seeds, limits))
                session.add(ids, seed=seed, limit=limit, task=None if tasks is None else tasks[index])
            yield from session

    def session(self, sampling: Sampling) -> AgentSession:
        if self._session is not None:
            raise UserError("the engine is at work already; take all its answers first, or close their stream")
        self._session = AgentSession(self, sampling)
        return self._session

    def abort(self, prompts: Collection[int] | None = None) -> None:
        if self._session is not None:
            self._session.abort(prompts)

    # ---- what sessions ask

    def language(self, tools: Sequence[dict[str, Any]], stops: Collection[int]) -> Language:
        key = json.dumps([list(tools), sorted(stops)], sort_keys=True)
        if key not in self._languages:
            self._languages[key] = Language(self.tokenizer, tools, stops, self.settings)
            if len(self._languages) > MOST_LANGUAGES:  # tools may differ by episode
                del self._languages[next(iter(self._languages))]
        return self._languages[key]

    def replies(self, seconds: float) -> list[Reply]:
        """Also what has come in the meantime for those that went on; what comes for parked ones is kept."""
        parked = {play.number for _, play in self._parked.values()}
        found = [self._inbox.pop(number) for number in list(self._inbox) if number not in parked]
        for reply in self.pool.finished(0.0 if found else seconds):
            if reply.episode in parked:
                self._inbox[reply.episode] = reply
            else:
                found.append(reply)
        return found

    def park(self, play: Play, episode: Episode) -> None:
        """Keep the instance for whoever goes on from this very record."""
        self._parked[id(episode)] = (episode, play)

    def unpark(self, episode: Episode | None) -> Play | None:
        return self._parked.pop(id(episode), (None, None))[1]

    def parked(self) -> set[int]:
        return set(self._parked)

    def give_up(self, records: Collection[int]) -> None:
        """Nobody has gone on from these."""
        for record in records:
            if (found := self._parked.pop(record, None)) is not None:
                self.pool.drop(found[1].number)
                self._inbox.pop(found[1].number, None)

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
        """The environments; the engine inside is its owner's to close."""
        self.give_up(list(self._parked))
        self.pool.close()
