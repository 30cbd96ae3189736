"""Rewards from users' Python functions: of a file, in worker processes with limits (FunctionReward), or of the calling
program, in this process (CallableReward). signatures.py knows the kinds of functions.

An error names the row. Where a function takes a whole batch, the row is found by calling it again on halves of the
batch; after that the run stops. A batch that takes too long is not called again: the message names the whole batch.
"""

import asyncio
import contextlib
import contextvars
import inspect
import math
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimtab.config.objective_options import GIVEN
from trimtab.errors import UserError
from trimtab.rewards.signatures import EXPECTED, recognize
from trimtab.rewards.types import (
    RewardFailed,
    RewardRequest,
    RewardResult,
    checked,
    finite_or_infinite,
    rows_text,
    tolerated,
)
from trimtab.sandbox.calls import CallTimeout, LoadFailed, SandboxError, UserCodeError, error_line, jsonable
from trimtab.sandbox.pool import SandboxLimits, WorkerPool
from trimtab.sandbox.process import Waiter, duration
from trimtab.sandbox.worker import parse_source

PARTS_A_WORKER = 4
CALLS_AT_ONCE = 16  # where groups are scored as they finish: most functions that are slow wait for others


class UserFunction:
    """A reward function and its results, in whatever process it runs."""

    file: Path
    name: str
    batched: bool
    seconds: float
    """The most that a call may take."""
    tolerant = False
    """Whether samples for which it fails are in the result's `failed`; otherwise the run stops."""
    _stuck_reward: float | None = None

    def __call__(self, request: RewardRequest) -> RewardResult:
        return tolerated(self._score, request) if self.tolerant else self._score(request)

    def _score(self, request: RewardRequest) -> RewardResult:
        raise NotImplementedError

    def _score_batch(self, request: RewardRequest, rows: range) -> RewardResult:
        began = time.monotonic()
        try:
            (answer,) = self._answers(request, 1)
            return _batch_result(answer, len(request), f"{self.file}: {self.name}: reward")
        except CallTimeout as error:
            raise RewardFailed(
                f"{self.file}: {self.name} was ended after {time.monotonic() - began:.1f} s on a batch of "
                f"{len(request)} samples ({rows_text(rows)}): a call may take {self.seconds:g} s (--reward_timeout)"
            ) from error
        except SandboxError as error:
            raise self._located(request, error) from error

    def _located(self, request: RewardRequest, error: Exception) -> RewardFailed:
        """The failure of a batch with the smallest part of it that fails alone."""
        rows = range(len(request))
        while len(rows) > 1:
            for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
                try:
                    list(self._answers(request.take(half), 1))
                except SandboxError as again:
                    rows, error = half, again
                    break
            else:
                together = f"{rows_text(rows)} together, but on neither half of them"
                return RewardFailed(f"{self.file}: {self.name} failed on {together}: {error}")
        return self._failed(request, rows[0], error)

    def _score_samples(self, request: RewardRequest, rows: range) -> RewardResult:
        results: list[RewardResult] = []
        while len(results) < len(rows):
            left = rows[len(results) :]
            try:
                for answer in self._answers(request.take(left), len(left)):
                    result = _sample_result(answer, rows[len(results)], f"{self.file}: {self.name}: reward")
                    if self._stuck_reward is not None:
                        result.logs["stuck"] = [0.0]
                    results.append(result)
            except SandboxError as error:
                if self._stuck_reward is None or isinstance(error, UserCodeError):
                    raise self._failed(request, rows[len(results)], error) from error
                results.append(RewardResult([self._stuck_reward], logs={"stuck": [1.0]}))
        return RewardResult.joined(results)

    def _failed(self, request: RewardRequest, row: int, error: Exception) -> RewardFailed:
        shown = " ".join(request.prompts[row].split())
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return RewardFailed(f"{self.file}: {self.name} failed on row {row} (prompt {shown!r}): {error}", row)

    def _answers(self, request: RewardRequest, count: int) -> Iterator[Any]:
        """`count` values that the function returned; ends early with a SandboxError."""
        raise NotImplementedError


