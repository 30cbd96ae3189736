"""What is around an engine, whoever plays: one session at a time, and episodes that wait between sessions.

An episode that is set down keeps its instance, parked under the very record that was handed over, for whoever goes on
from that record.
"""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from trimtab.agents.settings import PlaySettings
from trimtab.envs.replies import Reply
from trimtab.envs.types import Task
from trimtab.errors import UserError
from trimtab.rollout.engine import AT_WORK, AnsweringEngine, Engine, OpenSession, Session
from trimtab.rollout.episode import Episode
from trimtab.rollout.sampling import Sampling, request_seed
from trimtab.rollout.trajectory import Draft, Rollout


class Instances(Protocol):
    """Environments or agents at work elsewhere (envs/pool.py). Nothing of this waits but `finished`."""

    def drop(self, episode: int) -> None: ...

    def finished(self, seconds: float) -> list[Reply]: ...

    def close(self) -> None: ...


class UnderWay(Protocol):
    """An episode that is not over."""

    number: int  # of its instance
    request: int


Own = TypeVar("Own", bound=UnderWay)


class AroundEngine(AnsweringEngine, Generic[Own]):
    def __init__(self, engine: Engine, pool: Instances, settings: PlaySettings | None):
        self.engine, self.settings = engine, settings or PlaySettings()
        self.numbers = itertools.count()
        self._instances = pool
        self._session: AroundSession[Own] | None = None
        self._parked: dict[int, tuple[Episode, Own]] = {}  # by the identity of what was handed over
        self._inbox: dict[int, Reply] = {}  # for those that are parked

    # ---- answers

    def session(self, sampling: Sampling) -> "AroundSession[Own]":
        if self._session is not None:
            raise UserError(AT_WORK)
        self._session = self.open_session(sampling)
        return self._session

    def session_of_call(self, sampling: Sampling) -> Session:
        """Such as an evaluation's. It goes on from nothing, and whoever is parked stays so."""
        session = self.session(sampling)
        session.to_resume.clear()
        return session

    def open_session(self, sampling: Sampling) -> "AroundSession[Own]":
        raise NotImplementedError

    def abort(self, prompts: Collection[int] | None = None) -> None:
        if self._session is not None:
            self._session.abort(prompts)

    # ---- what sessions ask

    def replies(self, seconds: float) -> list[Reply]:
        """Also what has come in the meantime for those that went on; what comes for parked ones is kept."""
        parked = {under_way.number for _, under_way in self._parked.values()}
        found = [self._inbox.pop(number) for number in list(self._inbox) if number not in parked]
        for reply in self._instances.finished(0.0 if found else seconds):
            if reply.episode in parked:
                self._inbox[reply.episode] = reply
            else:
                found.append(reply)
        return found

    def park(self, under_way: Own, episode: Episode) -> None:
        """Keep the instance for whoever goes on from this very record."""
        self._parked[id(episode)] = (episode, under_way)

    def unpark(self, episode: Episode | None) -> Own | None:
        if self._session is not None:
            self._session.to_resume.discard(id(episode))  # where another record may lie when this one is gone
        return self._parked.pop(id(episode), (None, None))[1]

    def parked(self) -> set[int]:
        return set(self._parked)

    def give_up(self, records: Collection[int]) -> None:
        """Nobody has gone on from these."""
        for record in records:
            if (found := self._parked.pop(record, None)) is not None:
                self.drop(found[1])

    def drop(self, under_way: Own) -> None:
        """It is wanted no more."""
        self._instances.drop(under_way.number)
        self._inbox.pop(under_way.number, None)

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
        """Whatever plays; the engine inside is its owner's to close."""
        self.give_up(list(self._parked))
        self._instances.close()


class AroundSession(OpenSession, Generic[Own]):
    """Episodes under way, whose turns are drawn in the inner engine's open session."""

    def __init__(self, engine: AroundEngine[Own], sampling: Sampling):
        super().__init__()
        self.sampling = sampling
        self.inner = engine.engine.session(replace(sampling, n=1))
        self.under_way: dict[int, Own] = {}  # by the numbers of their instances
        self._finished: list[Rollout] = []
        self.to_resume = engine.parked()
        """Records that are given up at its end, if nobody has gone on from them by then."""

    def add(
        self,
        prompt_ids: list[int],
        *,
        seed: int | None = None,
        limit: int | None = None,
        drafts: Sequence[Draft] | None = None,
        task: Task | None = None,
        sampling: Sampling | None = None,
    ) -> int:
        assert sampling is None, "all episodes of a session are drawn alike"
        number, self.requests = self.requests, self.requests + 1
        seed = request_seed(self.sampling.seed, number) if seed is None else seed
        task = Task(number, 0, seed & (2**31 - 1)) if task is None else task
        given: dict[int, list[Draft]] = {}
        for draft in [Draft.empty(sample) for sample in range(self.sampling.n)] if drafts is None else drafts:
            assert draft.finish is None, "an episode that has not ended"
            given.setdefault(draft.sample, []).append(draft)
        limit = self.sampling.max_new_tokens if limit is None else limit
        for sample, own in given.items():
            own.sort(key=lambda draft: draft.branch)
            at = replace(task, sample=sample)
            self.begin(number, request_seed(seed, sample), at, list(prompt_ids), limit, own)
        self.inner.expect(len(self.under_way))  # their turns begin one by one, as environments open
        return number

    def begin(
        self, request: int, seed: int, task: Task, prompt_ids: list[int], limit: int, drafts: list[Draft]
    ) -> None:
        """One episode, or go on with it from its drafts, one for each branch."""
        raise NotImplementedError

    @property
    def busy(self) -> bool:
        return bool(self.under_way or self._finished)

    def take_finished(self) -> list[Rollout]:
        finished, self._finished = self._finished, []
        return finished
