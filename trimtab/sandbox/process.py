"""The run's side of worker processes and call sessions, and interruptible waits."""

import contextlib
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import trimtab
from trimtab.distributed.serialization import MessageSocket
from trimtab.sandbox.worker import LAST_OUTPUT, MARK, end_marked

SECONDS_TO_LEAVE = 2.0
SECONDS_TO_WRITE = 0.05  # for the keeper to write the last output of the process

Output = Literal["inherit", "limited", "tail"]


class WorkerProcess:
    """A process `python -m MODULE HANDLE ARGUMENTS...`, which calls `begin_worker`. `socket`: the run's end of the
    connection.

    It leads a process group, which is killed as a whole, also when the run is killed.
    """

    def __init__(self, module: str, arguments: Sequence[str], *, output: Output = "inherit"):
        """`output`: of the process. inherit: the run's output; limited: the run's standard error, rate-limited; tail:
        hidden, but `last_output` returns its end."""
        self.socket, theirs = socket.socketpair()
        life, ours = os.pipe()
        self._life: int | None = ours  # closed when the run ends, which the keeper notices
        self._printed = tempfile.TemporaryFile() if output == "tail" else None  # noqa: SIM115
        self._ended, self._last_output = False, ""
        self._mark = uuid.uuid4().hex
        source = str(Path(trimtab.__file__).parents[1])
        path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, f"{theirs.fileno()}:{life}:{output}", *arguments],
                pass_fds=[theirs.fileno(), life],
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=self._printed,
                env=os.environ | {"PYTHONPATH": path, MARK: self._mark},
                start_new_session=True,
            )
        os.close(life)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_died(self) -> bool:
        if self._process.returncode is not None:
            return True
        # Without reaping it, so that its pid is not reused.
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def exit_reason(self) -> str:
        """How a process that has died (or is about to) ended. Kills everything it left running."""
        deadline = time.monotonic() + SECONDS_TO_LEAVE  # it may have closed its connection and still run
        while not self.has_died and time.monotonic() < deadline:
            time.sleep(0.001)
        if self._printed is not None and not self._ended:
            time.sleep(SECONDS_TO_WRITE)
        code = self.kill()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"its process died ({how})"

    def last_output(self) -> str:
        """The end of its output, with `output` "tail"."""
        if self._ended or self._printed is None:
            return self._last_output
        return os.pread(self._printed.fileno(), LAST_OUTPUT, 0).decode(errors="replace")

    def dismiss(self) -> None:
        """Close the connection: the process has a short time to clean up, and then exits."""
        self.socket.close()
        if self._life is not None:
            os.close(self._life)
            self._life = None

    def leave(self) -> None:
        """Like `dismiss`, and wait until it has ended."""
        self.dismiss()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=SECONDS_TO_LEAVE)
        self.kill()

    def kill(self) -> int:
        """Kill it and everything it started; returns its exit code, or its signal as a negative number."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, if it has ended
                os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        if not self._ended:
            self._last_output, self._ended = self.last_output(), True
            self.dismiss()
            end_marked(self._mark)
            if self._printed is not None:
                self._printed.close()
        return code


# ---- sessions

PING_EVERY = 0.5  # seconds between two pings of a worker with pending calls


@dataclass(eq=False)
class CallSession:
    """A series of calls in one worker: of an instance, or one call of a stateless function."""

    key: int
    inbox: deque[Any]
    tag: Any = None
    """The owner's name for it."""
    worker: "SandboxWorker | None" = None
    method: str = ""  # of the current call
    final: bool = False  # the current call is the last one
    expected: int = 0  # missing replies of the current call


