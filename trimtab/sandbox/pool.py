"""Pools that call user code for a run: in worker processes (WorkerPool), or in a thread of the run (LocalPool).

A session is opened with a call and lives in one worker. A call of a stateless function is a session by itself; an
instance with state, such as an environment, has a session until its last call. Replies arrive in the inboxes of
sessions; only `wait` and `result` wait for them.

A worker process that hangs is killed. Its sessions without a running call fail as `innocent`. If a process dies, any
session with a running call may be the cause: if there were several, none is blamed, and callers reopen them as
`serial`, in a process that gets one call at a time.
"""

import asyncio
import contextlib
import itertools
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trimtab.distributed.serialization import MessageSocket, MessageTooLarge
from trimtab.sandbox.calls import (
    SECONDS_TO_END,
    CallTimeout,
    InstanceServer,
    InstanceService,
    LoadFailed,
    SandboxError,
    UserCodeError,
    WorkerDied,
    jsonable,
)
from trimtab.sandbox.process import (
    LOOK_EVERY,
    PING_EVERY,
    CallSession,
    Output,
    RunStopped,
    SandboxWorker,
    Waiter,
    WorkerProcess,
    duration,
)

GRACE = 5.0  # seconds beyond a call's timeout before an unresponsive process is killed
LOADING_SECONDS = 300.0  # user code may import a library from a slow disk


@dataclass(frozen=True)
class SandboxLimits:
    seconds: float = 60.0
    """Timeout of a call."""
    workers: int | None = None
    """Number of worker processes; None: one per core, at most 8."""
    threads: int = 16
    """Threads per process for plain methods of instances; coroutines all run at once."""
    memory_gib: float = 8.0
    """Memory limit per process."""

    @property
    def worker_count(self) -> int:
        return self.workers or min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Result:
    session: CallSession
    method: str
    values: Any
    time: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Failure:
    """The last reply of a session: it has failed."""

    session: CallSession
    error: SandboxError
    innocent: bool = False
    """Its process was killed because of another session, or the cause is unknown."""
    suspect: bool = False
    """It may have killed its process."""


class SandboxPool:
    """Sessions of user code, in this or other processes. Thread-safe; `state` is the lock for everything in it."""

    info: dict[str, Any]
    """The description that the loaded code returns."""

    def __init__(self, stopped: Callable[[], bool] = lambda: False):
        """`stopped`: whether the run is to stop, which ends every wait with RunStopped."""
        self.state = threading.Condition()
        self._stopped = stopped
        self._sessions: dict[int, CallSession] = {}
        self._keys = itertools.count(1)

    def open(
        self,
        method: str,
        *arguments: Any,
        final: bool = False,
        replies: int = 1,
        serial: bool = False,
        inbox: "deque[Result | Failure] | None" = None,
        tag: Any = None,
    ) -> CallSession:
        """Open a session with its first call. `final`: it is the only call; `replies`: number of results of that call;
        `inbox`: for sessions that share one."""
        session = CallSession(next(self._keys), deque() if inbox is None else inbox, tag)
        with self.state:
            self._sessions[session.key] = session
            self._place(session, serial=serial)
            session.method, session.final, session.expected = method, final, replies
            self._send(session, "open", method, final, *arguments)
        return session

    def call(self, session: CallSession, method: str, *arguments: Any, final: bool = False) -> None:
        """Make the next call of a session. A session that has failed is ignored: its failure is or was in its inbox."""
        with self.state:
            if session.key in self._sessions:
                session.method, session.final, session.expected = method, final, 1
                self._send(session, "call", method, final, *arguments)

    def drop(self, session: CallSession) -> None:
        """End a session, also during a call; it gets no further replies."""
        with self.state:
            kept = [reply for reply in session.inbox if reply.session is not session]
            session.inbox.clear()
            session.inbox.extend(kept)
            if self._sessions.pop(session.key, None) is not None:
                self._forget(session)

    def wait(self, inbox: "deque[Result | Failure]", seconds: float) -> bool:
        """Wait for a reply for up to `seconds`; returns whether there is one."""
        with self.state:
            if not inbox:
                self._check()
                self.state.wait(min(seconds, LOOK_EVERY))
            return bool(inbox)

    def result(self, session: CallSession, seconds: float = math.inf, report: str | None = None) -> Any:
        """The next result of a session with its own inbox. Raises a SandboxError, or RunStopped."""
        if not Waiter(self._stopped).until(lambda left: self.wait(session.inbox, left), seconds, report):
            raise CallTimeout(f"took longer than {seconds:g} s")
        reply = session.inbox.popleft()
        if isinstance(reply, Failure):
            raise reply.error
        return reply.values

    def close(self) -> None:
        raise NotImplementedError

    def _place(self, session: CallSession, *, serial: bool) -> None:
        raise NotImplementedError

    def _send(self, session: CallSession, kind: str, *call: Any) -> None:
        raise NotImplementedError

    def _forget(self, session: CallSession) -> None:
        """Called when a session was dropped."""
        raise NotImplementedError

    def _finished(self, session: CallSession) -> None:
        """Called when all replies of a session's current call have arrived."""

    def _check(self) -> None:
        if self._stopped():
            raise RunStopped

    def _deliver(self, kind: str, key: int, values: Any) -> CallSession | None:
        """Deliver a reply to its session; None if the session was dropped."""
        session = self._sessions.get(key)
        if session is None:
            return None
        if kind == "result":
            session.expected -= 1
            session.inbox.append(Result(session, session.method, values))
            if session.expected == 0:
                if session.final:
                    del self._sessions[key]
                self._finished(session)
        else:
            self._fail(session, CallTimeout(values) if kind == "late" else UserCodeError(values))
        self.state.notify_all()
        return session

    def _fail(
        self, session: CallSession, error: SandboxError, *, innocent: bool = False, suspect: bool = False
    ) -> None:
        session.expected -= 1
        del self._sessions[session.key]
        session.inbox.append(Failure(session, error, innocent, suspect))
        self._finished(session)