class FunctionReward(UserFunction):
    """The function of `place`, which is FILE.py or FILE.py:FUNCTION, in worker processes."""

    concurrent = True
    called = "reward function"

    def __init__(
        self,
        place: str,
        *,
        seconds: float = 60.0,
        memory_gib: float = 8.0,
        workers: int | None = None,
        calls_at_once: int = 1,
        stuck_reward: float | None = None,
        waiter: Waiter | None = None,
    ):
        """`seconds`: the most a call may take; of a function of single samples, the most a sample may.

        `workers`: processes that share the samples of such a function; unset: one a core, at most 8. A function of
        batches gets the whole batch, in one process. `calls_at_once`: the number of batches at once, each from its own
        thread; up to as many processes are then started when they are needed. `stuck_reward`: the reward of a single
        sample that exceeds a limit; unset: the run stops.
        """
        self.file, _ = parse_source(place)
        if not self.file.is_file():
            raise UserError(f"{self.called} {self.file}: no such file")
        self.seconds, self._stuck_reward = seconds, stuck_reward
        self._closing, outer = False, waiter or Waiter()
        self._waiter = Waiter(lambda: self._closing or outer.stopped())
        limits = SandboxLimits(seconds, workers, 1, memory_gib)
        how: dict[str, Any] = {"shared": False, "output": "limited", "title": str(self.file)}
        try:
            self._pool = WorkerPool("trimtab.rewards.signatures", place, limits, self._waiter.stopped, **how)
        except LoadFailed as error:
            raise UserError(f"{self.called} {self.file}: {error}") from error
        info = self._pool.info
        self.name, self.batched, self.is_async, self._reads_ids = (
            info[name] for name in ("name", "batched", "is_async", "reads_ids")
        )
        # An async function serves all of its samples at once by itself, and measures their time.
        count = 1 if self.batched or self.is_async else limits.worker_count
        self._pool.count = self._count = max(count, calls_at_once)
        self._pool.grace = 1.0 if self.is_async else 0.0
        self._threads = ThreadPoolExecutor(self._count, thread_name_prefix="reward")
        self._lazy = calls_at_once > 1

    def __str__(self) -> str:
        kind = "batches" if self.batched else "single samples"
        processes = f"{'up to ' * self._lazy}{self._count} process{'es' * (self._count > 1)}"
        return f"{self.name} ({kind}, {processes}), which runs the code of {self.file}"

    def _score(self, request: RewardRequest) -> RewardResult:
        size = len(request)
        if not size:
            return RewardResult([])
        if self.batched or self.is_async:
            turns, share = 1, size
        else:
            turns = math.ceil(size / self._count)
            share = math.ceil(size / (self._count * (PARTS_A_WORKER if self._count > 1 else 1)))
        parts = [range(first, min(first + share, size)) for first in range(0, size, share)]
        score = self._score_batch if self.batched else self._score_samples
        futures = [self._threads.submit(score, request, rows) for rows in parts]
        report = f"{self.name} of {self.file} for {size} samples; given up after {duration(turns * self.seconds)}"
        return RewardResult.joined(self._waiter.results(futures, f"{report} at the latest"))

    def close(self) -> None:
        self._closing = True  # which ends running calls
        self._threads.shutdown(cancel_futures=True)
        self._pool.close()

    def _answers(self, request: RewardRequest, count: int) -> Iterator[Any]:
        if not self._reads_ids:  # two million numbers take longer than their text, on either side
            request = replace(request, prompt_ids=[], response_ids=[])
        session = self._pool.open("score", request, final=True, replies=count)
        try:
            for _ in range(count):
                yield self._pool.result(session)
        except LoadFailed as error:  # the file has changed since the run began
            raise RewardFailed(f"{self.called} {self.file}: {error}") from error
        finally:
            self._pool.drop(session)


class PromptFunction(FunctionReward):
    """--teacher_prompt_func: a function of a reward's signature that returns prompts for a teacher."""

    called = "--teacher_prompt_func"

    def prompts(self, request: RewardRequest) -> list[Any]:
        """A text, a list of messages or None for each sample."""
        what, count, found = f"{self.file}: {self.name}", len(request), list[Any]()
        try:
            found.extend(self._answers(request, 1 if self.batched else count))
        except CallTimeout as error:
            raise RewardFailed(f"{what} was ended: a call may take {self.seconds:g} s (--reward_timeout)") from error
        except SandboxError as error:
            located = self._located(request, error) if self.batched else self._failed(request, len(found), error)
            raise located from error
        prompts = found[0] if self.batched else found
        if not isinstance(prompts, list) or len(prompts) != count:
            raise RewardFailed(f"{what}: a list of {count} prompts is needed, one for each sample")
        for row, prompt in enumerate(prompts):
            if not (prompt is None or isinstance(prompt, str | list)):
                raise RewardFailed(f"{what}: prompt {row} is {prompt!r}, neither text nor messages nor None", row)
        return prompts


# ---- what functions return


def _batch_result(answer: Any, count: int, what: str) -> RewardResult:
    """A list of rewards, or OpenRLHF's dict of rewards, scores and extra_logs."""
    if not isinstance(answer, dict):
        return RewardResult(_rewards(answer, count, what))
    if "rewards" not in answer:
        raise RewardFailed(f"{what}: the dict has {', '.join(answer) or 'nothing'}, but no rewards")
    scores, logs = answer.get("scores"), answer.get("extra_logs") or {}
    if not isinstance(logs, dict):
        raise RewardFailed(f"{what}: extra_logs is {type(logs).__name__}, not a dict")
    logged = {name: _log_column(values, count, f"{what}: extra_logs {name}") for name, values in logs.items()}
    rewards = _rewards(answer["rewards"], count, what)
    return RewardResult(rewards, [] if scores is None else checked(scores, count, f"{what}: score"), logged)


