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
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

LINE = "TRIMTAB_LAUNCHER_LINE"  # descriptor of the socket to our launcher
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
    line = socket.socket(fileno=int(os.environ[LINE])) if LINE in os.environ else None
    if line is not None:
        os.set_inheritable(line.fileno(), False)
        line.setblocking(False)
    threading.Thread(target=_watch_self, args=(seconds, line), name="watch", daemon=True).start()


def watch_others(store: Any, rank: int, size: int) -> None:
    """Notice processes that give no sign of life, where no launcher of ours does."""
    if pulse.limit is None or LINE in os.environ:
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
            _end(seconds)
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


def _end(seconds: float) -> None:
    why = "waits for a process that does not come" if in_collective() else "hangs"
    rank = os.environ.get("RANK", "0")
    frames = "".join(traceback.format_list(_frames()[-SHOWN_FRAMES:]))
    _leave(f"process {rank} {why}: {pulse.doing} has not moved for {seconds:g} s (--hang_timeout)\n{frames.rstrip()}")


def _leave(message: str) -> None:
    """At once: what hangs cannot be asked to leave."""
    with contextlib.suppress(OSError):
        os.write(2, f"trimtab: {message}\n".encode())
    os._exit(1)
