"""A process that runs a reward function (worker.py), seen from the run: requests out, answers in, limits kept."""

import asyncio
import contextlib
import contextvars
import inspect
import json
import math
import os
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from trimtab.config.rewards import GIVEN
from trimtab.errors import UserError
from trimtab.rewards.signatures import EXPECTED, recognise
from trimtab.rewards.types import RewardFailed, RewardRequest, RewardResult, checked, figure, named
from trimtab.sandbox.process import WorkerProcess
from trimtab.sandbox.wait import Waiting, spoken
from trimtab.sandbox.worker import plain, told

LOADING_SECONDS = 300.0  # a file may import a library, and that a slow disk


class Stuck(Exception):
    """A call that had to be ended: it took too long, or its process died."""


class Late(Stuck):
    """It took too long."""


class Fault(Exception):
    """The function raised; its own words."""


class Worker:
    """One process that runs the function, and what it says about it (`about`)."""

    def __init__(self, file: Path, function: str | None, seconds: float, memory: int, waiting: Waiting):
        self.seconds, self.memory = seconds, memory
        self._waiting = waiting
        words = [str(seconds), str(memory), str(file), *([function] if function else [])]
        self._child = WorkerProcess("trimtab.rewards.worker", words)
        self._connection = Connection(self._child.socket.detach())
        self.about: dict[str, Any] = {}
        try:
            told = f"{file} to be loaded; given up after {spoken(LOADING_SECONDS)} at the latest"
            self.about = self._receive(LOADING_SECONDS, told=told)
            if "error" in self.about:
                raise Stuck(self.about["error"])
        except Stuck as error:
            raise UserError(f"reward function {file}: {error}") from error
        finally:
            if "name" not in self.about:
                self.kill()

    @property
    def is_alive(self) -> bool:
        return not self._connection.closed

    def answers(self, request: RewardRequest, count: int) -> Iterator[Any]:
        """What the function returned: `count` values, each within the limit. Ends early with a Fault or Stuck."""
        received = 0
        try:
            # Two million numbers take longer than their text, on either side.
            self._send(request if self.about["reads_ids"] else replace(request, prompt_ids=[], response_ids=[]))
            while received < count:
                # An async function counts its own time; waiting longer is for a process that no longer does.
                message = self._receive(self.seconds, grace=1.0 if self.about["is_async"] else 0.0)
                received += 1
                if "answer" not in message:
                    raise self._told(message)
                yield message["answer"]
        finally:
            if received < count:
                self.kill()  # what it may still say belongs to nobody

    def close(self) -> None:
        self._connection.close()  # which ends an idle worker
        self._child.leave()

    def kill(self) -> None:
        """End it, and everything that it started."""
        self._connection.close()
        self._child.kill()

    def _send(self, request: RewardRequest) -> None:
        try:
            self._connection.send_bytes(pickle.dumps(request))
        except OSError:
            raise Stuck(self._child.how_it_died()) from None

    def _receive(self, seconds: float, *, grace: float = 0.0, told: str | None = None) -> dict[str, Any]:
        try:
            if not self._waiting.until(self._connection.poll, seconds + grace, told):
                raise Late(f"took longer than {seconds:g} s")
            return json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise Stuck(self._child.how_it_died()) from None

    def _told(self, message: dict[str, Any]) -> Fault | Stuck:
        if "late" in message:
            return Late(f"took longer than {self.seconds:g} s")
        if message["error"].startswith("MemoryError"):
            return Stuck(f"needed more than {self.memory / 2**30:g} GiB of memory")
        return Fault(message["error"])


# ---- calls, in any process


class Calls:
    """Calls of one function."""

    file: Path
    name: str
    seconds: float
    """The most that a call may take."""
    _stuck_reward: float | None = None

    def _batch(self, request: RewardRequest, rows: range) -> RewardResult:
        began = time.monotonic()
        try:
            (answer,) = self._answers(request, 1)
            return _batch_result(answer, len(request), f"{self.file}: {self.name}: reward")
        except Late as error:
            raise RewardFailed(
                f"{self.file}: {self.name} was ended after {time.monotonic() - began:.1f} s on a batch of "
                f"{len(request)} samples ({named(rows)}): a call may take {self.seconds:g} s (--reward_timeout)"
            ) from error
        except (Fault, Stuck) as error:
            raise self._located(request, error) from error

    def _located(self, request: RewardRequest, error: Exception) -> RewardFailed:
        """The failure of a batch with the smallest part of it that fails alone."""
        rows = range(len(request))
        while len(rows) > 1:
            for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
                try:
                    list(self._answers(request.take(half), 1))
                except (Fault, Stuck) as again:
                    rows, error = half, again
                    break
            else:
                return RewardFailed(
                    f"{self.file}: {self.name} failed on {named(rows)} together, but on neither half of them: {error}"
                )
        return self._failed(request, rows[0], error)

    def _part(self, request: RewardRequest, rows: range) -> RewardResult:
        results: list[RewardResult] = []
        while len(results) < len(rows):
            left = rows[len(results) :]
            try:
                for answer in self._answers(request.take(left), len(left)):
                    result = _single_result(answer, rows[len(results)], f"{self.file}: {self.name}: reward")
                    if self._stuck_reward is not None:
                        result.logs["stuck"] = [0.0]
                    results.append(result)
            except Fault as error:
                raise self._failed(request, rows[len(results)], error) from error
            except Stuck as error:
                if self._stuck_reward is None:
                    raise self._failed(request, rows[len(results)], error) from error
                results.append(RewardResult([self._stuck_reward], logs={"stuck": [1.0]}))
        return RewardResult.joined(results)

    def _failed(self, request: RewardRequest, row: int, error: Exception) -> RewardFailed:
        shown = " ".join(request.prompts[row].split())
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return RewardFailed(f"{self.file}: {self.name} failed on row {row} (prompt {shown!r}): {error}", row)

    def _answers(self, request: RewardRequest, count: int) -> Iterator[Any]:
        """`count` answers of the function; a Fault or Stuck is told with the row."""
        raise NotImplementedError


