"""Services of user code and the errors they raise: calls with timeouts, in a thread or on the event loop.

User code is a service of one of two kinds. A function (`FunctionService`) has no state: it runs in the main thread, one
request after another. Instances (`InstanceService`), such as environments, keep state between calls and run
concurrently: all plain calls of an instance are in one thread, which database connections and the like need; a limited
number of threads serves all instances, and coroutines of all instances run at once.
"""

import asyncio
import contextlib
import inspect
import queue
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

SECONDS_TO_CANCEL = 1.0
SECONDS_TO_END = 1.0  # for user code to clean up at the end


class SandboxError(Exception):
    """A call of user code failed. The message is one line for the user."""


class UserCodeError(SandboxError):
    """User code raised; the message names the error and the line of the user's file."""


class CallTimeout(SandboxError):
    """A call took too long and was cancelled."""


class CallStuck(CallTimeout):
    """A call took too long and cannot be cancelled; only killing its process ends it."""


class WorkerDied(SandboxError):
    """The worker process died or was killed."""


class LoadFailed(SandboxError):
    """The user's code could not be loaded."""


# ---- services


class Instance(Protocol):
    """An object with state in a worker process, made for one session."""

    async def answer(self, method: str, arguments: Sequence[Any]) -> Any:
        """The result of a call, JSON or nearly so (`jsonable`)."""
        ...

    async def close(self) -> object: ...


@dataclass(frozen=True)
class FunctionService:
    """A stateless function. A request is split into parts, each of which is called and has one result."""

    info: dict[str, Any]
    file: str
    """The file whose line numbers appear in error messages."""
    split: Callable[[Any], list[Any]]
    call: Callable[[Any], Any]
    is_async: bool = False


@dataclass(frozen=True)
class InstanceService:
    """User code with state: every session gets its own instance."""

    info: dict[str, Any]
    file: str
    make: Callable[["Caller", float], Instance]
    """Creates an instance, given the caller for its calls and their time limit in seconds."""


# ---- JSON values and error messages


def jsonable(value: Any) -> Any:
    """The value with JSON types only: tensors and arrays as lists, other types as their name."""
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    if isinstance(value, dict):
        return {str(name): jsonable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(one) for one in value]
    return value if value is None or isinstance(value, int | float | str) else f"<{type(value).__name__}>"


def error_line(error: BaseException, file: str) -> str:
    """The error in one line, with the last line of the user's file that it passed through."""
    text = " ".join(str(error).split())
    words = (f"{type(error).__name__}: {text}" if text else type(error).__name__)[:500]
    return words + line_of(traceback.extract_tb(error.__traceback__), file)


def line_of(stack: traceback.StackSummary, file: str) -> str:
    lines = [frame.lineno for frame in stack if frame.filename == file]
    return f" (line {lines[-1]})" if lines else ""


def thread_line(thread: threading.Thread | None, file: str) -> str:
    """The line of the file at which a thread is now."""
    frame = None if thread is None else sys._current_frames().get(thread.ident or 0)
    return "" if frame is None else line_of(traceback.extract_stack(frame), file)


# ---- calls with a timeout


Outcome = tuple[Any, BaseException | None]  # return value, or exception


