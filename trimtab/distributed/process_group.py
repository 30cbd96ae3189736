"""The processes of a run: how they meet, what they compute together, and how they recover and stop together.

One process is a world of one, without any communication. Which processes hold a model together is a mesh (mesh).
"""

import contextlib
import fcntl
import os
import select
import signal
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.distributed.device import INTERFACES, Device, kind_of, widest
from trimtab.distributed.serialization import Serializer
from trimtab.distributed.supervision import STORE_SOCKET, own_heartbeat, watch_others
from trimtab.errors import UserError
from trimtab.interrupts import SIGNALS, StopRequest

Item = TypeVar("Item")

# Of one message or collective: processes wait for each other as long as a slow reward takes, and supervision finds out
# which of them hangs.
COLLECTIVE_TIMEOUT = timedelta(days=30)
GET_ADDRESS = 0x8915  # SIOCGIFADDR: the address of an interface
ABORT_KEY, STOP_KEY = "trimtab_called_off", "trimtab_stop"  # in the store
SIGNAL_CHECK_SECONDS = 0.5


# ---- what processes compute together


@dataclass(frozen=True)
class Peers:
    """Processes that add up, compare and wait together."""

    rank: int = 0  # of this process among them
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    # torch's group of them. None: the default group, also after it was made anew.
    group: dist.ProcessGroup | None = None

    @property
    def is_rank_zero(self) -> bool:
        """The one process that speaks and writes for all."""
        return self.rank == 0

    def add_up(self, values: dict[str, Tensor]) -> dict[str, float]:
        """The sum of every figure over all of them, in double precision."""
        if not values:
            return {}
        # In main memory, if the device has no double precision.
        wide = [
            (v if widest(v.device) == torch.float64 else v.cpu()).double() for v in map(Tensor.detach, values.values())
        ]
        return dict(zip(values, self.sum(torch.stack([v.reshape(()) for v in wide])).tolist()))

    def sum(self, tensor: Tensor) -> Tensor:
        if self.size > 1:
            tensor = tensor.clone()
            with own_heartbeat.waiting():
                dist.all_reduce(tensor, group=self.group)
        return tensor

    def maximum(self, value: int) -> int:
        if self.size == 1:
            return value
        tensor = torch.tensor(value, device=self.device)
        with own_heartbeat.waiting():
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
            return int(tensor)

    def any(self, holds: bool) -> bool:
        """Whether it holds in one of them."""
        return bool(self.maximum(int(holds)))

    def minimum(self, value: int) -> int:
        return -self.maximum(-value)

    def broadcast_first(self, tensor: Tensor) -> Tensor:
        """The first one's tensor, in all of them."""
        if self.size > 1:
            tensor = tensor.contiguous()
            with own_heartbeat.waiting():
                dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """The plain values of all of them, in rank order, known to all."""
        if self.size == 1:
            return [value]
        serializer = Serializer()
        message = torch.frombuffer(serializer.pack(value), dtype=torch.uint8)
        longest = self.maximum(len(message))
        messages = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        with own_heartbeat.waiting():
            dist.all_gather(messages, torch.nn.functional.pad(message, (0, longest - len(message))), group=self.group)
        return [serializer.unpack(message.numpy()) for message in messages]

    def wait(self) -> None:
        if self.size > 1:
            with own_heartbeat.waiting():
                dist.barrier(group=self.group)


@dataclass(frozen=True)
class World(Peers):
    """All processes of a run."""

    def say(self, line: str) -> None:
        if self.is_rank_zero:
            print(line, flush=True)


