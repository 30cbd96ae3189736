"""A process that hangs is named and ended, and none outlives the launcher that started it.

Every process of a world watches itself from a thread: late is one whose work has not moved for --hang_timeout seconds
while it was not waiting for others, for a reward within its limit, or for its next call. One that stands inside a
collective is a victim more likely than the cause, so it lets the others be named first.

A process that is stopped cannot watch itself. Our launcher has a line to each and misses the beats of such a one; under
another launcher the beats lie in the store, where the first process looks at the others and they look at it.
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

LAUNCHER_SOCKET = "TRIMTAB_LAUNCHER_LINE"  # descriptor of the socket to our launcher
BEAT = b"."
LEFT = b"left"
GRACE = 0.25  # share of the time that one inside a collective waits on, for the cause to be named
SHOWN_FRAMES = 6


class Pulse:
    """When the work of this process last moved, and what it was doing."""

    def __init__(self) -> None:
        self.moved, self.doing = time.monotonic(), "starting"
        self.limit: float | None = None  # seconds that it may stand still; None: nobody watches
        self.left = False
        self.resting = False
        self.thread: int | None = None  # that works; None: the main one
        self._waits = 0
        self._lock = threading.Lock()

    def move(self, doing: str | None = None) -> None:
        self.moved, self.doing, self.resting = time.monotonic(), doing or self.doing, False

    def rest(self) -> None:
        """Until the next move there is nothing to do."""
        self.resting = True

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, this process waits for something that has its own limit, or may take any time."""
        with self._lock:
            self._waits += 1
        try:
            yield
        finally:
            self.move()
            with self._lock:
                self._waits -= 1

    def still(self) -> float:
        """Seconds without a move; 0 while it waits or rests, and when it has left the others."""
        return 0.0 if self._waits or self.resting or self.left else time.monotonic() - self.moved


pulse = Pulse()


