"""A signal that reaches one process of a world is heard by all of them, whatever they are waiting for.

A process inside a collective runs none of its signal handlers, so a thread listens: Python writes the signal's number
to a socket at once. The thread passes it on in the store that all share, and looks there for what others got.
"""

import contextlib
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist

from trimtab.distributed.world import World
from trimtab.interrupts import SIGNALS, StopRequest

LOOK_EVERY = 0.5  # seconds
KEY = "trimtab_stop"


@contextlib.contextmanager
def heard_by_all(stop: StopRequest, world: World) -> Iterator[None]:
    if world.size == 1 or threading.current_thread() is not threading.main_thread():
        yield
        return
    told, listening = socket.socketpair()
    told.setblocking(False)
    ended = threading.Event()
    store = dist.distributed_c10d._get_default_store().clone()  # a connection of its own, for another thread
    thread = threading.Thread(target=_listen, args=(stop, store, listening, ended), name="signals", daemon=True)
    before = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(before)
        told.close()
        thread.join()
        listening.close()


def was_told(stop: StopRequest, world: World) -> bool:
    """Whether the run has been told to stop. A process that left for that reason may have gone before its word came."""
    deadline = time.monotonic() + (2 * LOOK_EVERY if world.size > 1 else 0.0)
    while not stop.requested() and time.monotonic() < deadline:
        time.sleep(0.05)
    return stop.requested()


def _listen(stop: StopRequest, store: dist.Store, listening: socket.socket, ended: threading.Event) -> None:
    with contextlib.suppress(RuntimeError, ValueError):  # the store ends with the first process; or a stranger wrote
        if stop.signal is not None:
            store.set(KEY, str(int(stop.signal)))
        while not ended.is_set():
            if select.select([listening], [], [], LOOK_EVERY)[0]:
                for number in listening.recv(64):
                    if number in SIGNALS:
                        store.set(KEY, str(number))
            elif stop.signal is None and store.check([KEY]) and (number := int(store.get(KEY))) in SIGNALS:
                stop.hear(number)
