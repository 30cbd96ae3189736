"""The main program of a worker process, and loading of user code from `FILE.py[:NAME]`.

    python -m trimtab.sandbox.worker HANDLE MEMORY SECONDS THREADS MODULE SOURCE

It loads user code (MODULE.load_service(SOURCE)) and answers the pool's calls in JSON, so that the run unpickles nothing
that user code returns. It imports neither torch nor other heavy packages unless the user's code does.

`begin_worker` sets limits and starts a keeper: a small process in the same group, which user code cannot block. The
keeper kills the group when the run ends in any way. It also reads the group's output, and keeps the end of it or
forwards it up to a limit.
"""

import asyncio
import atexit
import contextlib
import functools
import importlib
import importlib.util
import io
import json
import math
import os
import pickle
import queue
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from trimtab.errors import UserError
from trimtab.sandbox.calls import (
    SECONDS_TO_END,
    FunctionService,
    InstanceServer,
    InstanceService,
    error_line,
    jsonable,
    out_of_memory,
    thread_line,
)

MARK = "TRIMTAB_PROCESS"  # a variable that all processes started by a worker inherit
SECONDS_TO_START = 0.1  # until the environment of a new program can be read
LAST_OUTPUT = 8192  # bytes of the last output
# Forwarded output: bytes at once, and bytes a second after that.
MOST_PRINTED, PRINTED_A_SECOND = 2**16, 2**8


def parse_source(place: str) -> tuple[Path, str | None]:
    """The file and the name (or None) of FILE.py or FILE.py:NAME."""
    file, colon, name = place.rpartition(":")
    file, wanted = (file, name) if colon and file.endswith(".py") else (place, None)
    return Path(file).expanduser().resolve(), wanted


def load_module(file: Path, name: str) -> ModuleType:
    """A user's Python file as a module."""
    sys.path.insert(0, str(file.parent))  # the file may import its neighbours
    specification = importlib.util.spec_from_file_location(name, file)
    assert specification is not None and specification.loader is not None, "the caller has seen that it is Python"
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


# ---- answering calls


def main(handle: str, memory: str, seconds: str, threads: str, module: str, source: str) -> None:
    connection = begin_worker(handle, int(memory))
    try:
        service: FunctionService | InstanceService = importlib.import_module(module).load_service(source)
    except BaseException as error:
        words = str(error) if isinstance(error, UserError) else error_line(error, str(parse_source(source)[0]))
        connection.send_bytes(_encoded("unloadable", None, words))
        return
    connection.send_bytes(_encoded("loaded", None, service.info))
    if isinstance(service, FunctionService):
        with contextlib.suppress(EOFError, OSError):  # the run has closed the connection or died
            while True:
                _, key, _, _, request = pickle.loads(connection.recv_bytes())
                for is_result, reply in _replies(service, key, service.split(request), float(seconds), int(memory)):
                    connection.send_bytes(reply)
                    if not is_result:  # the session is over
                        break
    else:
        asyncio.run(_Conversation(connection, service, float(seconds), int(memory), int(threads)).serve())


_Reply = tuple[bool, bytes]  # whether it is a result, and the message


def _replies(service: FunctionService, key: int, parts: list[Any], seconds: float, memory: int) -> Iterator[_Reply]:
    def failed(error: BaseException) -> _Reply:
        if isinstance(error, MemoryError):
            return False, _encoded("stuck", key, out_of_memory(memory))
        return False, _encoded("error", key, error_line(error, service.file))

    async def awaited(part: Any) -> _Reply:
        try:
            return True, _encoded("result", key, await asyncio.wait_for(service.call(part), seconds))
        except TimeoutError:
            return False, _encoded("late", key, f"took longer than {seconds:g} s")
        except BaseException as error:
            return failed(error)

    async def gathered() -> list[_Reply]:
        return await asyncio.gather(*map(awaited, parts))

    if service.is_async:  # all at once, since an async function mostly waits
        yield from asyncio.run(gathered())
        return
    for part in parts:
        try:
            reply = True, _encoded("result", key, service.call(part))
        except BaseException as error:  # sys.exit in user code is an error like any other
            reply = failed(error)
        yield reply


class _Conversation:
    """The connection of instances to the run. Threads read and write, so that neither side blocks the other."""

    def __init__(self, connection: Connection, service: InstanceService, seconds: float, memory: int, threads: int):
        self._connection, self._file, self._seconds = connection, service.file, seconds
        self._server = InstanceServer(service, seconds, threads, self._send, memory)
        self._outgoing: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._loop_asked: float | None = None  # since when the event loop has not responded
        self._over = asyncio.Event()

    async def serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._write, daemon=True).start()
        threading.Thread(target=self._read, daemon=True).start()
        await self._over.wait()
        await self._server.close()

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._connection.send_bytes(self._outgoing.get())

    def _read(self) -> None:
        try:
            while True:
                kind, key, *call = pickle.loads(self._connection.recv_bytes())
                if kind == "ping":
                    self._send("pong", None, None)
                    self._check_loop()
                else:
                    self._loop.call_soon_threadsafe(functools.partial(self._server.receive, kind, key, *call))
        except (EOFError, OSError):  # the run has closed the connection or died
            self._loop.call_soon_threadsafe(self._over.set)

    def _check_loop(self) -> None:
        """Report a coroutine that blocks all others."""
        now = time.monotonic()
        if self._loop_asked is None:
            self._loop_asked = now
            self._loop.call_soon_threadsafe(setattr, self, "_loop_asked", None)
        elif now - self._loop_asked > self._seconds:
            task = asyncio.current_task(self._loop)
            name = task.get_name() if task is not None else ""
            place = thread_line(threading.main_thread(), self._file)
            words = f"a coroutine held up all others for longer than {self._seconds:g} s{place}"
            self._send("stuck", int(name) if name.isdigit() else None, words)

    def _send(self, kind: str, key: int | None, values: Any) -> None:
        self._outgoing.put(_encoded(kind, key, values))