def deal(
    items: list[Item], size: int, cost: Callable[[Item], int], split: Callable[[Item], list[Item]]
) -> list[list[Item | None]]:
    """Distribute items so that every process has equally many and about equal cost.

    Costly items are split until their number divides. Where nothing can be split any more, a process gets None: it
    still takes part in the collectives of that turn, with an item that counts for nothing.
    """
    items = list(items)
    while len(items) % size:
        for index in sorted(range(len(items)), key=lambda i: (-cost(items[i]), i)):
            parts = split(items[index])
            if len(parts) > 1:
                items[index : index + 1] = parts
                break
        else:
            break
    padded: list[Item | None] = [*items, *[None] * (-len(items) % size)]
    turns = len(padded) // size
    shares: list[list[Item | None]] = [[] for _ in range(size)]
    load = [0] * size
    for item in sorted(padded, key=lambda x: 0 if x is None else -cost(x)):
        rank = min((r for r in range(size) if len(shares[r]) < turns), key=lambda r: (load[r], r))
        shares[rank].append(item)
        load[rank] += 0 if item is None else cost(item)
    return shares


# ---- how they meet


def find_world(device: Device) -> World:
    """Join the processes that a launcher started, if one did."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        return World(device=device.torch)
    if not dist.is_initialized():
        init_process_group(device.torch, **_launcher_store(size))
        watch_others(dist.distributed_c10d._get_default_store(), dist.get_rank(), size)
    return World(dist.get_rank(), size, device.torch)


def _launcher_store(size: int) -> dict[str, Any]:
    """The store of processes that our launcher started, behind its socket on the loopback interface: torch itself would
    listen on every interface. Other launchers set up their own."""
    if STORE_SOCKET not in os.environ:
        return {}
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    listening = {"is_master": True, "master_listen_fd": int(os.environ[STORE_SOCKET])} if rank == 0 else {}
    store = dist.TCPStore("127.0.0.1", port, size, wait_for_workers=False, **listening)
    return {"store": store, "rank": rank, "world_size": size}


def init_process_group(device: torch.device, **meeting: Any) -> None:
    """Join torch's default group. `meeting`: its store, this process's rank and the size, if the environment does not
    have them."""
    library = collectives_of(device)
    if library is None:
        raise UserError(f"{kind_of(device).name} has no collectives in this torch: start one process")
    # Tensors in main memory are summed there.
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{library}"
    # A device that is bound must be known to every group, also to groups of gloo alone.
    known = device.type != "cpu" and device.type in dist.Backend.backend_capability[dist.Backend.GLOO]
    options = {"device_id": device} if known else {}
    with _noting_sockets():
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, **meeting, **options)


def new_group(ranks: Sequence[int] | None = None, **options: Any) -> dist.ProcessGroup:
    """A group of some processes, made by all of them together."""
    with _noting_sockets():
        return dist.new_group(None if ranks is None else list(ranks), timeout=COLLECTIVE_TIMEOUT, **options)


def join_group_of_one() -> None:
    """Join a group of this process alone, for a library that insists on torch's default group: it would else open a
    port on every interface. Does nothing if there is a group already."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def leave_world() -> None:
    own_heartbeat.left = True
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def collectives_of(device: torch.device) -> str | None:
    """The collectives library of such devices, if there is one."""
    if (known := kind_of(device).collectives) is not None:
        return known
    try:
        return dist.get_default_backend_for_device(device.type)
    except ValueError:
        return None


def use_interface_of(address: str) -> None:
    """Have the sockets between processes use the network interface that has this IPv4 address, unless the environment
    names another."""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            asked = struct.pack("256s", name[:15].encode())
            if socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), GET_ADDRESS, asked)[20:24]) == address:
                for variable in ("GLOO_SOCKET_IFNAME", *INTERFACES):
                    os.environ.setdefault(variable, name)
                return


# ---- aborting collectives
#
# A process that runs out of memory inside a collective leaves the others waiting in it. It writes the reason into the
# store that all share and breaks its connections; the others then fail where they wait, find the reason, and break
# theirs. Afterwards all meet at the same store, as a new default group. torch can abort groups of NCCL; gloo's `abort`
# does nothing, and its connections close only when the last reference to a group has gone. So the sockets are broken:
# torch names none of them, but opens all while a group is made, and what was not there before is noted.

_noted_sockets: set[int] = set()  # inodes: a descriptor's number is used again


