"""A user's Python file as a module."""

import atexit
import contextlib
import importlib.util
import io
import os
import resource
import select
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any


def module_of(file: Path, name: str) -> ModuleType:
    sys.path.insert(0, str(file.parent))  # the file may import its neighbours
    specification = importlib.util.spec_from_file_location(name, file)
    assert specification is not None and specification.loader is not None, "the caller has seen that it is Python"
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


# ---- What a process that runs somebody's code says of it, so that it can be written as JSON and read by a person.


def plain(value: Any) -> Any:
    """Tensors and arrays as lists, anything strange by its name."""
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value if value is None or isinstance(value, int | float | str) else f"<{type(value).__name__}>"


def told(error: BaseException, file: str) -> str:
    """The error in one line, with the line of the file where it was met."""
    text = " ".join(str(error).split())
    words = (f"{type(error).__name__}: {text}" if text else type(error).__name__)[:500]
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{words} (line {lines[-1]})" if lines else words


# ---- processes that user code started


VARIABLE = "TRIMTAB_PROCESS"


def end_strays(mark: str) -> None:
    """End everything that carries the mark, but ourselves."""
    if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal"):
        return
    wanted = f"{VARIABLE}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        number = int(folder.name)
        # Others' processes, and those that have ended meanwhile.
        with contextlib.suppress(OSError):
            if number != os.getpid() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                _end(number, wanted)


def _end(number: int, wanted: bytes) -> None:
    handle = os.pidfd_open(number)  # of this process and no other, so that it is looked at again
    try:
        if wanted in Path(f"/proc/{number}/environ").read_bytes().split(b"\0"):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    finally:
        os.close(handle)


# ---- limits and the keeper process


LAST_WORDS = 8192  # bytes of what it printed
# What is passed on of it: as many bytes at once, and later as many a second.
MOST_PRINTED, PRINTED_A_SECOND = 2**16, 2**8
SECONDS_TO_END = 1.0  # for code that is at rest, and what it has to tidy up


def begin_worker(handle: str, memory: int, *, captured: bool = False, limited: bool = False) -> Connection:
    """The connection to the run. `memory`: bytes that the process may have; `captured`: see WorkerProcess; `limited`:
    what is printed goes to the run's standard error, and too much of it is left out."""
    socket, life = map(int, handle.split(":"))
    show = _Limited() if limited else _LastWords() if captured else None
    ending = _start_keeper(socket, life, show)
    connection = Connection(socket)
    os.set_inheritable(socket, False)
    atexit.register(_end_group, os.getpid(), ending)  # the first to be registered is the last to be called
    if show is not None and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what was printed is to be seen when the process dies
    # A fork of the author's code must not hold our end open when we are gone.
    os.register_at_fork(after_in_child=connection.close)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    return connection


def _end_group(leader: int, ending: int) -> None:
    if os.getpid() == leader:  # a fork of it may leave alone
        with contextlib.suppress(AttributeError, OSError, ValueError):  # the author's code may have closed it
            sys.stdout.flush()
        with contextlib.suppress(OSError):  # the keeper has gone
            os.write(ending, b".")
            time.sleep(SECONDS_TO_END)  # the keeper ends this process as soon as it has read all that was printed
        os.killpg(0, signal.SIGKILL)


def _start_keeper(socket: int, life: int, show: "_LastWords | _Limited | None") -> int:
    """The descriptor to write to when this process ends."""
    run = _handle(os.getppid())
    ended, ending = os.pipe()
    output, printing = (None, None) if show is None else os.pipe()
    child = os.fork()
    if child == 0:
        # Not our child, so that whoever waits for theirs does not wait for this one.
        if os.fork() == 0:
            try:
                os.close(socket)  # the run sees by it that we have ended
                os.close(ending)
                _keep(life, run, ended, output, show)
            finally:
                os._exit(0)
        os._exit(0)
    os.waitpid(child, 0)
    os.close(life)
    os.close(ended)
    if run is not None:
        os.close(run)
    if output is not None and printing is not None:
        os.close(output)
        for stream in (1, 2):
            os.dup2(printing, stream)
        os.close(printing)
    return ending


def _handle(process: int) -> int | None:
    """Which can be read when the process has ended; None where the system has no such thing."""
    try:
        return os.pidfd_open(process)
    except (AttributeError, OSError):
        return None


def _keep(life: int, run: int | None, ended: int, output: int | None, show: "_LastWords | _Limited | None") -> None:
    """Show what is printed until the run has ended, or the process beside; then end the group."""
    events = select.poll()
    events.register(life, 0)  # which reports the other end's closing, and nothing else
    if run is not None:  # whose end a fork of it may hold open
        events.register(run, select.POLLIN)
    events.register(ended, select.POLLIN)
    if output is not None:
        events.register(output, select.POLLIN)
        os.set_blocking(output, False)
    while True:
        ready = {descriptor for descriptor, _ in events.poll()}
        if output is not None and show is not None:
            _show_printed(output, show)
        if {life, run} & ready:
            time.sleep(SECONDS_TO_END)
            end_strays(os.environ[VARIABLE])
            break
        if ended in ready:
            break
    os.killpg(0, signal.SIGKILL)


def _show_printed(output: int, show: "_LastWords | _Limited") -> None:
    """All that is there, but for output that comes faster than it is read."""
    for _ in range(64):
        try:
            printed = os.read(output, 2**16)
        except BlockingIOError:
            return
        if not printed:
            return
        with contextlib.suppress(OSError):  # a full disk, or nobody reads
            show(printed)


class _LastWords:
    """Writes the end of what was printed where the run reads it: our output was that before the author's code got
    another."""

    def __init__(self) -> None:
        self.last = b""

    def __call__(self, printed: bytes) -> None:
        self.last = (self.last + printed)[-LAST_WORDS:]
        os.pwrite(1, self.last, 0)


class _Limited:
    """Writes what was printed to the run's standard error. After too much of it nothing is written until the allowance
    is whole again, so that a line says what is missing and not every few bytes another."""

    def __init__(self) -> None:
        self.allowed, self.since = float(MOST_PRINTED), time.monotonic()
        self.left_out = 0

    def __call__(self, printed: bytes) -> None:
        now = time.monotonic()
        self.allowed = min(float(MOST_PRINTED), self.allowed + (now - self.since) * PRINTED_A_SECOND)
        self.since = now
        if self.left_out and self.allowed < MOST_PRINTED:
            self.left_out += len(printed)
            return
        if self.left_out:
            os.write(2, f"[{self.left_out:,} bytes were left out]\n".encode())
            self.left_out = 0
        shown = printed[: int(self.allowed)]
        self.allowed -= len(shown)
        os.write(2, shown)
        self.left_out = len(printed) - len(shown)
        if self.left_out:
            os.write(2, b"\n[a process of the run prints too much: the rest is left out for a while]\n")