# ---- in a thread of the run


class LocalPool(SandboxPool):
    """Instances in this process, for classes that other processes cannot import. There is no protection: a call that
    hangs is abandoned after its timeout, but its thread continues."""

    def __init__(self, service: InstanceService, limits: SandboxLimits):
        super().__init__()
        self.info = service.info
        self._server = InstanceServer(service, limits.seconds, limits.threads, self._receive)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sandbox", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._loop.is_closed():
            return
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._server.close(), self._loop).result(SECONDS_TO_END)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _place(self, session: CallSession, *, serial: bool) -> None:
        """Nothing to do: all sessions are in this process."""

    def _send(self, session: CallSession, kind: str, *call: Any) -> None:
        self._loop.call_soon_threadsafe(self._server.receive, kind, session.key, *call)

    def _forget(self, session: CallSession) -> None:
        self._send(session, "drop")

    def _receive(self, kind: str, key: int | None, values: Any) -> None:
        assert key is not None, "only worker processes send messages without a session"
        values = jsonable(values)
        with self.state:
            self._deliver("late" if kind == "stuck" else kind, key, values)


# ---- in worker processes


@dataclass(frozen=True)
class _Ending:
    """Why a worker process is killed."""

    error: SandboxError | None = None  # None: it has died by itself
    key: int | None = None  # of the session that caused it, if known