@dataclass(eq=False)
class SandboxWorker:
    """A worker process of a pool, with its sessions and calls."""

    process: WorkerProcess
    channel: MessageSocket
    serial: bool
    """It gets one call at a time, so that the call that kills the process is known."""
    is_new: bool = True  # the listener does not know it yet
    loaded: bool = False
    since: float = field(default_factory=time.monotonic)
    """Time of the last start, message, send, or call while idle."""
    sessions: dict[int, CallSession] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    """Keys of sessions with a pending call."""
    _queue: deque[tuple[int, bytes]] = field(default_factory=deque)
    _pinged: float = 0.0
    _silent_since: float | None = None

    def send(self, kind: str, key: int, *call: Any) -> None:
        message = pickle.dumps((kind, key, *call))
        if self.serial and self.asked:
            self._queue.append((key, message))
        else:
            self._send(key, message)

    def _send(self, key: int, message: bytes) -> None:
        if not self.asked and self.loaded:
            self.since = time.monotonic()
        self.asked.add(key)
        self.channel.send(message)

    def flush(self) -> None:
        if self.channel.has_more:
            self.channel.flush()
            self.since = time.monotonic()

    def forget(self, key: int) -> None:
        """Drop a session of this worker."""
        del self.sessions[key]
        self._queue = deque(entry for entry in self._queue if entry[0] != key)
        self.channel.send(pickle.dumps(("drop", key)))
        self.answered(key)

    def answered(self, key: int) -> None:
        self.asked.discard(key)
        if not self.asked and self._queue:
            self._send(*self._queue.popleft())

    def receive(self) -> list[dict[str, Any]]:
        """Messages received from the worker. EOFError, MessageTooLarge: see MessageSocket."""
        found = [json.loads(message) for message in self.channel.receive()]
        if found:
            self._silent_since = None
        return found

    def is_silent(self, now: float, seconds: float) -> bool:
        """Whether it has sent nothing for `seconds` since a ping; sends a ping if one is due."""
        if self._silent_since is not None and now - self._silent_since > seconds:
            return True
        if self.asked and now - self._pinged > PING_EVERY:
            self._pinged = now
            self._silent_since = self._silent_since or now
            self.channel.send(pickle.dumps(("ping", 0)))
        return False

    def with_last_output(self, words: str) -> str:
        """The message with the end of the worker's output, which may say more."""
        printed = [" ".join(line.split()) for line in self.process.last_output().splitlines()[-20:]]
        last = " / ".join(line for line in printed if line)[-400:]
        return f"{words}; printed last: {last}" if last else words


# ---- waiting

Value = TypeVar("Value")

PATIENCE = 10.0  # seconds until a wait is reported
LOOK_EVERY = 0.05  # seconds between two checks for a stop request


class RunStopped(Exception):
    """A stop was requested while the run waited for user code or a server."""


class Waiter:
    """Waits for results of another process or machine: reports long waits, and ends them when the run is stopped."""

    def __init__(self, stopped: Callable[[], bool] = lambda: False):
        """`stopped`: whether a stop was requested."""
        self.stopped = stopped
        self._report_after = PATIENCE

    def until(self, ready: Callable[[float], bool], seconds: float, report: str | None = None) -> bool:
        """Call `ready` until it returns True; False after `seconds`. `ready` may block for the seconds it is given;
        `report`:
        describes the wait for the user."""
        began = time.monotonic()
        while not ready(min(LOOK_EVERY, max(0.0, began + seconds - time.monotonic()))):
            self.look(time.monotonic() - began, report)
            if time.monotonic() - began >= seconds:
                return False
        return True

    def results(self, futures: Sequence[Future[Value]], report: str) -> list[Value]:
        """The results in order; raises the first failure."""
        began = time.monotonic()
        try:
            for future in futures:
                while wait_for([future], LOOK_EVERY).not_done:
                    self.look(time.monotonic() - began, report)
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def look(self, passed: float, report: str | None) -> None:
        """Raise RunStopped if a stop was requested, and report a wait that has `passed` many seconds."""
        if self.stopped():
            raise RunStopped
        if report is not None and passed >= self._report_after:
            # Double the interval, since a reward that is always slow need not be reported often.
            self._report_after = 2 * passed
            print(f"waiting for {passed:.0f} s now: {report}", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """A duration as text, rounded up."""
    return f"{math.ceil(seconds)} s" if seconds < 120 else f"{math.ceil(seconds / 60)} min"
