"""Supervision of local processes: start them, detect hangs by heartbeat, and end them together.

The launcher connects rank 0 to the terminal. The output of another process is shown only if it is the first to fail:
its exception is the cause, while the others only report closed connections.

Every process of a world watches itself from a thread. It hangs if its work makes no progress for --hang_timeout seconds
while it is not waiting for other processes, for a reward within its timeout, or for its next call. A process inside a
collective probably waits for the one that hangs, so it waits longer before it reports itself. A process stopped by
SIGSTOP cannot watch itself. Our launcher has a socket to each process and misses its heartbeats; under other launchers
heartbeats are in torch's store, where rank 0 checks the others and they check rank 0. torch itself does not do this:
its launcher detects processes that exit, and its collectives time out without naming a process.

This module does not import torch, since the launcher process does not need it.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from trimtab.interrupts import SIGNALS, handled_signals

LAUNCHER_SOCKET = "TRIMTAB_LAUNCHER_LINE"  # environment variable: descriptor of the socket to our launcher
STORE_SOCKET = "TRIMTAB_STORE_SOCKET"  # environment variable: descriptor of the socket for torch's store on rank 0
DIST_BACKEND = "TRIMTAB_DIST_BACKEND"  # environment variable: --dist_backend
PER_DEVICE = "TRIMTAB_PROCESSES_PER_DEVICE"  # environment variable: of workers that see only their own device
HEARTBEAT, LEFT = b".", b"left"
GRACE = 0.25  # extra share of the timeout for a process inside a collective, so that the cause is reported first
SHOWN_FRAMES, SHOWN_LINES = 6, 30
HANG_TIMEOUT = 1800.0
TO_LEAVE = 10.0  # seconds for the other processes to exit by themselves
FIRST_HEARTBEAT = 300.0  # extra seconds before the first heartbeat, for imports
# The usual causes of signals that a process cannot handle.
CRASHED = ": native code, such as a kernel or a driver, crashed"
CAUSES: dict[int, str] = {
    signal.SIGKILL: ": the system was short of memory, as its log says (dmesg), or somebody or a scheduler ended it",
    signal.SIGBUS: ": shared memory (/dev/shm) or a disk was full",
    **dict.fromkeys((signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE), CRASHED),
}
# torch's messages in a process whose neighbour has died: a consequence, not a cause.
LOST_CONNECTION = (
    *("connection closed by peer", "connection reset", "broken pipe", "timed out", "connection refused"),
    *("failed to recv", "failed to send", "socket closed", "no route to host", "distnetworkerror"),
)


def is_lost_connection(message: str) -> bool:
    """Whether a process failed only because another one did."""
    return any(words in message.lower() for words in LOST_CONNECTION)


# ---- watching processes


class Heartbeat:
    """The last progress of this process, and its current call."""

    def __init__(self) -> None:
        self.moved, self.doing = time.monotonic(), "starting"
        self.limit: float | None = None  # seconds without progress before it counts as hanging; None: not watched
        self.left = False
        self.resting = False
        self.thread: int | None = None  # the working thread; None: the main thread
        self._waits = 0
        self._lock = threading.Lock()

    def move(self, doing: str | None = None) -> None:
        self.moved, self.doing, self.resting = time.monotonic(), doing or self.doing, False

    def rest(self) -> None:
        """Mark this process idle until the next `move`."""
        self.resting = True

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Do not count the time inside: the wait has its own timeout, or none."""
        with self._lock:
            self._waits += 1
        try:
            yield
        finally:
            self.move()
            with self._lock:
                self._waits -= 1

    def still(self) -> float:
        """Seconds without progress; 0 while it waits or is idle, and after it has left the process group."""
        return 0.0 if self._waits or self.resting or self.left else time.monotonic() - self.moved


own_heartbeat = Heartbeat()


def watch(seconds: float) -> None:
    """Start to watch this process, if it is one of several."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return
    own_heartbeat.move()
    own_heartbeat.limit, own_heartbeat.left = seconds, False
    launcher = socket.socket(fileno=int(os.environ[LAUNCHER_SOCKET])) if LAUNCHER_SOCKET in os.environ else None
    if launcher is not None:
        os.set_inheritable(launcher.fileno(), False)
        launcher.setblocking(False)
    threading.Thread(target=_watch_self, args=(seconds, launcher), name="watch", daemon=True).start()


def watch_others(store: Any, rank: int, size: int) -> None:
    """Watch the other processes through torch's store, if they were not started by our launcher."""
    if own_heartbeat.limit is None or LAUNCHER_SOCKET in os.environ:
        return
    arguments = (store.clone(), rank, size, own_heartbeat.limit)  # a separate connection for the thread
    threading.Thread(target=_watch_others, args=arguments, name="watch others", daemon=True).start()


