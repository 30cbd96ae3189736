"""How a worker calls an author's code: in a thread, on the loop what is awaitable, and within its time.

An instance has all of its plain calls in one thread, as things like database connections want it; up to so many
threads serve all instances, and what is awaited waits for nobody else.
"""

import asyncio
import contextlib
import inspect
import queue
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from typing import Any

SECONDS_TO_CANCEL = 1.0


class Late(Exception):
    """A call took too long, and was given up."""


class Stuck(Exception):
    """A call took too long, and nothing but the end of its process ends it."""


class OneThread(Executor):
    """Calls in one thread, made with the first of them. Unlike a ThreadPoolExecutor's, one that never ends does not
    hold up the end of its process."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future, Callable[..., Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future:  # type: ignore[override]
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="environment", daemon=True)
            self._thread.start()
        future: Future = Future()
        self._calls.put((future, function, arguments))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """The thread ends after its calls; nobody waits for it."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function, arguments = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*arguments))
                except BaseException as error:
                    future.set_exception(error)


class Lane:
    """A thread, and a place in front of it: whoever has it is called at once, so that waiting is nobody's time."""

    def __init__(self) -> None:
        self.instances = 0
        self.free = asyncio.Lock()
        self.executor = OneThread()
        self.thread = 0

    def attempt(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
        self.thread = threading.get_ident()
        try:
            return function(*arguments), None
        except BaseException as error:  # sys.exit in an environment is a fault like any other
            return None, error


class Lanes:
    def __init__(self, count: int):
        self._count = count
        self._lanes: list[Lane] = []

    def taken(self) -> Lane:
        """For an instance, which gives it back."""
        if len(self._lanes) < self._count and all(lane.instances for lane in self._lanes):
            self._lanes.append(Lane())
        lane = min(self._lanes, key=lambda lane: lane.instances)
        lane.instances += 1
        return lane

    def close(self) -> None:
        """Threads end when they are free."""
        for lane in self._lanes:
            lane.executor.shutdown()


class Caller:
    """The calls of one instance, one after another."""

    def __init__(self, lane: Lane, file: str):
        """`file`: whose lines are named."""
        self.lane, self.file = lane, file
        self.seconds = 0.0  # that its calls took so far
        self._awaiting: asyncio.Task[tuple[Any, BaseException | None]] | None = None

    async def call(self, limit: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns, or comes to when it is awaited; what it raises."""
        loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as held:
            await held.enter_async_context(self.lane.free)
            began = time.monotonic()
            try:
                asked = loop.run_in_executor(self.lane.executor, self.lane.attempt, function, arguments)
                if not (await asyncio.wait({asked}, timeout=limit))[0]:
                    held.pop_all()  # nobody else is to be called behind it
                    raise Stuck(f"took longer than {limit:g} s{self._place()}")
                found, error = asked.result()
                await held.aclose()
                if inspect.isawaitable(found):
                    found, error = await self._awaited(found, limit, began)
            finally:
                self.seconds += time.monotonic() - began
        if isinstance(error, StopIteration):  # which no coroutine can raise
            raise RuntimeError(f"StopIteration {error}").with_traceback(error.__traceback__)
        if error is not None:
            raise error
        return found

    def cancel(self) -> None:
        """Give up what is being awaited; a plain call goes on to its end."""
        if self._awaiting is not None:
            self._awaiting.cancel()

    async def _awaited(self, found: Awaitable[Any], limit: float, began: float) -> tuple[Any, BaseException | None]:
        name = asyncio.current_task().get_name()  # type: ignore[union-attr]
        self._awaiting = asyncio.create_task(_attempt(found), name=name)
        try:
            left = max(0.0, began + limit - time.monotonic())
            if not (await asyncio.wait({self._awaiting}, timeout=left))[0]:
                self._awaiting.cancel()
                if not (await asyncio.wait({self._awaiting}, timeout=SECONDS_TO_CANCEL))[0]:
                    raise Stuck(f"took longer than {limit:g} s, and would not be cancelled")
                raise Late(f"took longer than {limit:g} s")
            return self._awaiting.result()
        finally:
            self._awaiting = None

    def _place(self) -> str:
        frame = sys._current_frames().get(self.lane.thread)
        return "" if frame is None else line_of(traceback.extract_stack(frame), self.file)


async def _attempt(found: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    try:
        return await found, None
    except BaseException as error:
        return None, error


def line_of(stack: traceback.StackSummary, file: str) -> str:
    lines = [frame.lineno for frame in stack if frame.filename == file]
    return f" (line {lines[-1]})" if lines else ""
