"""Base classes of engines whose requests are episodes, of environments and of agents, and their suspended episodes.

This is what environments (environment_engine.py) and agents at an endpoint have in common: one session at a time, and
episodes that wait between sessions. An aborted episode is suspended: it keeps its instance, under the record that the
caller was given; a later session that resumes from this very record goes on with the instance.
"""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from trimtab.envs.environment_pool import InstancePool, Reply
from trimtab.envs.types import EpisodeSettings, Task
from trimtab.rollout.engine import Engine, Session
from trimtab.rollout.episode import EpisodeRecord
from trimtab.rollout.sampling import SamplingParams, request_seed
from trimtab.rollout.trajectory import Finish, Trajectory


class ActiveEpisode(Protocol):
    """An episode that is not over."""

    number: int  # identifies its instance
    request: int
    failures: int


EpisodeT = TypeVar("EpisodeT", bound=ActiveEpisode)


def finished_branches(
    sequences: Sequence[Trajectory],
    task: Task,
    request: int,
    finish: Finish,
    episode: EpisodeRecord,
    prompt_ids: list[int],
) -> list[Trajectory]:
    """The trajectories of an episode that is over, one for each branch; one without tokens if it failed."""
    sequences = [] if finish == "failed" else sequences
    return [
        replace(s, prompt=request, sample=task.sample, finish=finish, drawn=s.mask, episode=episode, branch=branch)
        for branch, s in enumerate(sequences or [Trajectory.empty(task.sample, prompt_ids)])
    ]


def partial_branches(sequences: Sequence[Trajectory], task: Task, episode: EpisodeRecord) -> list[Trajectory]:
    """The partial rollouts of an episode, one for each branch."""
    own: dict[str, Any] = {"sample": task.sample, "prompt_ids": [], "plain_log_probs": None, "episode": episode}
    found = [replace(s, **own, drawn=s.mask, branch=branch) for branch, s in enumerate(sequences)]
    return found or [Trajectory.empty(task.sample)]


class EpisodeEngine(Engine, Generic[EpisodeT]):
    def __init__(self, engine: Engine, pool: InstancePool, settings: EpisodeSettings | None):
        self.engine, self.settings = engine, settings or EpisodeSettings()
        self.numbers = itertools.count()
        self._instances = pool
        self._session: EpisodeSession[EpisodeT] | None = None
        self._suspended: dict[int, tuple[EpisodeRecord, EpisodeT]] = {}  # by the identity of the record
        self._inbox: dict[int, Reply] = {}  # replies to suspended episodes

    # ---- the engine as callers see it

    def session(self, sampling: SamplingParams) -> "EpisodeSession[EpisodeT]":
        self.check_idle()
        self._session = self.open_session(sampling)
        return self._session

    def batch_session(self, sampling: SamplingParams) -> Session:
        """A session for one call, such as an evaluation's: it resumes none of the suspended episodes."""
        session = self.session(sampling)
        session.to_resume.clear()
        return session

    def open_session(self, sampling: SamplingParams) -> "EpisodeSession[EpisodeT]":
        raise NotImplementedError

    # ---- for sessions

    def replies(self, seconds: float) -> list[Reply]:
        """New replies, and kept ones to episodes that are resumed. Replies to suspended episodes are kept."""
        suspended = {active.number for _, active in self._suspended.values()}
        found = [self._inbox.pop(number) for number in list(self._inbox) if number not in suspended]
        for reply in self._instances.poll(0.0 if found else seconds):
            if reply.episode in suspended:
                self._inbox[reply.episode] = reply
            else:
                found.append(reply)
        return found

    def suspend_episode(self, active: EpisodeT, episode: EpisodeRecord) -> None:
        """Keep the instance for a session that resumes from this very record."""
        self._suspended[id(episode)] = (episode, active)

    def resume_suspended(self, episode: EpisodeRecord | None) -> EpisodeT | None:
        if self._session is not None:
            self._session.to_resume.discard(id(episode))  # a later record may get the same id
        return self._suspended.pop(id(episode), (None, None))[1]

    def suspended(self) -> set[int]:
        return set(self._suspended)

    def drop_suspended(self, records: Collection[int]) -> None:
        """Drop suspended episodes that were not resumed."""
        for record in records:
            if (found := self._suspended.pop(record, None)) is not None:
                self.drop(found[1])

    def drop(self, active: EpisodeT) -> None:
        """End the instance of an episode."""
        self._instances.drop(active.number)
        self._inbox.pop(active.number, None)

    # ---- the engine inside

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return self.engine.exact

    @property
    def version(self) -> int:  # type: ignore[override]
        return self.engine.version

    @property
    def context(self) -> int | None:  # type: ignore[override]
        return self.engine.context

    def weights_changed(self, version: int) -> None:
        self.engine.weights_changed(version)

    def sleep(self) -> None:
        self.engine.sleep()

    def trim_memory(self) -> None:
        self.engine.trim_memory()

    def wake(self) -> None:
        self.engine.wake()

    def close(self) -> None:
        """Close the pool, but not the inner engine, which belongs to the caller."""
        self.drop_suspended(list(self._suspended))
        self._instances.close()