def _watch_self(seconds: float, launcher: socket.socket | None) -> None:
    while True:
        if launcher is not None and not _send_heartbeat(launcher):
            os.kill(os.getpid(), signal.SIGTERM)  # the launcher is gone: save and exit
            launcher = None
        still = own_heartbeat.still()
        if still > seconds and (still > seconds * (1 + GRACE) or not in_collective()):
            why = "waits for a process that does not come" if in_collective() else "hangs"
            frames = "".join(traceback.format_list(_frames()[-SHOWN_FRAMES:])).rstrip()
            stands = f"{own_heartbeat.doing} has not moved for {seconds:g} s (--hang_timeout)\n{frames}"
            _exit_now(f"process {os.environ.get('RANK', '0')} {why}: {stands}")
        time.sleep(min(1.0, seconds / 10))


def _send_heartbeat(launcher: socket.socket) -> bool:
    """Send a heartbeat; False if the launcher is gone."""
    try:
        launcher.send(HEARTBEAT)
        return launcher.recv(1) != b""
    except BlockingIOError:  # nothing to read, as usual: the launcher never sends
        return True
    except OSError:
        return False


def _watch_others(store: Any, rank: int, size: int, seconds: float) -> None:
    others = range(1, size) if rank == 0 else [0]
    seen = {other: (b"", time.monotonic()) for other in others}
    beats = 0
    while True:
        beats += 1
        try:
            store.set(f"trimtab_pulse/{rank}", LEFT if own_heartbeat.left else str(beats))
            if own_heartbeat.left:
                return
            for other in others:
                beat = store.get(f"trimtab_pulse/{other}")
                if beat != seen[other][0] or beat == LEFT:
                    seen[other] = beat, time.monotonic()
        except RuntimeError:  # the store is gone and with it the run; the main thread will fail by itself
            return
        for other, (_, when) in seen.items():
            if time.monotonic() - when > seconds:
                _exit_now(f"process {other} has given no sign of life for {seconds:g} s (--hang_timeout)")
        time.sleep(min(10.0, seconds / 10))


def _frames() -> list[traceback.FrameSummary]:
    frame = sys._current_frames().get(own_heartbeat.thread or threading.main_thread().ident or 0)
    return list(traceback.extract_stack(frame)) if frame is not None else []


def in_collective() -> bool:
    """Whether this process is inside a collective."""
    inside = os.path.join("torch", "distributed", "")
    return any(inside in frame.filename for frame in _frames()[-12:])


def _exit_now(message: str) -> None:
    """Print the message and exit without cleanup, which could hang too."""
    with contextlib.suppress(OSError):
        os.write(2, f"trimtab: {message}\n".encode())
    os._exit(1)


# ---- the launcher

Hear = Callable[[str, bool], None]
"""Receives each line that rank 0 prints, and whether it was on standard error."""


def launch_processes(
    module: str,
    argv: Sequence[str],
    processes: int,
    hang_timeout: float = HANG_TIMEOUT,
    hear: Hear | None = None,
    go_on: Callable[[], str] | None = None,
) -> int:
    """Run `python -m module argv` in `processes` processes; returns the exit code of the first to fail, or 0.

    `hear`: receives rank 0's output in place of the terminal; `go_on`: returns the final line (how to resume) for a
    process that was killed before it could print it.
    """
    launched: list[_LaunchedProcess] = []
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as store, _passing_signals(launched) as signals:
        try:
            for rank in range(processes):
                launched.append(_LaunchedProcess(module, argv, rank, processes, store, hear))
            store.close()
            if signals:  # a signal arrived while they were being started
                _signal_all(launched, signal.SIGTERM)
            code, killed = _wait(launched, signals, hang_timeout)
        finally:
            _signal_all(launched, signal.SIGTERM)
            deadline = time.monotonic() + TO_LEAVE
            for one in launched:
                one.end(deadline)
    if killed and go_on is not None:
        launched[0].print(go_on())
    return code if code >= 0 else 128 - code