def watch(seconds: float) -> None:
    """Begin to watch this process, if it is one of several."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return
    pulse.move()
    pulse.limit, pulse.left = seconds, False
    line = socket.socket(fileno=int(os.environ[LAUNCHER_SOCKET])) if LAUNCHER_SOCKET in os.environ else None
    if line is not None:
        os.set_inheritable(line.fileno(), False)
        line.setblocking(False)
    threading.Thread(target=_watch_self, args=(seconds, line), name="watch", daemon=True).start()


def watch_others(store: Any, rank: int, size: int) -> None:
    """Notice processes that give no sign of life, where no launcher of ours does."""
    if pulse.limit is None or LAUNCHER_SOCKET in os.environ:
        return
    arguments = (store.clone(), rank, size, pulse.limit)  # a connection of its own, for another thread
    threading.Thread(target=_watch_others, args=arguments, name="watch others", daemon=True).start()


def _watch_self(seconds: float, line: socket.socket | None) -> None:
    while True:
        if line is not None and not _is_held(line):
            os.kill(os.getpid(), signal.SIGTERM)  # save, and leave
            line = None
        still = pulse.still()
        if still > seconds and (still > seconds * (1 + GRACE) or not in_collective()):
            _leave_hanging(seconds)
        time.sleep(min(1.0, seconds / 10))


def _is_held(line: socket.socket) -> bool:
    """Send a sign of life; whether anybody is at the other end."""
    try:
        line.send(BEAT)
        return line.recv(1) != b""
    except BlockingIOError:  # nothing to read: it never says anything
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
            store.set(_key(rank), LEFT if pulse.left else str(beats))
            if pulse.left:
                return
            for other in others:
                beat = store.get(_key(other))
                if beat != seen[other][0] or beat == LEFT:
                    seen[other] = beat, time.monotonic()
        except RuntimeError:  # the store has gone, and with it the run; whoever works will notice
            return
        for other, (_, when) in seen.items():
            if time.monotonic() - when > seconds:
                _leave(f"process {other} has given no sign of life for {seconds:g} s (--hang_timeout)")
        time.sleep(min(10.0, seconds / 10))


def _key(rank: int) -> str:
    return f"trimtab_pulse/{rank}"


def _frames() -> list[traceback.FrameSummary]:
    frame = sys._current_frames().get(pulse.thread or threading.main_thread().ident or 0)
    return list(traceback.extract_stack(frame)) if frame is not None else []


def in_collective() -> bool:
    """Whether this process stands where it waits for others."""
    inside = os.path.join("torch", "distributed", "")
    return any(inside in frame.filename for frame in _frames()[-12:])


def _leave_hanging(seconds: float) -> None:
    why = "waits for a process that does not come" if in_collective() else "hangs"
    rank = os.environ.get("RANK", "0")
    frames = "".join(traceback.format_list(_frames()[-SHOWN_FRAMES:]))
    _leave(f"process {rank} {why}: {pulse.doing} has not moved for {seconds:g} s (--hang_timeout)\n{frames.rstrip()}")


def _leave(message: str) -> None:
    """At once: what hangs cannot be asked to leave."""
    with contextlib.suppress(OSError):
        os.write(2, f"trimtab: {message}\n".encode())
    os._exit(1)


# What PyTorch says in a process whose neighbour has gone: a consequence, not a cause.
OF_ANOTHER = (
    *("connection closed by peer", "connection reset", "broken pipe", "timed out", "connection refused"),
    *("failed to recv", "failed to send", "socket closed", "no route to host", "distnetworkerror"),
)


def is_lost_connection(message: str) -> bool:
    """Whether a process failed only because another one has."""
    return any(words in message.lower() for words in OF_ANOTHER)


# ---- Start several processes of one command on this machine, and end them together. The first process has the
# terminal. What another one says is shown only if it is the first to fail: its own exception, not the others'
# complaints about a closed connection. One that gives no sign of life is named and ended (watch.py).


STORE_SOCKET = "TRIMTAB_STORE_SOCKET"  # descriptor of the socket at which the first process meets the others
HANG_TIMEOUT = 1800.0
TO_LEAVE = 10.0  # seconds that the others get to end by themselves
FIRST_SIGN = 300.0  # seconds more until the first sign of life, while everything is imported
SHOWN_LINES = 30
# Why a process usually gets a signal that it cannot answer.
CRASHED = ": native code, such as a kernel or a driver, crashed"
CAUSES: dict[int, str] = {
    signal.SIGKILL: ": the system was short of memory, as its log says (dmesg), or somebody or a scheduler ended it",
    signal.SIGBUS: ": shared memory (/dev/shm) or a disk was full",
    **dict.fromkeys((signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE), CRASHED),
}


Hear = Callable[[str, bool], None]
"""Gets each line of the first process, and whether it was said on standard error."""


def launch_processes(
    module: str,
    argv: Sequence[str],
    processes: int,
    hang_timeout: float = HANG_TIMEOUT,
    hear: Hear | None = None,
    go_on: Callable[[], str] | None = None,
) -> int:
    """Run `python -m module argv` as that many processes; the exit code of the first to fail, or 0. `hear`: who gets
    what the first process says, in place of the terminal; `go_on`: what there is to say, when all have ended, after one
    of them had no chance to say it."""
    ranks: list[_LaunchedProcess] = []
    with _meeting_place() as place, _passing_on(ranks) as asked:
        try:
            for rank in range(processes):
                ranks.append(_LaunchedProcess(module, argv, rank, processes, place, hear))
            place.close()
            if asked:  # while they were being started
                _signal_all(ranks, signal.SIGTERM)
            code, killed = _wait(ranks, asked, hang_timeout)
        finally:
            _end_all(ranks)
    if killed and go_on is not None:
        ranks[0].say(go_on())
    return code if code >= 0 else 128 - code


class _LaunchedProcess:
    """One of the processes, and the line to it: it sends its signs of life, and notices when the launcher is gone."""

    def __init__(
        self,
        module: str,
        argv: Sequence[str],
        rank: int,
        processes: int,
        place: socket.socket,
        hear: Hear | None = None,
    ):
        self.rank, self._hear = rank, hear
        self.errors: TextIO | None = tempfile.TemporaryFile("w+") if rank else None  # noqa: SIM115 (lives as long)
        self.line, theirs = socket.socketpair()
        self.line.setblocking(False)
        self.seen = time.monotonic() + FIRST_SIGN
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(place.getsockname()[1]),
            STORE_SOCKET: str(place.fileno()),
            LAUNCHER_SOCKET: str(theirs.fileno()),
            **_loopback(),
        }
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
        quiet: dict[str, Any] = {} if self.errors is None else {"stdout": subprocess.DEVNULL, "stderr": self.errors}
        handed_over = (theirs.fileno(), *([] if rank else [place.fileno()]))
        if hear is not None and not rank:
            quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, "-m", module, *argv]
        self.process = subprocess.Popen(command, env=environment, pass_fds=handed_over, **quiet)
        theirs.close()
        self._listeners = [
            threading.Thread(target=self._pass_on, args=(stream, stream is self.process.stderr), daemon=True)
            for stream in (self.process.stdout, self.process.stderr)
            if stream is not None
        ]
        for listener in self._listeners:
            listener.start()

    def _pass_on(self, stream: TextIO, error: bool) -> None:
        assert self._hear is not None
        for line in stream:
            self._hear(line.rstrip("\n"), error)

    def heard_out(self) -> None:
        """Wait until all that it has said is heard, once it has ended."""
        for listener in self._listeners:
            listener.join(TO_LEAVE)

    def silence(self) -> float:
        """Seconds since its last sign of life."""
        with contextlib.suppress(OSError):
            if self.line.recv(4096):
                self.seen = time.monotonic()
        return time.monotonic() - self.seen

    def show(self, why: str) -> None:
        """Why it ended, and the end of what it had to say, if the terminal was another one's."""
        lines: list[str] = []
        if self.errors is not None:
            self.errors.seek(0)
            lines = self.errors.read().splitlines()[-SHOWN_LINES:]
        self.say(f"process {self.rank} {why}{':' * bool(lines)}")
        for line in lines:
            self.say(f"  {line}")

    def say(self, line: str) -> None:
        if self._hear is not None:
            self._hear(line, True)
        else:
            print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _passing_on(ranks: list[_LaunchedProcess]) -> Iterator[list[int]]:
    """Signals go to all processes, and into the list that is yielded.

    A terminal has told every process of a Ctrl-C, `kill` only this one. So the first is passed on as SIGTERM, which
    makes no second Ctrl-C of it; a second Ctrl-C means at once, and is passed on as it is.
    """
    asked: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        asked.append(number)
        again = number == signal.SIGINT and len(asked) > 1
        _signal_all(ranks, signal.SIGINT if again else signal.SIGTERM)

    # Only a main thread may; where another one launches, somebody else stops it.
    handled = handled_signals() if threading.current_thread() is threading.main_thread() else []
    before = {number: signal.signal(number, pass_on) for number in handled}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(ranks: list[_LaunchedProcess], asked: list[int], hang_timeout: float) -> tuple[int, bool]:
    """The exit code, and whether a process was killed."""
    while True:
        if any(rank.process.poll() for rank in ranks):
            # Asked once more: who died of another's death died after it.
            codes = [rank.process.poll() for rank in ranks]
            killed_first = sorted(ranks, key=lambda rank: (codes[rank.rank] or 0) >= 0)
            for rank in killed_first:
                if (code := codes[rank.rank]) and not _was_asked(code, asked):
                    return _failed(ranks, codes, rank, code), code < 0
        codes = [rank.process.poll() for rank in ranks]
        if None not in codes:
            first = next((code for code in codes if code), 0)
            return 128 + asked[0] if first and asked else first, False
        for rank in ranks:
            if rank.process.poll() is None and rank.silence() > hang_timeout:
                rank.process.kill()
                rank.show(f"has given no sign of life for {hang_timeout:g} s (--hang_timeout), and was ended")
                return 1, True
        time.sleep(0.1)