def _sample_result(answer: Any, row: int, what: str) -> RewardResult:
    """A number, or verl's dict of a score and other numbers."""
    logs: dict[str, list[float]] = {}
    if isinstance(answer, dict):
        numbers = {name: value for name, value in answer.items() if isinstance(value, int | float)}
        logs = {name: [finite_or_infinite(value)] for name, value in numbers.items() if name != "score"}
        answer = answer.get("score")
    try:
        return RewardResult(checked([answer], 1, what), logs=logs)
    except RewardFailed as error:
        raise RewardFailed(str(error).replace("row 0", f"row {row}"), row) from error


def _rewards(values: Any, count: int, what: str) -> list[float]:
    """Checked, except that None is NaN: TRL's way to say that a reward does not apply to a sample (see RewardSum)."""
    if not isinstance(values, list) or None not in values or len(values) != count:
        return checked(values, count, what)
    numbers = checked([0 if value is None else value for value in values], count, what)
    return [math.nan if value is None else number for value, number in zip(values, numbers)]


def _log_column(values: Any, count: int, what: str) -> list[float]:
    """Numbers to be logged may be infinite; a single one is that of every sample."""
    values = values if isinstance(values, list) else [values] * count
    if len(values) != count or not all(isinstance(value, int | float) for value in values):
        raise RewardFailed(f"{what}: a number, or one for each of {count} samples, is needed")
    return [finite_or_infinite(value) for value in values]


# ---- functions of this process

Function = Callable[..., Any]

_functions: contextvars.ContextVar[Mapping[str, Function] | None] = contextvars.ContextVar("functions", default=None)


@contextlib.contextmanager
def register_functions(functions: Mapping[str, Function]) -> Iterator[None]:
    """Inside, options may name these functions (`--reward_func given:NAME`), so that a run with one is described, saved
    and resumed like any other."""
    before = _functions.set(functions)
    try:
        yield
    finally:
        _functions.reset(before)


def find_function(place: str) -> Function:
    """The function that an option names."""
    function = (_functions.get() or {}).get(place.removeprefix(GIVEN))
    if function is None:
        raise UserError(
            f"--reward_func {place} was a function in Python, which this process does not have: give it again as the "
            "reward, or write it to a file and give FILE.py:FUNCTION"
        )
    return function


class CallableReward(UserFunction):
    """A function of the calling program, without limits or worker processes.

    It is called one at a time and in the thread that trains, so that it may keep state, use the device or be stopped by
    a debugger.
    """

    concurrent = False

    def __init__(self, place: str):
        name, function = place.removeprefix(GIVEN), find_function(place)
        signature = recognize(function)
        if signature is None:
            raise UserError(f"the parameters of the reward {name} are none of {EXPECTED}")
        self.name, self._signature, self.batched = name, signature, signature.batched
        code = getattr(inspect.unwrap(function), "__code__", None) or getattr(type(function).__call__, "__code__", None)
        # Its file, or what stands for a notebook's cell in tracebacks.
        self.file = Path(code.co_filename if code is not None else type(function).__module__)
        self.seconds = math.inf
        self._one_at_a_time = threading.Lock()

    def __str__(self) -> str:
        kind = "batches" if self.batched else "single samples"
        return f"{self.name} ({kind}, in this process), a function of {self.file}"

    def _score(self, request: RewardRequest) -> RewardResult:
        if not len(request):
            return RewardResult([])
        with self._one_at_a_time:
            return (self._score_batch if self.batched else self._score_samples)(request, range(len(request)))

    def close(self) -> None:
        pass

    def source(self) -> bytes | None:
        """Its text, where that is known."""
        try:
            return inspect.getsource(self._signature.function).encode()
        except (OSError, TypeError):
            return None

    def _answers(self, request: RewardRequest, count: int) -> Iterator[Any]:
        # A copy: a function may change its lists, as it may in a worker process.
        for part in self._signature.split(pickle.loads(pickle.dumps(request))):
            try:
                answer = self._signature.call(part)
                found = jsonable(_awaited(answer) if inspect.isawaitable(answer) else answer)
            except Exception as error:
                raise UserCodeError(error_line(error, str(self.file))) from error
            yield found


def _awaited(answer: Any) -> Any:
    async def finished() -> Any:
        return await answer

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(finished())
    with ThreadPoolExecutor(1) as thread:  # a notebook has an event loop in this thread
        return thread.submit(asyncio.run, finished()).result()
