"""The sockets between this process and those that it computes with, so that they can be broken and nothing else is.

PyTorch names none of them, but opens all while a group of processes is being made: what was not there before is noted.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

_noted: set[int] = set()  # by their place in the kernel: a descriptor's number is used again


@contextlib.contextmanager
def opening() -> Iterator[None]:
    """Inside, a group of processes is made."""
    before = _streams()
    try:
        yield
    finally:
        _noted.update(_streams().keys() - before.keys())


def break_all(*, but: int = 0) -> None:
    """`but`: a port whose connections are left alone."""
    for place, descriptor in _streams().items():
        if place in _noted:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if but not in (connection.getsockname()[1], connection.getpeername()[1]):
                    connection.shutdown(socket.SHUT_RDWR)


def _streams() -> dict[int, int]:
    """The open TCP sockets of this process: place in the kernel, descriptor."""
    found = {}
    for name in os.listdir("/dev/fd"):
        descriptor = int(name)
        with contextlib.suppress(OSError):
            # A copy of anything else would stay open, and of a locked file it would take the lock away when closed.
            status = os.fstat(descriptor)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    found[status.st_ino] = descriptor
    return found