def _was_asked(code: int, asked: list[int]) -> bool:
    """Whether a process left because a signal asked it to; one that was killed by it has, if we passed it on."""
    return code - 128 in SIGNALS or (bool(asked) and -code in SIGNALS)


def _failed(ranks: list[_LaunchedProcess], codes: list[int | None], first: _LaunchedProcess, code: int) -> int:
    if code < 0:
        first.show(f"was ended by signal {_signal_in_words(-code)}")
        return code
    # Another process's own error is worth more than the first one's broken connection.
    for rank in reversed(ranks[1:]):
        other = codes[rank.rank]
        if other and other > 0 and not _was_asked(other, []) and not (other == 2 and _also_fails(ranks[0])):
            rank.show(f"ended with exit code {other}")
            return other
    return code


def _signal_in_words(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return str(number)
    return f"{number} ({name}{CAUSES.get(number, '')})"


def _also_fails(first: _LaunchedProcess) -> bool:
    """A mistake in the command is every process's; the first one tells it, in a moment if not already."""
    try:
        return first.process.wait(2.0) == 2
    except subprocess.TimeoutExpired:
        return False


def _signal_all(ranks: list[_LaunchedProcess], number: int) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.send_signal(number)


def _end_all(ranks: list[_LaunchedProcess]) -> None:
    _signal_all(ranks, signal.SIGTERM)
    deadline = time.monotonic() + TO_LEAVE
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()
        rank.heard_out()


def _meeting_place() -> socket.socket:
    """Where the processes meet: open already, so that nobody else can be there, and only to this machine."""
    place = socket.socket()
    place.bind(("127.0.0.1", 0))
    place.listen(1024)
    return place


def _loopback() -> dict[str, str]:
    """Nobody outside this machine has business with the sockets between the processes."""
    names = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    return {"GLOO_SOCKET_IFNAME": names.pop()} if names else {}