def _batch_result(answer: Any, count: int, what: str) -> RewardResult:
    """A list of rewards, or OpenRLHF's dict of rewards, scores and extra_logs."""
    if not isinstance(answer, dict):
        return RewardResult(_rewards(answer, count, what))
    if "rewards" not in answer:
        raise RewardFailed(f"{what}: the dict has {', '.join(answer) or 'nothing'}, but no rewards")
    scores = answer.get("scores")
    logs = {name: _figures(values, count, f"{what}: extra_logs {name}") for name, values in _logs(answer, what)}
    return RewardResult(
        _rewards(answer["rewards"], count, what),
        [] if scores is None else checked(scores, count, f"{what}: score"),
        logs,
    )


def _single_result(answer: Any, row: int, what: str) -> RewardResult:
    """A number, or verl's dict of a score and other figures."""
    figures: dict[str, list[float]] = {}
    if isinstance(answer, dict):
        numbers = {name: value for name, value in answer.items() if isinstance(value, int | float)}
        figures = {name: [figure(value)] for name, value in numbers.items() if name != "score"}
        answer = answer.get("score")
    try:
        return RewardResult(checked([answer], 1, what), logs=figures)
    except RewardFailed as error:
        raise RewardFailed(str(error).replace("row 0", f"row {row}"), row) from error


def _rewards(values: Any, count: int, what: str) -> list[float]:
    """Checked, except that None is NaN: TRL's way to say that a reward does not apply to a sample (see RewardSum)."""
    if not isinstance(values, list) or None not in values or len(values) != count:
        return checked(values, count, what)
    numbers = checked([0 if value is None else value for value in values], count, what)
    return [math.nan if value is None else number for value, number in zip(values, numbers)]


def _logs(answer: dict[str, Any], what: str) -> list[tuple[str, Any]]:
    logs = answer.get("extra_logs") or {}
    if not isinstance(logs, dict):
        raise RewardFailed(f"{what}: extra_logs is {type(logs).__name__}, not a dict")
    return list(logs.items())


def _figures(values: Any, count: int, what: str) -> list[float]:
    """Figures to be logged may be infinite; a single one is that of every sample."""
    values = values if isinstance(values, list) else [values] * count
    if len(values) != count or not all(isinstance(value, int | float) for value in values):
        raise RewardFailed(f"{what}: a number, or one for each of {count} samples, is needed")
    return [figure(value) for value in values]


# ---- Rewards from a user's Python file, run in processes of their own with a time and a memory limit.


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


# ---- functions of this process


Function = Callable[..., Any]

_functions: contextvars.ContextVar[Mapping[str, Function] | None] = contextvars.ContextVar("functions", default=None)


@contextlib.contextmanager
def giving(functions: Mapping[str, Function]) -> Iterator[None]:
    """Inside, options may name these functions."""
    before = _functions.set(functions)
    try:
        yield
    finally:
        _functions.reset(before)


def given_function(place: str) -> Function:
    """The function that an option names."""
    function = (_functions.get() or {}).get(place.removeprefix(GIVEN))
    if function is None:
        raise UserError(
            f"--reward_func {place} was a function in Python, which this process does not have: give it again as the "
            "reward, or write it to a file and give FILE.py:FUNCTION"
        )
    return function


class GivenReward(Calls):
    """The function of this name; see signatures.py for those that are known."""

    concurrent = False

    def __init__(self, place: str):
        name, function = place.removeprefix(GIVEN), given_function(place)
        signature = recognise(function)
        if signature is None:
            raise UserError(f"the parameters of the reward {name} are none of {EXPECTED}")
        self.name, self._signature, self.batched = name, signature, signature.batched
        self.file, self.seconds = Path(_file(function)), float("inf")
        self._one_at_a_time = threading.Lock()

    def __str__(self) -> str:
        kind = "batches" if self.batched else "single samples"
        return f"{self.name} ({kind}, in this process), a function of {self.file}"

    def __call__(self, request: RewardRequest) -> RewardResult:
        if not len(request):
            return RewardResult([])
        with self._one_at_a_time:
            return (self._batch if self.batched else self._part)(request, range(len(request)))

    def close(self) -> None:
        pass

    def source(self) -> bytes | None:
        """Its text, where that is known."""
        try:
            return inspect.getsource(self._signature.function).encode()
        except (OSError, TypeError):
            return None

    def _answers(self, request: RewardRequest, count: int) -> Iterator[Any]:
        # A copy: what a function does to its lists is its own business, as it is in a process of its own.
        own = pickle.loads(pickle.dumps(request))
        for part in [own] if self.batched else [own.take([row]) for row in range(len(own))]:
            try:
                answer = self._signature.call(part)
                found = plain(_awaited(answer) if inspect.isawaitable(answer) else answer)
            except Exception as error:
                raise Fault(told(error, str(self.file))) from error
            yield found


def _file(function: Function) -> str:
    """Where it was defined: a file, or what stands for a notebook's cell in tracebacks."""
    code = getattr(inspect.unwrap(function), "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code.co_filename if code is not None else type(function).__module__


def _awaited(answer: Any) -> Any:
    async def finished() -> Any:
        return await answer

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(finished())
    with ThreadPoolExecutor(1) as thread:  # a notebook has a loop of its own in this one
        return thread.submit(asyncio.run, finished()).result()
