"""Pools that call user code for a run: in worker processes (WorkerPool), or in a thread of the run (LocalPool).

A session is opened with a call and lives in one worker. A call of a stateless function is a session by itself; an
instance with state, such as an environment, has a session until its last call. Replies arrive in the inboxes of
sessions; only `wait` and `result` wait for them.

A worker process that hangs is ended. The sessions that lived in it and did nothing fail as innocent. Where a process
dies, any of the sessions that had a call in it may be the cause: if there were several, none is blamed, and the next
sessions for them are opened as `serial`, in a process that gets one call at a time.
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

GRACE = 5.0  # seconds beyond a call's own, for a process that gives no sign of life
LOADING_SECONDS = 300.0  # user code may import a library from a slow disk


@dataclass(frozen=True)
class SandboxLimits:
    seconds: float = 60.0
    """The most that a call may take."""
    workers: int | None = None
    """Worker processes; unset: one a core, and at most 8."""
    threads: int = 16
    """Threads of each for plain methods of instances; coroutines all run at once."""
    memory_gib: float = 8.0
    """Memory of each."""

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
    """The session is over."""

    session: CallSession
    error: SandboxError
    innocent: bool = False
    """Its process was ended because of another session, or it is not known whose fault it was."""
    suspect: bool = False
    """It may have ended its process."""


class SandboxPool:
    """Sessions, wherever their user code runs. Thread-safe; `state` is the lock around everything in it."""

    info: dict[str, Any]
    """What the loaded code says about itself."""

    def __init__(self, stopped: Callable[[], bool] = lambda: False):
        """`stopped`: whether the run has been told to stop, which ends every wait (RunStopped)."""
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
        """Open a session with its first call. `final`: the call is the only one; `replies`: results of that call;
        `inbox`: where they go, for sessions that share one."""
        session = CallSession(next(self._keys), deque() if inbox is None else inbox, tag)
        with self.state:
            self._sessions[session.key] = session
            self._place(session, serial=serial)
            session.method, session.final, session.expected = method, final, replies
            self._send(session, "open", method, final, *arguments)
        return session

    def call(self, session: CallSession, method: str, *arguments: Any, final: bool = False) -> None:
        """The next call of a session. Where it has failed, the failure is in its inbox, or has been."""
        with self.state:
            if session.key in self._sessions:
                session.method, session.final, session.expected = method, final, 1
                self._send(session, "call", method, final, *arguments)

    def drop(self, session: CallSession) -> None:
        """End a session, whatever it does; it has no further replies."""
        with self.state:
            kept = [reply for reply in session.inbox if reply.session is not session]
            session.inbox.clear()
            session.inbox.extend(kept)
            if self._sessions.pop(session.key, None) is not None:
                self._forget(session)

    def wait(self, inbox: "deque[Result | Failure]", seconds: float) -> bool:
        """Whether a reply is there, or comes within this many seconds."""
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
        """The session was dropped."""
        raise NotImplementedError

    def _finished(self, session: CallSession) -> None:
        """All replies of its current call are there."""

    def _check(self) -> None:
        if self._stopped():
            raise RunStopped

    def _hear(self, kind: str, key: int, values: Any) -> CallSession | None:
        """A reply to a session, if it has not been dropped."""
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
    """Instances in this process, for classes that no other process could import: without a sandbox's protection. A
    call that hangs is given up after its time, but its thread goes on."""

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
        """There is one place."""

    def _send(self, session: CallSession, kind: str, *call: Any) -> None:
        self._loop.call_soon_threadsafe(self._server.receive, kind, session.key, *call)

    def _forget(self, session: CallSession) -> None:
        self._send(session, "drop")

    def _receive(self, kind: str, key: int | None, values: Any) -> None:
        assert key is not None, "only worker processes speak of themselves"
        values = jsonable(values)
        with self.state:
            self._hear("late" if kind == "stuck" else kind, key, values)


# ---- in worker processes


@dataclass(frozen=True)
class _Ending:
    """Why a worker process is ended."""

    error: SandboxError | None = None  # None: it has died
    key: int | None = None  # of the session that is the cause, where that is known


class WorkerPool(SandboxPool):
    """Sessions in worker processes.

    Instances share processes, which measure the time of calls themselves (`shared`). A stateless function has a process
    for each of its sessions, and its time is measured here: from one reply to the next.
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
        """Starts the first process, which loads `source` by `module`.load_service, and waits for that (LoadFailed).
        `title`: what the user knows it as."""
        super().__init__(stopped)
        self.limits, self.count = limits, limits.worker_count
        self.grace = 0.0  # seconds beyond a call's own, where time is measured here
        numbers = (int(limits.memory_gib * 2**30), limits.seconds, limits.threads)
        self._arguments = [*map(str, numbers), module, source]
        self._shared, self._output = shared, output
        self._workers: list[SandboxWorker] = []
        self._unwanted: list[SandboxWorker] = []  # to be ended by the listener
        self._loaded: dict[str, Any] | None = None
        self._load_error: SandboxError | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._woken, self._waking = os.pipe()
        os.set_blocking(self._waking, False)
        self._looks_at = 0.0  # when the listener looks again by itself
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
        """End all processes; user code has a moment to clean up."""
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
        """In the process with the fewest sessions; in a new one where each has some, as long as there may be more."""
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
        else:  # its further replies would be taken for others'
            worker.sessions.clear()
            if worker in self._workers:  # else the listener is about to end it
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
        """Have the listener look again, if there is more to be done for this process than it knows."""
        if worker is None or worker.channel.has_more or worker.is_new or self._deadline(worker) < self._looks_at:
            with contextlib.suppress(BlockingIOError):  # it has been woken often enough
                os.write(self._waking, b".")

    def _deadline(self, worker: SandboxWorker) -> float:
        """When a stateless call has taken too long. Its time begins when the worker has the whole request."""
        measured = worker.loaded and worker.asked and not self._shared and not worker.channel.has_more
        return worker.since + self.limits.seconds + self.grace if measured else math.inf

    # ---- the listener, in its own thread: the run may be busy with something else

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
        now = time.monotonic()  # what has come by now is in `ready`, however long the rest of this round takes
        if self._woken in ready:
            os.read(self._woken, 2**16)
        for worker in workers:
            is_ready = worker.channel.fileno() in ready
            if is_ready:
                self._exchange(worker)
            if self._shared or not is_ready:
                self._look_at(worker, now)

    def _look_at(self, worker: SandboxWorker, now: float) -> None:
        """End a process that takes too long."""
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
            heard = worker.heard()  # without the lock: only this thread reads
            with self.state:
                for found in heard:
                    ending = self._take(worker, found["kind"], found["key"], found["values"]) or ending
                if ending is not None and worker in self._workers:
                    self._workers.remove(worker)  # no further session is placed there
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
            session = self._hear(kind, key, values)
            if session is not None and kind != "result" and session.expected and not self._shared:
                return _Ending(WorkerDied(""))  # its further replies would be taken for others'
        return None

    def _end(self, worker: SandboxWorker, ending: _Ending) -> None:
        """End a process, or find that it has ended; its sessions fail."""
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
        # Any of the sessions with a call may have done it. Where none had, something that one of them left running has.
        uncertain = key is None and len(worker.asked) > 1 and worker.loaded
        for session in sorted(worker.sessions.values(), key=lambda session: session.key):
            if session.key in blamed or not worker.loaded:
                self._fail(session, error, innocent=uncertain, suspect=key is None and worker.loaded)
            else:
                other = WorkerDied(f"its process was ended for another episode's sake: {error}")
                self._fail(session, other, innocent=True)
