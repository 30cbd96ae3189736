"""Rewards from a user's Python file, run in processes of their own with a time and a memory limit."""

import contextlib
import math
import os
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trimtab.errors import UserError
from trimtab.processes.waiting import Waiting, spoken
from trimtab.rewards.calling import Calls
from trimtab.rewards.types import RewardFailed, RewardRequest, RewardResult
from trimtab.rewards.workers import Worker

PARTS_A_WORKER = 4
CALLS_AT_ONCE = 16  # where groups are judged as they finish: most functions that are slow wait for somebody else


class FunctionReward(Calls):
    """The function of `place`, which is FILE.py or FILE.py:FUNCTION; see signatures.py for those that are known."""

    concurrent = True

    def __init__(
        self,
        place: str,
        *,
        seconds: float = 60.0,
        memory_gib: float = 8.0,
        workers: int | None = None,
        calls_at_once: int = 1,
        stuck_reward: float | None = None,
        waiting: Waiting | None = None,
    ):
        """`seconds`: the most a call may take; of a function of single samples, the most a sample may.

        `workers`: processes that share the samples of such a function; unset: one per core, at most 8. A function of
        batches sees the whole batch, in one process. `calls_at_once`: how many batches there may be, each from a thread
        of its own; there are at least so many processes then, of which those that are needed are started.
        `stuck_reward`: what a single sample gets that exceeds a limit; unset: the run stops.
        """
        file, self.function = split_place(place)
        self.file = Path(file).expanduser().resolve()
        if not self.file.is_file():
            raise UserError(f"reward function {file}: no such file")
        self.seconds, self.memory = seconds, int(memory_gib * 2**30)
        self._stuck_reward = stuck_reward
        self._closing, outer = False, waiting or Waiting()
        self._waiting = Waiting(lambda: self._closing or outer.stopped())
        first = self._start()
        self.name, self.batched, self.is_async = (first.about[name] for name in ("name", "batched", "is_async"))
        # An async function serves all of its samples at once by itself.
        count = 1 if self.batched or self.is_async else workers or min(8, os.cpu_count() or 1)
        count = max(count, calls_at_once)
        # The last one that had work is the next to get some: so no more are started than are needed.
        self._idle: queue.LifoQueue[Worker | None] = queue.LifoQueue()
        for worker in [None] * (count - 1) + [first]:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="reward")
        self._count, self._lazy = count, calls_at_once > 1

    def __str__(self) -> str:
        kind = "batches" if self.batched else "single samples"
        processes = f"{'up to ' * self._lazy}{self._count} process{'es' * (self._count > 1)}"
        return f"{self.name} ({kind}, {processes}), which runs the code of {self.file}"

    def __call__(self, request: RewardRequest) -> RewardResult:
        if not len(request):
            return RewardResult([])
        turns = 1 if self.batched or self.is_async else math.ceil(len(request) / self._count)
        told = f"{self.name} of {self.file} for {len(request)} samples; given up after {spoken(turns * self.seconds)}"
        parts = [range(len(request))] if self.batched or self.is_async else self._shares(len(request))
        work = self._batch if self.batched else self._part
        asked = [self._threads.submit(work, request, rows) for rows in parts]
        return RewardResult.joined(self._waiting.results(asked, f"{told} at the latest"))

    def close(self) -> None:
        self._closing = True  # which ends the calls that are under way
        self._threads.shutdown(cancel_futures=True)
        with contextlib.suppress(queue.Empty):
            while True:
                worker = self._idle.get_nowait()
                if worker is not None:
                    worker.close()

    def _shares(self, count: int) -> list[range]:
        size = math.ceil(count / (self._count * (PARTS_A_WORKER if self._count > 1 else 1)))
        return [range(first, min(first + size, count)) for first in range(0, count, size)]

    def _answers(self, request: RewardRequest, count: int) -> Iterator[Any]:
        """`count` answers of the next free worker; one that had to be ended is replaced when it is needed again."""
        worker = self._idle.get()
        try:
            worker = worker or self._start()
            yield from worker.answers(request, count)
        except UserError as error:  # the file has changed since the run began
            raise RewardFailed(str(error)) from error
        finally:
            self._idle.put(worker if worker and worker.is_alive else None)

    def _start(self) -> Worker:
        return Worker(self.file, self.function, self.seconds, self.memory, self._waiting)


def split_place(place: str) -> tuple[str, str | None]:
    """The file of FILE.py or FILE.py:FUNCTION, and the function, if it is named."""
    file, colon, function = place.rpartition(":")
    return (file, function) if colon and file.endswith(".py") else (place, None)
