"""The beginning of a process that runs somebody's code for a run (child.py is the run's side): limits, and a keeper.

The keeper is a small process beside it, in the same group, which no code of others can hold up. It ends the group with
the run, however that ends; and where the run has it so, it reads what the group prints and keeps the end of it.
"""

import atexit
import os
import resource
import select
import signal
import time
from multiprocessing.connection import Connection

from trimtab.processes.strays import VARIABLE, end_strays

LAST_WORDS = 8192  # bytes of what it printed
SECONDS_TO_END = 1.0  # for code that is at rest, and what it has to tidy up


def begin(handle: str, memory: int, *, captured: bool = False) -> Connection:
    """The connection to the run. `memory`: bytes that the process may have; `captured`: see Child."""
    socket, life = map(int, handle.split(":"))
    _start_keeper(socket, life, captured)
    connection = Connection(socket)
    os.set_inheritable(socket, False)
    atexit.register(_end_group, os.getpid())  # the first to be registered is the last to be called
    # A fork of the author's code must not hold our end open when we are gone.
    os.register_at_fork(after_in_child=connection.close)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    return connection


def _end_group(leader: int) -> None:
    if os.getpid() == leader:  # a fork of it may leave alone
        os.killpg(0, signal.SIGKILL)


def _start_keeper(socket: int, life: int, captured: bool) -> None:
    run = _handle(os.getppid())
    output, printing = os.pipe() if captured else (None, None)
    child = os.fork()
    if child == 0:
        # Not our child, so that whoever waits for theirs does not wait for this one.
        if os.fork() == 0:
            try:
                os.close(socket)  # the run sees by it that we have ended
                _keep(life, run, output)
            finally:
                os._exit(0)
        os._exit(0)
    os.waitpid(child, 0)
    os.close(life)
    if run is not None:
        os.close(run)
    if output is not None and printing is not None:
        os.close(output)
        for stream in (1, 2):
            os.dup2(printing, stream)
        os.close(printing)


def _handle(process: int) -> int | None:
    """Which can be read when the process has ended; None where the system has no such thing."""
    try:
        return os.pidfd_open(process)
    except (AttributeError, OSError):
        return None


def _keep(life: int, run: int | None, output: int | None) -> None:
    events = select.poll()
    events.register(life, 0)  # which reports the other end's closing, and nothing else
    if run is not None:  # whose end a fork of it may hold open
        events.register(run, select.POLLIN)
    if output is not None:
        events.register(output, select.POLLIN)
    last = b""
    while not {life, run} & (ready := {descriptor for descriptor, _ in events.poll()}):
        if output is not None and output in ready:
            last = (last + os.read(output, 2**16))[-LAST_WORDS:]
            _write(last)
    time.sleep(SECONDS_TO_END)
    end_strays(os.environ[VARIABLE])
    os.killpg(0, signal.SIGKILL)


def _write(last: bytes) -> None:
    """Where the run reads it: our output was that before the author's code got another."""
    try:
        os.pwrite(1, last, 0)
    except OSError:  # a full disk
        return