@contextlib.contextmanager
def _noting_sockets() -> Iterator[None]:
    """Inside, a group of processes is made."""
    before = _tcp_sockets()
    try:
        yield
    finally:
        _noted_sockets.update(_tcp_sockets().keys() - before.keys())


def abort_collectives(why: str) -> None:
    """Break off the collectives of this world: what the others wait for will not come."""
    if _is_world():
        dist.distributed_c10d._get_default_store().set(ABORT_KEY, why)
        _break_sockets()


def abort_reason() -> str | None:
    """Why another process has aborted this world's collectives, if one has; then this one does the same."""
    if not _is_world():
        return None
    store = dist.distributed_c10d._get_default_store()
    try:
        if not store.check([ABORT_KEY]):
            return None
        why = store.get(ABORT_KEY).decode(errors="replace")
    except RuntimeError:  # the store has gone with its process: not aborted, but broken
        return None
    _break_sockets()
    return why


def reinit_process_group(world: World) -> None:
    """A new default group of the same processes in place of the aborted one. What was made for the old group, a split
    model most of all, cannot be used in the new one."""
    if world.size == 1:
        return
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    with own_heartbeat.waiting():  # another one may be in the middle of a long call
        init_process_group(world.device, store=store, rank=world.rank, world_size=world.size)


def _is_world() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _break_sockets() -> None:
    """Shut down the sockets of all groups, but not those to the store."""
    store_port = int(os.environ.get("MASTER_PORT", 0))
    for inode, descriptor in _tcp_sockets().items():
        if inode in _noted_sockets:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if store_port not in (connection.getsockname()[1], connection.getpeername()[1]):
                    connection.shutdown(socket.SHUT_RDWR)


def _tcp_sockets() -> dict[int, int]:
    """The open TCP sockets of this process: inode, descriptor."""
    found = {}
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):
            # A copy of anything else would stay open, and of a locked file it would take the lock away when closed.
            status = os.fstat(int(name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    found[status.st_ino] = int(name)
    return found


# ---- stopping together
#
# A process inside a collective runs none of its signal handlers, so a thread listens: Python writes the signal's number
# to a socket at once. The thread passes it on in the store that all share, and looks there for what others got.


@contextlib.contextmanager
def share_signals(stop: StopRequest, world: World) -> Iterator[None]:
    """Inside, a signal that reaches one process of the world reaches all of them, whatever they are waiting for."""
    if world.size == 1 or threading.current_thread() is not threading.main_thread():
        yield
        return
    written, listening = socket.socketpair()
    written.setblocking(False)
    ended = threading.Event()
    store = dist.distributed_c10d._get_default_store().clone()  # a connection for another thread
    thread = threading.Thread(target=_pass_signals, args=(stop, store, listening, ended), name="signals", daemon=True)
    before = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(before)
        written.close()
        thread.join()
        listening.close()


def stop_was_requested(stop: StopRequest, world: World) -> bool:
    """Whether the run was told to stop. A process that left for that reason may have gone before its message came."""
    deadline = time.monotonic() + (2 * SIGNAL_CHECK_SECONDS if world.size > 1 else 0.0)
    while not stop.requested() and time.monotonic() < deadline:
        time.sleep(0.05)
    return stop.requested()


def _pass_signals(stop: StopRequest, store: dist.Store, listening: socket.socket, ended: threading.Event) -> None:
    with contextlib.suppress(RuntimeError, ValueError):  # the store ends with the first process; or a stranger wrote
        if stop.signal is not None:
            store.set(STOP_KEY, str(int(stop.signal)))
        while not ended.is_set():
            if select.select([listening], [], [], SIGNAL_CHECK_SECONDS)[0]:
                for number in listening.recv(64):
                    if number in SIGNALS:
                        store.set(STOP_KEY, str(number))
            elif stop.signal is None and store.check([STOP_KEY]) and (number := int(store.get(STOP_KEY))) in SIGNALS:
                stop.hear(number)
