"""Processes that somebody's code started and that have left its group, such as browsers: found by their environment,
which has a mark that all of them inherit. Where the system does not show it, there are none to be found."""

import contextlib
import os
import signal
from pathlib import Path

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
