"""What engines and sessions have in common: whoever has an open session can answer many prompts at once with it."""

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from trimtab.errors import UserError
from trimtab.rollout.engine import Session
from trimtab.rollout.episode import Task
from trimtab.rollout.types import Rollout, Sampling

AT_WORK = "the engine is at work already; take all its answers first, or close their stream"


class AnsweringEngine:
    """Prompts that are known beforehand, from an engine that opens sessions."""

    def session(self, sampling: Sampling) -> Session:
        raise NotImplementedError

    def session_of_call(self, sampling: Sampling) -> Session:
        """For prompts that come all at once."""
        return self.session(sampling)

    def generate(self, prompts: Sequence[list[int]], sampling: Sampling, **each: Any) -> list[Rollout]:
        rollouts = list(self.stream(prompts, sampling, **each))
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
        with self.session_of_call(sampling) as session:
            for index, ids in enumerate(prompts):
                seed, limit = (None if values is None else values[index] for values in (seeds, limits))
                session.add(ids, seed=seed, limit=limit, task=None if tasks is None else tasks[index])
            yield from session


class OpenSession(Session):
    """A session is gone through until nothing is left in it, and closed at the end of a `with`."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], None] | None = None
        self.requests = 0  # added so far
        self._aborted: set[int] = set()  # requests that somebody has had enough of

    def expect(self, samples: int) -> None:
        """Nothing to prepare."""

    def prepare(self, longest: int) -> None:
        """Nothing to prepare."""

    @property
    def full(self) -> bool:
        return False

    def abort(self, requests: Collection[int] | None = None) -> None:
        self._aborted.update(range(self.requests) if requests is None else requests)

    def __iter__(self) -> Iterator[Rollout]:
        while self.busy:
            yield from self.advance()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