class _LaunchedProcess:
    """A started process and the socket to it, on which it sends heartbeats and detects the end of the launcher."""

    def __init__(
        self, module: str, argv: Sequence[str], rank: int, processes: int, store: socket.socket, hear: Hear | None
    ):
        self.rank, self._hear = rank, hear
        self.errors: TextIO | None = tempfile.TemporaryFile("w+") if rank else None  # noqa: SIM115 (lives as long)
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        self.seen = time.monotonic() + FIRST_HEARTBEAT
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.getsockname()[1]),
            STORE_SOCKET: str(store.fileno()),
            LAUNCHER_SOCKET: str(theirs.fileno()),
        }
        # Keep the sockets between the processes on the loopback interface.
        if loopback := {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}:
            environment["GLOO_SOCKET_IFNAME"] = loopback.pop()
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
        streams: dict[str, Any] = {}
        if self.errors is not None:
            streams = {"stdout": subprocess.DEVNULL, "stderr": self.errors}
        elif hear is not None:
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        passed = (theirs.fileno(), *([] if rank else [store.fileno()]))
        command = [sys.executable, "-m", module, *argv]
        self.process = subprocess.Popen(command, env=environment, pass_fds=passed, **streams)
        theirs.close()
        self._readers = [
            threading.Thread(target=self._read_output, args=(stream, stream is self.process.stderr), daemon=True)
            for stream in (self.process.stdout, self.process.stderr)
            if stream is not None
        ]
        for reader in self._readers:
            reader.start()

    def _read_output(self, stream: TextIO, error: bool) -> None:
        assert self._hear is not None
        for line in stream:
            self._hear(line.rstrip("\n"), error)

    def silence(self) -> float:
        """Seconds since its last heartbeat."""
        with contextlib.suppress(OSError):
            if self.socket.recv(4096):
                self.seen = time.monotonic()
        return time.monotonic() - self.seen

    def show(self, why: str) -> None:
        """Print why it ended and, unless it had the terminal, the end of its error output."""
        lines: list[str] = []
        if self.errors is not None:
            self.errors.seek(0)
            lines = self.errors.read().splitlines()[-SHOWN_LINES:]
        self.print(f"process {self.rank} {why}{':' * bool(lines)}")
        for line in lines:
            self.print(f"  {line}")

    def print(self, line: str) -> None:
        if self._hear is not None:
            self._hear(line, True)
        else:
            print(line, file=sys.stderr, flush=True)

    def end(self, deadline: float) -> None:
        """Wait until it has exited and its output is read; after the deadline, kill it."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for reader in self._readers:
            reader.join(TO_LEAVE)


@contextlib.contextmanager
def _passing_signals(launched: list[_LaunchedProcess]) -> Iterator[list[int]]:
    """Forward signals to all processes, and record them in the yielded list.

    A terminal sends Ctrl-C to every process, `kill` only to this one. So the first signal is forwarded as SIGTERM,
    which
    does not count as a second Ctrl-C. A second Ctrl-C means to stop at once, and is forwarded as it is.
    """
    signals: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        signals.append(number)
        again = number == signal.SIGINT and len(signals) > 1
        _signal_all(launched, signal.SIGINT if again else signal.SIGTERM)

    # Only the main thread can handle signals; a launch from another thread is stopped by its caller.
    handled = handled_signals() if threading.current_thread() is threading.main_thread() else []
    before = {number: signal.signal(number, pass_on) for number in handled}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal_all(launched: list[_LaunchedProcess], number: int) -> None:
    for one in launched:
        if one.process.poll() is None:
            one.process.send_signal(number)


def _wait(launched: list[_LaunchedProcess], signals: list[int], hang_timeout: float) -> tuple[int, bool]:
    """Wait for all processes; returns the exit code, and whether a process was killed."""
    while True:
        if any(one.process.poll() for one in launched):
            # Polled again: a process that died because of another died after it.
            codes = [one.process.poll() for one in launched]
            for one in sorted(launched, key=lambda one: (codes[one.rank] or 0) >= 0):  # killed ones first
                if (code := codes[one.rank]) and not _was_requested(code, signals):
                    return _failed(launched, codes, one, code), code < 0
        codes = [one.process.poll() for one in launched]
        if None not in codes:
            first = next((code for code in codes if code), 0)
            return 128 + signals[0] if first and signals else first, False
        for one in launched:
            if one.process.poll() is None and one.silence() > hang_timeout:
                one.process.kill()
                one.show(f"has given no sign of life for {hang_timeout:g} s (--hang_timeout), and was ended")
                return 1, True
        time.sleep(0.1)


def _was_requested(code: int, signals: list[int]) -> bool:
    """Whether a process exited because of a stop signal, or was killed by a signal that we forwarded."""
    return code - 128 in SIGNALS or (bool(signals) and -code in SIGNALS)


def _failed(launched: list[_LaunchedProcess], codes: list[int | None], first: _LaunchedProcess, code: int) -> int:
    """Show the process that caused the failure, and return its exit code."""
    if code < 0:
        first.show(f"was ended by signal {_signal_in_words(-code)}")
        return code
    # Another process's own error says more than rank 0's broken connection.
    for one in reversed(launched[1:]):
        other = codes[one.rank]
        if other and other > 0 and not _was_requested(other, []) and not (other == 2 and _also_fails(launched[0])):
            one.show(f"ended with exit code {other}")
            return other
    return code


def _also_fails(first: _LaunchedProcess) -> bool:
    """Whether rank 0 also ends with a user error: all processes have the same options, and rank 0 prints the error."""
    try:
        return first.process.wait(2.0) == 2
    except subprocess.TimeoutExpired:
        return False


def _signal_in_words(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return str(number)
    return f"{number} ({name}{CAUSES.get(number, '')})"