def _encoded(kind: str, key: int | None, values: Any) -> bytes:
    return json.dumps({"kind": kind, "key": key, "values": jsonable(values)}).encode()


# ---- limits, and the keeper


def begin_worker(handle: str, memory: int) -> Connection:
    """Set up a process that `WorkerProcess` started, and return its connection to the run. `memory`: limit in bytes."""
    socket, life, output = handle.split(":")
    show = _Limited() if output == "limited" else _Tail() if output == "tail" else None
    ending = _start_keeper(int(socket), int(life), show)
    connection = Connection(int(socket))
    os.set_inheritable(int(socket), False)
    atexit.register(_end_group, os.getpid(), ending)  # registered first, so that it is called last
    if show is not None and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that nothing is lost when the process dies
    # A fork of user code must not keep the connection open after this process.
    os.register_at_fork(after_in_child=connection.close)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    return connection


def _end_group(leader: int, ending: int) -> None:
    if os.getpid() == leader:  # not in a fork, which may exit alone
        with contextlib.suppress(AttributeError, OSError, ValueError):  # user code may have closed it
            sys.stdout.flush()
        with contextlib.suppress(OSError):  # the keeper is gone
            os.write(ending, b".")
            time.sleep(SECONDS_TO_END)  # the keeper kills this process as soon as it has read all output
        os.killpg(0, signal.SIGKILL)


def _start_keeper(socket: int, life: int, show: "_Tail | _Limited | None") -> int:
    """Start the keeper; returns the descriptor to write to when this process ends."""
    run = _pidfd(os.getppid())
    ended, ending = os.pipe()
    output, printing = (None, None) if show is None else os.pipe()
    child = os.fork()
    if child == 0:
        # A grandchild, so that user code that waits for its children does not wait for the keeper.
        if os.fork() == 0:
            try:
                os.close(socket)  # so that it closes when the worker ends, which the run notices
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


def _pidfd(process: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None if the system has none."""
    try:
        return os.pidfd_open(process)
    except (AttributeError, OSError):
        return None


def _keep(life: int, run: int | None, ended: int, output: int | None, show: "_Tail | _Limited | None") -> None:
    """Show output until the worker has ended; then kill what it started. When the run has ended, or needs the worker no
    longer, the worker has a short time left."""
    events = select.poll()
    events.register(life, 0)  # only reports that the other end was closed
    if run is not None:  # a fork of the run may hold the other end open
        events.register(run, select.POLLIN)
    events.register(ended, select.POLLIN)
    if output is not None:
        events.register(output, select.POLLIN)
        os.set_blocking(output, False)
    deadline = math.inf
    while time.monotonic() < deadline:
        left = deadline - time.monotonic()
        ready = {descriptor for descriptor, _ in events.poll(None if left == math.inf else max(0.0, 1000 * left))}
        if output is not None and show is not None:
            _show_printed(output, show)
        if ended in ready:
            break
        for over in ready - {output}:
            deadline = min(deadline, time.monotonic() + SECONDS_TO_END)
            events.unregister(over)
    end_marked(os.environ[MARK])  # the run does this too, unless it was killed
    os.killpg(0, signal.SIGKILL)


def _show_printed(output: int, show: "_Tail | _Limited") -> None:
    """Show all available output, up to a limit per call."""
    for _ in range(64):
        try:
            printed = os.read(output, 2**16)
        except BlockingIOError:
            return
        if not printed:
            return
        with contextlib.suppress(OSError):  # a full disk, or a closed pipe
            show(printed)


class _Tail:
    """Writes the end of the output to the file that the run reads, which is the keeper's standard output."""

    def __init__(self) -> None:
        self.last = b""

    def __call__(self, printed: bytes) -> None:
        self.last = (self.last + printed)[-LAST_OUTPUT:]
        os.pwrite(1, self.last, 0)


class _Limited:
    """Forwards output to the run's standard error, rate-limited. After too much of it, nothing is written until the
    whole allowance is restored, so that one line reports what is missing."""

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


# ---- processes that user code started


def end_marked(mark: str) -> None:
    """Kill all other processes with the mark in their environment. They may have left the worker's group, as browsers
    do. If the system does not show environments, none is found."""
    if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal"):
        return
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        number = int(folder.name)
        # Suppressed: other users' processes, and processes that have already ended.
        with contextlib.suppress(OSError):
            if number == os.getpid() or wanted not in _variables(folder):
                continue
            handle = os.pidfd_open(number)  # pins the pid, so that the second check is of the same process
            try:
                if wanted in _variables(folder):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)


def _variables(folder: Path) -> list[bytes]:
    """The environment of a process, which is empty for a moment while the process starts a program."""
    deadline = time.monotonic() + SECONDS_TO_START
    while not (found := (folder / "environ").read_bytes()) and time.monotonic() < deadline:
        os.readlink(folder / "exe")  # OSError: it has ended, or belongs to the kernel
        time.sleep(0.001)
    return found.split(b"\0")


if __name__ == "__main__":
    main(*sys.argv[1:])
