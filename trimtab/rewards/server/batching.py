"""Dynamic batching: while one batch is being scored the samples of later requests gather, and are the next batch.

Nobody waits for a batch to fill up. A batch that fails is scored again request by request, so that nobody fails for
another's samples.
"""

import asyncio
import itertools
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from trimtab.rewards.server.metrics import Metrics
from trimtab.rewards.types import Reward, RewardRequest, RewardResult

MOST_WAITING = 65_536


class Overloaded(Exception):
    """More samples wait than should; the client may try again."""


class Batcher:
    def __init__(self, reward: Reward, metrics: Metrics, *, max_samples: int | None = None):
        """`max_samples`: of a batch; a larger request is a batch by itself."""
        self.reward, self.metrics, self.max_samples = reward, metrics, max_samples
        self._waiting: deque[tuple[RewardRequest, asyncio.Future[RewardResult]]] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward")

    async def score(self, request: RewardRequest) -> RewardResult:
        if not len(request):
            return RewardResult([])
        if self.metrics.waiting + len(request) > MOST_WAITING and self.metrics.waiting:
            raise Overloaded
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self.metrics.waiting += len(request)
        self._arrived.set()
        return await future

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

    def close(self) -> None:
        self._thread.shutdown()

    def _next_batch(self) -> list[tuple[RewardRequest, asyncio.Future[RewardResult]]]:
        batch, samples = [], 0
        while self._waiting:
            size = len(self._waiting[0][0])
            if batch and self.max_samples is not None and samples + size > self.max_samples:
                break
            batch.append(self._waiting.popleft())
            samples += size
        return batch

    async def _score_all(self, requests: list[RewardRequest]) -> list[RewardResult | Exception]:
        loop = asyncio.get_running_loop()
        try:
            with self.metrics.batch(sum(map(len, requests))):
                whole = await loop.run_in_executor(self._thread, self.reward, RewardRequest.joined(requests))
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