class WorkerPool(SandboxPool):
    """Sessions in worker processes.

    Instances share processes, which measure the time of calls themselves (`shared`). Each session of a stateless
    function
    has its own process, and its time is measured here, from one reply to the next.
    """

    def __init__(
        self,
        module: str,
        source: str,
        limits: SandboxLimits,
        stopped: Callable[[], bool] = lambda: False,
        *,
        shared: bool,
        output: Output,
        title: str,
    ):
        """Start the first process, which loads `source` with `module`.load_service, and wait for it. LoadFailed: it
        could not. `title`: the name of the user code in messages."""
        super().__init__(stopped)
        self.limits, self.count = limits, limits.worker_count
        self.grace = 0.0  # extra seconds before a stateless call times out
        numbers = (int(limits.memory_gib * 2**30), limits.seconds, limits.threads)
        self._arguments = [*map(str, numbers), module, source]
        self._shared, self._output = shared, output
        self._workers: list[SandboxWorker] = []
        self._unwanted: list[SandboxWorker] = []  # to be killed by the listener
        self._loaded: dict[str, Any] | None = None
        self._load_error: SandboxError | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._woken, self._waking = os.pipe()
        os.set_blocking(self._waking, False)
        self._looks_at = 0.0  # when the listener checks deadlines next
        self._listener = threading.Thread(target=self._listen, name="sandbox", daemon=True)
        self._workers.append(self._start(serial=False))
        self._listener.start()
        try:
            report = f"{title} to be loaded; given up after {duration(LOADING_SECONDS)} at the latest"
            Waiter(stopped).until(self._is_loaded, math.inf, report)
            if self._loaded is None:
                raise LoadFailed(str(self._load_error))
            self.info = self._loaded
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all processes, with a short time for user code to clean up."""
        with self.state:
            if self._closed:
                return
            self._closed = True
            self._wake(None)
        self._listener.join()
        for worker in self._unwanted:
            worker.process.kill()
        for worker in self._workers:
            worker.process.dismiss()
        for worker in self._workers:
            worker.process.leave()
        os.close(self._woken)
        os.close(self._waking)

    # ---- calls

    def _is_loaded(self, seconds: float) -> bool:
        with self.state:
            self._check()
            if self._loaded is None and self._load_error is None:
                self.state.wait(seconds)
            return self._loaded is not None or self._load_error is not None

    def _start(self, *, serial: bool) -> SandboxWorker:
        process = WorkerProcess("trimtab.sandbox.worker", self._arguments, output=self._output)
        return SandboxWorker(process, MessageSocket(process.socket), serial)

    def _place(self, session: CallSession, *, serial: bool) -> None:
        """Assign a session to the process with the fewest sessions, or to a new one if all have some and the limit
        allows."""
        fit = [worker for worker in self._workers if worker.serial == serial]
        if len(fit) < self.count and all(worker.sessions for worker in fit):
            self._workers.append(self._start(serial=serial))
            fit = self._workers[-1:]
        session.worker = min(fit, key=lambda worker: (len(worker.sessions), not worker.loaded, -worker.since))
        assert self._shared or not session.worker.sessions, "a function has no more calls than processes"
        session.worker.sessions[session.key] = session

    def _send(self, session: CallSession, kind: str, *call: Any) -> None:
        assert session.worker is not None
        session.worker.send(kind, session.key, *call)
        self._wake(session.worker)

    def _forget(self, session: CallSession) -> None:
        worker = session.worker
        assert worker is not None
        if self._shared:
            worker.forget(session.key)
            self._wake(worker)
        else:  # later replies of this call would be mistaken for those of the next session
            worker.sessions.clear()
            if worker in self._workers:  # otherwise the listener is about to kill it
                self._workers.remove(worker)
                self._unwanted.append(worker)
                self._wake(None)

    def _finished(self, session: CallSession) -> None:
        assert session.worker is not None
        session.worker.answered(session.key)
        if session.key not in self._sessions:
            del session.worker.sessions[session.key]

    def _check(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the thread that listens to worker processes has failed") from self._failure
        super()._check()

    def _wake(self, worker: SandboxWorker | None) -> None:
        """Wake the listener if it must do something for this worker before its next check."""
        if worker is None or worker.channel.has_more or worker.is_new or self._deadline(worker) < self._looks_at:
            with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups
                os.write(self._waking, b".")

    def _deadline(self, worker: SandboxWorker) -> float:
        """When a stateless call times out. Its time starts when the worker has received the whole request."""
        measured = worker.loaded and worker.asked and not self._shared and not worker.channel.has_more
        return worker.since + self.limits.seconds + self.grace if measured else math.inf

    # ---- the listener thread, which works while the run is busy

    def _listen(self) -> None:
        try:
            while not self._closed:
                self._round()
        except BaseException as error:
            with self.state:
                self._failure = error
                self.state.notify_all()

    def _round(self) -> None:
        with self.state:
            workers, unwanted = list(self._workers), list(self._unwanted)
            self._unwanted.clear()
            events = select.poll()
            events.register(self._woken, select.POLLIN)
            for worker in workers:
                worker.is_new = False
                events.register(worker.channel, select.POLLIN | select.POLLOUT * worker.channel.has_more)
            now = time.monotonic()
            self._looks_at = min([now + PING_EVERY, *map(self._deadline, workers)])
        for worker in unwanted:
            worker.process.kill()
        ready = {descriptor for descriptor, _ in events.poll(math.ceil(1000 * max(0.0, self._looks_at - now)))}
        now = time.monotonic()  # taken once: replies received by now are in `ready`, however long this round takes
        if self._woken in ready:
            os.read(self._woken, 2**16)
        for worker in workers:
            is_ready = worker.channel.fileno() in ready
            if is_ready:
                self._exchange(worker)
            if self._shared or not is_ready:
                self._check_timeout(worker, now)

    def _check_timeout(self, worker: SandboxWorker, now: float) -> None:
        """Kill a process that exceeds its time."""
        seconds = self.limits.seconds
        error: SandboxError | None = None
        with self.state:
            if worker not in self._workers:
                return
            if not worker.loaded:
                if now - worker.since > LOADING_SECONDS:
                    error = LoadFailed(f"took longer than {LOADING_SECONDS:g} s to be loaded")
            elif not self._shared:
                if now >= self._deadline(worker):
                    error = CallTimeout(f"took longer than {seconds:g} s")
            elif worker.is_silent(now, seconds + GRACE):
                error = WorkerDied(f"nothing was heard of its process for longer than {seconds + GRACE:g} s")
        if error is not None:
            self._end(worker, _Ending(error))

    def _exchange(self, worker: SandboxWorker) -> None:
        ending: _Ending | None = None
        try:
            with self.state:
                if worker not in self._workers:
                    return
                worker.flush()
            messages = worker.receive()  # without the lock, since only this thread reads
            with self.state:
                for found in messages:
                    ending = self._take(worker, found["kind"], found["key"], found["values"]) or ending
                if ending is not None and worker in self._workers:
                    self._workers.remove(worker)  # no further sessions for it
        except MessageTooLarge:
            ending = _Ending(WorkerDied("said more at once than a run can hold"))
        except EOFError:
            ending = _Ending()
        if ending is not None:
            self._end(worker, ending)

    def _take(self, worker: SandboxWorker, kind: str, key: int | None, values: Any) -> _Ending | None:
        worker.since = time.monotonic()
        if kind == "loaded":
            worker.loaded = True
            self._loaded = values if self._loaded is None else self._loaded
            self.state.notify_all()
        elif kind == "unloadable":
            return _Ending(LoadFailed(values))
        elif kind == "stuck":
            return _Ending(WorkerDied(values), key)
        elif key is not None:
            session = self._deliver(kind, key, values)
            if session is not None and kind != "result" and session.expected and not self._shared:
                return _Ending(WorkerDied(""))  # its later replies would be mistaken for those of the next session
        return None

    def _end(self, worker: SandboxWorker, ending: _Ending) -> None:
        """Kill a process, or collect one that has died; its sessions fail."""
        with self.state:
            if worker in self._workers:
                self._workers.remove(worker)
        if ending.error is None:
            error: SandboxError = WorkerDied(worker.with_last_output(worker.process.exit_reason()))
        else:
            worker.process.kill()
            error = ending.error
            if worker.loaded:
                error = type(error)(worker.with_last_output(str(error)))
        with self.state:
            if not worker.loaded:
                error = LoadFailed(str(error))
                self._load_error = self._load_error or error
            self._blame(worker, error, ending.key)
            self.state.notify_all()

    def _blame(self, worker: SandboxWorker, error: SandboxError, key: int | None) -> None:
        blamed = {key} if key is not None else set(worker.asked or worker.sessions)
        # Any session with a running call may be the cause or, if there was none, something that one of them left
        # running.
        uncertain = key is None and len(worker.asked) > 1 and worker.loaded
        for session in sorted(worker.sessions.values(), key=lambda session: session.key):
            if session.key in blamed or not worker.loaded:
                self._fail(session, error, innocent=uncertain, suspect=key is None and worker.loaded)
            else:
                other = WorkerDied(f"its process was ended for another episode's sake: {error}")
                self._fail(session, other, innocent=True)
