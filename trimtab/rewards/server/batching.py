"""Dynamic batching: while one batch is being scored the samples of later requests gather, and are the next batch.

Nobody waits for a batch to fill up. A batch that fails is scored again request by request, so that nobody fails for
another's samples.
"""

import asyncio
import contextlib
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from trimtab.rewards.server.metrics import Metrics
from trimtab.rewards.types import Reward, RewardRequest, RewardResult
from trimtab.web.manners import Closing

MOST_WAITING = 65_536


class Overloaded(Exception):
    """More samples wait than should; the client may try again."""


class Batcher:
    def __init__(self, reward: Reward, metrics: Metrics, *, max_samples: int | None = None):
        """`max_samples`: of a batch; a larger request is a batch by itself."""
        self.reward, self.metrics, self.max_samples = reward, metrics, max_samples
        self._waiting: deque[tuple[RewardRequest, asyncio.Future[RewardResult]]] = deque()
        self._arrived = asyncio.Event()
        self._unanswered: set[asyncio.Future[RewardResult]] = set()
        self._work: queue.SimpleQueue[tuple[RewardRequest, asyncio.Future[RewardResult]] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._score_in_thread, name="reward", daemon=True)
        self.thread.start()

    async def score(self, request: RewardRequest) -> RewardResult:
        if not len(request):
            return RewardResult([])
        if self.metrics.waiting + len(request) > MOST_WAITING and self.metrics.waiting:
            raise Overloaded
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self.metrics.waiting += len(request)
        self._arrived.set()
        self._unanswered.add(future)
        try:
            return await future
        finally:
            self._unanswered.discard(future)

    async def run(self) -> None:
        """Score what arrives, until cancelled."""
        while True:
            await self._arrived.wait()
            batch = self._next_batch()
            if not self._waiting:
                self._arrived.clear()
            for (request, future), outcome in zip(batch, await self._score_all([request for request, _ in batch])):
                self.metrics.waiting -= len(request)
                if future.done():  # its client has gone
                    continue
                if isinstance(outcome, BaseException):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)

    def give_up(self) -> None:
        """Whoever still waits is told that the server is about to end."""
        for future in self._unanswered:
            if not future.done():
                future.set_exception(Closing())

    def close(self) -> None:
        self._work.put(None)

    def _score_in_thread(self) -> None:
        while (work := self._work.get()) is not None:
            request, future = work
            try:
                self._tell(future, future.set_result, self.reward(request))
            except BaseException as error:
                self._tell(future, future.set_exception, error)

    @staticmethod
    def _tell(future: asyncio.Future[RewardResult], settle: Callable[[Any], None], outcome: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the server did not wait for it
            future.get_loop().call_soon_threadsafe(lambda: None if future.done() else settle(outcome))

    def _next_batch(self) -> list[tuple[RewardRequest, asyncio.Future[RewardResult]]]:
        batch: list[tuple[RewardRequest, asyncio.Future[RewardResult]]] = []
        samples = 0
        while self._waiting:
            size = len(self._waiting[0][0])
            if batch and self.max_samples is not None and samples + size > self.max_samples:
                break
            batch.append(self._waiting.popleft())
            samples += size
        return batch

    async def _score_all(self, requests: list[RewardRequest]) -> list[RewardResult | Exception]:
        scored = asyncio.get_running_loop().create_future()
        try:
            with self.metrics.batch(sum(map(len, requests))):
                self._work.put((RewardRequest.joined(requests), scored))
                whole = await scored
        except Exception as error:
            if len(requests) == 1:
                return [error]
            return [outcome for request in requests for outcome in await self._score_all([request])]
        return [_part(whole, rows) for rows in _rows(requests)]


def _rows(requests: list[RewardRequest]) -> list[range]:
    """Which rows of the whole belong to each request."""
    edges = itertools.accumulate(map(len, requests), initial=0)
    return [range(first, last) for first, last in itertools.pairwise(edges)]


def _part(result: RewardResult, rows: range) -> RewardResult:
    cut = slice(rows.start, rows.stop)
    logs = {name: values[cut] for name, values in result.logs.items()}
    return RewardResult(result.rewards[cut], result.scores[cut], logs)
