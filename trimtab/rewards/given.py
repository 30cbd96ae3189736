"""Rewards that are functions of this process: they were given in Python, and have neither limits nor processes.

An option names them, `--reward_func given:NAME`, so that a run with one is described, saved and resumed like any other.
They are called one at a time and in the thread that trains, so that they may keep state, use the device or be stopped
by a debugger.
"""

import asyncio
import contextlib
import contextvars
import inspect
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trimtab.config.rewards import GIVEN
from trimtab.errors import UserError
from trimtab.processes.telling import plain, told
from trimtab.rewards.calling import Calls
from trimtab.rewards.signatures import EXPECTED, recognise
from trimtab.rewards.types import RewardRequest, RewardResult
from trimtab.rewards.workers import Fault

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
