"""The queue of rewards that are computed while other samples are still being generated.

One thread scores finished samples, in parts; results come back in the order of submission. A reward that runs a model
in this process must not compute at the same time as another model (`concurrent` is false): it is called when its
results are taken.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

from trimtab.distributed.supervision import pulse

Part = TypeVar("Part", contravariant=True)
Result = TypeVar("Result", covariant=True)


class Scorer(Protocol[Part, Result]):
    """A reward, or several."""

    @property
    def concurrent(self) -> bool: ...

    def __call__(self, part: Part, /) -> Result: ...


class RewardQueue(Generic[Part, Result]):
    """For one iteration of a loop: `submit` each finished group, then take `results`.

    with RewardQueue(reward) as rewards:
        for group in engine:
            rewards.submit(make_reward_request(group))
        for result in rewards.results(): ...
    """

    def __init__(self, reward: Scorer[Part, Result]):
        self.reward = reward
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rewards") if reward.concurrent else None
        self._parts: list[Part] = []
        self._running: list[Future[Result]] = []
        self._failed: BaseException | None = None

    def __enter__(self) -> "RewardQueue[Part, Result]":
        return self

    def __exit__(self, *error: object) -> None:
        """Parts that have not begun are dropped; the one that has is not waited for, as it may take long."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def submit(self, request: Part) -> None:
        """Add finished samples. Raises the error of an earlier part, so that generation stops."""
        self.check()
        self.add(request)

    def add(self, request: Part) -> None:
        """As `submit`, without raising, for a caller that must tell other processes before it stops (`failed`)."""
        if self._thread is None:
            self._parts.append(request)
            return
        part = self._thread.submit(self.reward, request)
        part.add_done_callback(self._look_at)
        self._running.append(part)

    @property
    def failed(self) -> bool:
        return self._failed is not None

    def check(self) -> None:
        """Raise the error of a part that has failed."""
        if self._failed is not None:
            raise self._failed

    def results(self) -> Iterator[Result]:
        """The result of every part, in the order of submission; the first failure is raised in its place."""
        if self._thread is None:
            yield from map(self.reward, self._parts)
        else:
            for part in self._running:
                with pulse.waiting():  # rewards have their own timeouts
                    result = part.result()
                yield result

    def _look_at(self, part: Future[Result]) -> None:
        if not part.cancelled() and self._failed is None:
            self._failed = part.exception()