class EpisodeSession(Session, Generic[EpisodeT]):
    """Active episodes, whose turns are generated in the inner engine's open session."""

    def __init__(self, engine: EpisodeEngine[EpisodeT], sampling: SamplingParams):
        super().__init__()
        self.sampling, self._engine = sampling, engine
        self.inner = engine.engine.session(replace(sampling, n=1))
        self.active: dict[int, EpisodeT] = {}  # by number
        self._finished: list[Trajectory] = []
        self.to_resume = engine.suspended()
        """Records that are dropped at the end of the session unless they were resumed."""

    def add(
        self,
        prompt_ids: list[int],
        *,
        seed: int | None = None,
        limit: int | None = None,
        partials: Sequence[Trajectory] | None = None,
        task: Task | None = None,
        sampling: SamplingParams | None = None,
    ) -> int:
        assert sampling is None, "all episodes of a session have the same sampling"
        number, self.requests = self.requests, self.requests + 1
        seed = request_seed(self.sampling.seed, number) if seed is None else seed
        task = Task(number, 0, seed & (2**31 - 1)) if task is None else task
        given: dict[int, list[Trajectory]] = {}
        if partials is None:
            partials = [Trajectory.empty(sample) for sample in range(self.sampling.n)]
        for partial in partials:
            assert partial.finish is None, "an episode that has not ended"
            given.setdefault(partial.sample, []).append(partial)
        limit = self.sampling.max_new_tokens if limit is None else limit
        for sample, own in given.items():
            own.sort(key=lambda partial: partial.branch)
            at = replace(task, sample=sample)
            self.begin(number, request_seed(seed, sample), at, list(prompt_ids), limit, own)
        self.inner.expect(len(self.active))  # their turns begin one by one, as resets return
        return number

    def begin(
        self, request: int, seed: int, task: Task, prompt_ids: list[int], limit: int, partials: list[Trajectory]
    ) -> None:
        """Begin an episode, or resume it from its partials, one for each branch."""
        raise NotImplementedError

    @property
    def has_unfinished(self) -> bool:
        return bool(self.active or self._finished)

    def finish(self, trajectories: list[Trajectory]) -> None:
        """Return an episode's trajectories, one for each branch, from the next `step`."""
        last, episode = trajectories[-1], trajectories[-1].episode
        assert episode is not None, "they have its record"
        if last.finish not in ("abort", "failed"):
            turns, length = float(len(episode.turns)), float(last.length)
            episode.logs |= {"turns": turns, "episode_length": length, "branches": float(len(trajectories))}
        self._finished += trajectories

    def failed(self, active: EpisodeT, words: str) -> None:
        """Retry the episode; if its retries are used up, all samples of its request fail."""
        active.failures += 1
        if active.failures <= self._engine.settings.retries:
            self.retry(active)
            return
        self.give_up(active, words)
        for other in [other for other in self.active.values() if other.request == active.request]:
            self.give_up(other, None)

    def retry(self, active: EpisodeT) -> None:
        """Begin the episode anew, after a failure."""
        raise NotImplementedError

    def give_up(self, active: EpisodeT, words: str | None) -> None:
        """Finish the episode as failed, with the reason if it is known."""
        raise NotImplementedError

    def take_aborted(self) -> list[EpisodeT]:
        """Active episodes of aborted requests."""
        aborted, self._aborted = self._aborted, set()
        return [active for active in self.active.values() if active.request in aborted]

    def take_finished(self) -> list[Trajectory]:
        finished, self._finished = self._finished, []
        return finished
