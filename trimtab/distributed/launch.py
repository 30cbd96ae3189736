"""Start several processes of one command on this machine, and end them together.

The first process has the terminal. What another one says is shown only if it is the first to fail: its own exception,
not the others' complaints about a closed connection.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import TextIO

STORE_SOCKET = "TRIMTAB_STORE_SOCKET"  # descriptor of the socket at which the first process meets the others
PATIENCE = 10.0  # seconds that the others get to end by themselves
SHOWN_LINES = 30


def launch(module: str, argv: Sequence[str], processes: int) -> int:
    """Run `python -m module argv` as that many processes; the exit code of the first to fail, or 0."""
    errors = [None, *(tempfile.TemporaryFile("w+") for _ in range(processes - 1))]  # noqa: SIM115 (lives as long)
    with _meeting_place() as place:
        workers = [_start(module, argv, rank, processes, place, errors[rank]) for rank in range(processes)]
    before = signal.signal(signal.SIGTERM, lambda number, _: _signal_all(workers, number))
    try:
        code = _wait(workers, errors)
    except KeyboardInterrupt:
        # The terminal has told every process; they save and leave.
        for worker in workers:
            worker.wait()
        code = workers[0].returncode
    finally:
        signal.signal(signal.SIGTERM, before)
        _end(workers)
    return code if code >= 0 else 128 - code


def _start(
    module: str, argv: Sequence[str], rank: int, processes: int, place: socket.socket, errors: TextIO | None
) -> subprocess.Popen:
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(place.getsockname()[1]),
        STORE_SOCKET: str(place.fileno()),
        **_loopback(),
    }
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    quiet = {} if errors is None else {"stdout": subprocess.DEVNULL, "stderr": errors}
    handed_over = (place.fileno(),) if rank == 0 else ()
    return subprocess.Popen([sys.executable, "-m", module, *argv], env=environment, pass_fds=handed_over, **quiet)


def _wait(workers: list[subprocess.Popen], errors: list) -> int:
    while True:
        codes = [worker.poll() for worker in workers]
        failed = [rank for rank, code in enumerate(codes) if code]
        # Another process's own error is worth more than the first one's broken connection.
        for rank in sorted(failed, reverse=True):
            asked = codes[rank] in (128 + signal.SIGTERM, 128 + signal.SIGINT)
            if rank and not asked and not (codes[rank] == 2 and _also_fails(workers[0])):
                _show(rank, codes[rank], errors[rank])
                return codes[rank]
        if failed:
            return codes[failed[0]]
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.1)


def _also_fails(first: subprocess.Popen) -> bool:
    """A mistake in the command is every process's; the first one tells it, in a moment if not already."""
    try:
        return first.wait(2.0) == 2
    except subprocess.TimeoutExpired:
        return False


def _show(rank: int, code: int, errors) -> None:
    why = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    print(f"process {rank} {why}:", file=sys.stderr)
    errors.seek(0)
    for line in errors.read().splitlines()[-SHOWN_LINES:]:
        print(f"  {line}", file=sys.stderr)


def _signal_all(workers: list[subprocess.Popen], number: int) -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.send_signal(number)


def _end(workers: list[subprocess.Popen]) -> None:
    _signal_all(workers, signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE
    for worker in workers:
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


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