class CallThread:
    """A thread for plain calls, started with the first of them. A call that never ends does not delay the end of the
    process."""

    def __init__(self) -> None:
        self.instances = 0
        self.free = asyncio.Lock()  # a call's time starts when it acquires this
        self.thread: threading.Thread | None = None
        self._calls: queue.SimpleQueue[tuple[asyncio.Future[Outcome], Callable[..., Any], tuple[Any, ...]] | None]
        self._calls = queue.SimpleQueue()

    def submit(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> "asyncio.Future[Outcome]":
        if self.thread is None:
            self.thread = threading.Thread(target=self._work, name="calls", daemon=True)
            self.thread.start()
        future = asyncio.get_running_loop().create_future()
        self._calls.put((future, function, arguments))
        return future

    def close(self) -> None:
        """The thread ends after its calls; this does not wait for it."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function, arguments = call
            try:
                outcome: Outcome = function(*arguments), None
            except BaseException as error:  # sys.exit in user code is an error like any other
                outcome = None, error
            with contextlib.suppress(RuntimeError):  # the loop has ended
                future.get_loop().call_soon_threadsafe(_settle, future, outcome)


def _settle(future: "asyncio.Future[Outcome]", outcome: Outcome) -> None:
    if not future.done():
        future.set_result(outcome)


class Caller:
    """The calls of one instance, one after another."""

    def __init__(self, thread: CallThread, file: str):
        """`file`: whose line numbers appear in messages."""
        self.thread, self.file = thread, file
        self.seconds = 0.0  # total time of its calls
        self._awaiting: asyncio.Task[Outcome] | None = None

    async def call(self, limit: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the function and await its result if it is awaitable. Raises its exception, CallTimeout or CallStuck."""
        async with contextlib.AsyncExitStack() as held:
            await held.enter_async_context(self.thread.free)
            began = time.monotonic()
            try:
                called = self.thread.submit(function, arguments)
                if not (await asyncio.wait({called}, timeout=limit))[0]:
                    held.pop_all()  # no other call may queue behind it
                    raise CallStuck(f"took longer than {limit:g} s{thread_line(self.thread.thread, self.file)}")
                found, error = called.result()
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
        """Cancel the coroutine being awaited; a plain call continues to its end."""
        if self._awaiting is not None:
            self._awaiting.cancel()

    async def _awaited(self, found: Awaitable[Any], limit: float, began: float) -> Outcome:
        name = asyncio.current_task().get_name()  # type: ignore[union-attr]
        self._awaiting = asyncio.create_task(_attempt(found), name=name)
        try:
            left = max(0.0, began + limit - time.monotonic())
            if not (await asyncio.wait({self._awaiting}, timeout=left))[0]:
                self._awaiting.cancel()
                if not (await asyncio.wait({self._awaiting}, timeout=SECONDS_TO_CANCEL))[0]:
                    raise CallStuck(f"took longer than {limit:g} s, and would not be cancelled")
                raise CallTimeout(f"took longer than {limit:g} s")
            return self._awaiting.result()
        finally:
            self._awaiting = None


async def _attempt(found: Awaitable[Any]) -> Outcome:
    try:
        return await found, None
    except BaseException as error:
        return None, error


# ---- concurrent instances


@dataclass(eq=False)
class _Live:
    instance: Instance
    caller: Caller
    busy: bool = False
    dropped: bool = False  # its session has ended


class InstanceServer:
    """The instances of a service on an event loop, in a worker process or in a thread of the run (LocalPool)."""

    def __init__(
        self,
        service: InstanceService,
        seconds: float,
        threads: int,
        send: Callable[[str, int | None, Any], None],
        memory: int | None = None,
    ):
        """`send`: called with each reply (kind, key of the session, values). Kinds: `result`; `error` and `late`, which
        end the session; `stuck`: the process must be killed. `memory`: the process's limit in bytes; None: this is the
        run's own process, which cannot be killed."""
        self._service, self._seconds, self._memory, self.send = service, seconds, memory, send
        self._count = threads
        self._threads: list[CallThread] = []
        self._live: dict[int, _Live] = {}  # by key
        self._tasks: set[asyncio.Task[None]] = set()

    def receive(self, kind: str, key: int, *call: Any) -> None:
        """On the loop: `open` makes the session's instance and, as `call`, calls a method of it; `drop` ends it."""
        if kind == "drop":
            if key in self._live:
                self._drop(key, self._live[key])
            return
        if kind == "open":
            caller = Caller(self._thread(), self._service.file)
            self._live[key] = _Live(self._service.make(caller, self._seconds), caller)
        method, final, *arguments = call
        self._live[key].busy = True
        self._follow(key, self._answer(key, self._live[key], method, final, arguments))

    async def close(self) -> None:
        """Close all instances, within a short time limit."""
        for key, live in list(self._live.items()):
            self._drop(key, live)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=0.8 * SECONDS_TO_END)
        for thread in self._threads:
            thread.close()

    def _thread(self) -> CallThread:
        if len(self._threads) < self._count and all(thread.instances for thread in self._threads):
            self._threads.append(CallThread())
        thread = min(self._threads, key=lambda thread: thread.instances)
        thread.instances += 1
        return thread

    def _follow(self, key: int, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name=str(key))
        self._tasks.add(task)  # the loop itself holds them weakly
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, key: int, live: _Live, method: str, final: bool, arguments: list[Any]) -> None:
        try:
            values = await live.instance.answer(method, arguments)
            if not live.dropped:
                self.send("result", key, values)
            live.dropped = live.dropped or final
        except CallStuck as error:  # its thread is blocked for good
            self._live.pop(key, None)
            self.send("stuck", key, str(error))
            return
        except BaseException as error:
            if isinstance(error, MemoryError) and self._memory is not None:
                self.send("stuck", key, out_of_memory(self._memory))
                return
            if not live.dropped:
                late = isinstance(error, CallTimeout)
                words = str(error) if late else error_line(error, self._service.file)
                self.send("late" if late else "error", key, words)
            live.dropped = True
        live.busy = False
        if live.dropped:
            await self._close_instance(key, live)

    def _drop(self, key: int, live: _Live) -> None:
        live.dropped = True
        live.caller.cancel()
        if not live.busy:
            self._follow(key, self._close_instance(key, live))

    async def _close_instance(self, key: int, live: _Live) -> None:
        if self._live.pop(key, None) is None:
            return
        try:
            await live.instance.close()
        except CallStuck as error:
            self.send("stuck", key, str(error))
            if self._memory is None:
                return  # in the run's own process the thread stays blocked
        live.caller.thread.instances -= 1


def out_of_memory(limit: int) -> str:
    return f"needed more than {limit / 2**30:g} GiB of memory"
