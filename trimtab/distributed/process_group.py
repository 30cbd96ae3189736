"""The process group of a run: joining, collectives, aborting and re-initializing it, and sharing stop signals.

One process is a world of one without communication. The processes of one model are a mesh (mesh).
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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from trimtab.distributed.device import (
    INTERFACES,
    Device,
    choose_collectives,
    count_accelerators,
    device_name,
    kind_of,
    processes_per_device,
    widest,
)
from trimtab.distributed.serialization import Serializer
from trimtab.distributed.supervision import DIST_BACKEND, PER_DEVICE, STORE_SOCKET, own_heartbeat, watch_others
from trimtab.errors import UserError
from trimtab.interrupts import SIGNALS, StopRequest

Item = TypeVar("Item")

# Of one message or collective. It is long because processes wait for each other as long as a slow reward takes;
# supervision detects processes that hang.
COLLECTIVE_TIMEOUT = timedelta(days=30)
GET_ADDRESS = 0x8915  # SIOCGIFADDR: get the address of an interface
ABORT_KEY, STOP_KEY, DEVICE_KEY = "trimtab_called_off", "trimtab_stop", "trimtab_device"  # in the store
SIGNAL_CHECK_SECONDS = 0.5


# ---- small collectives


@dataclass(frozen=True)
class Peers:
    """A set of processes with simple collectives."""

    rank: int = 0  # of this process among them
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    # torch's process group; None: the default group, also after it was re-initialized.
    group: dist.ProcessGroup | None = None

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process prints and writes for all."""
        return self.rank == 0

    def add_up(self, values: dict[str, Tensor]) -> dict[str, float]:
        """Sum each figure over the processes, in double precision."""
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
        """Whether `holds` is true in any process."""
        return bool(self.maximum(int(holds)))

    def minimum(self, value: int) -> int:
        return -self.maximum(-value)

    def broadcast_first(self, tensor: Tensor) -> Tensor:
        """Broadcast the first process's tensor."""
        if self.size > 1:
            tensor = tensor.contiguous()
            with own_heartbeat.waiting():
                dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """All-gather plain values, in rank order."""
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


def deal(batches: list[list[Item]], size: int, cost: Callable[[list[Item]], int]) -> list[list[list[Item] | None]]:
    """Distribute micro-batches so that every process has the same number of them and about the same cost.

    The most costly ones are halved until their number is divisible. If none can be halved any more, some processes get
    None: they take part in the collectives of that turn with a batch of weight 0.
    """
    batches = list(batches)
    while len(batches) % size:
        for index in sorted(range(len(batches)), key=lambda i: (-cost(batches[i]), i)):
            if middle := len(batches[index]) // 2:
                batches[index : index + 1] = [batches[index][:middle], batches[index][middle:]]
                break
        else:
            break
    padded: list[list[Item] | None] = [*batches, *[None] * (-len(batches) % size)]
    turns = len(padded) // size
    shares: list[list[list[Item] | None]] = [[] for _ in range(size)]
    load = [0] * size
    for batch in sorted(padded, key=lambda batch: 0 if batch is None else -cost(batch)):
        rank = min((r for r in range(size) if len(shares[r]) < turns), key=lambda r: (load[r], r))
        shares[rank].append(batch)
        load[rank] += 0 if batch is None else cost(batch)
    return shares


# ---- joining the process group


def find_world(device: Device) -> World:
    """Join the processes that a launcher started; without a launcher, a world of one."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        return World(device=device.torch)
    if not dist.is_initialized():
        init_process_group(device.torch, **_launcher_store(size))
        watch_others(dist.distributed_c10d._get_default_store(), dist.get_rank(), size)
    world = World(dist.get_rank(), size, device.torch)
    if device.is_accelerator and dist.get_backend() == "gloo":
        world.say("processes communicate through gloo, in main memory: correct, and slower than one device for each")
    return world


def _launcher_store(size: int) -> dict[str, Any]:
    """The store of processes started by our launcher, on its loopback socket: torch itself would listen on every
    interface. {} under other launchers, which set up their own."""
    if STORE_SOCKET not in os.environ:
        return {}
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    listening = {"is_master": True, "master_listen_fd": int(os.environ[STORE_SOCKET])} if rank == 0 else {}
    store = dist.TCPStore("127.0.0.1", port, size, wait_for_workers=False, **listening)
    return {"store": store, "rank": rank, "world_size": size}


def most_per_device(device: torch.device, store: dist.Store, rank: int, world_size: int) -> int:
    """The largest number of processes on one device, the same in all processes. Where a machine has more processes than
    one sees devices, they compare the devices' names: a launcher may show each process its own device alone."""
    if PER_DEVICE not in os.environ:
        shared = processes_per_device(count_accelerators()) > 1
        store.set(f"{DEVICE_KEY}/{rank}", f"{socket.gethostname()}/{device_name(device)}" if shared else str(rank))
        names = store.multi_get([f"{DEVICE_KEY}/{other}" for other in range(world_size)])
        os.environ[PER_DEVICE] = str(max(Counter(names).values()))
    return int(os.environ[PER_DEVICE])


def init_process_group(device: torch.device, **meeting: Any) -> None:
    """Join torch's default group. `meeting`: store, rank and size, if the environment does not have them."""
    if (own := collectives_of(device)) is None:
        raise UserError(f"{kind_of(device).name} has no collectives in this torch: start one process")
    each = 1
    if device.type != "cpu":
        meeting = meeting or dict(zip(("store", "rank", "world_size"), next(dist.rendezvous("env://"))))
        each = most_per_device(device, **meeting)
    library = choose_collectives(device.type, own, os.environ.get(DIST_BACKEND, "auto"), each)
    # gloo for tensors in main memory.
    backend = "gloo" if library == "gloo" else f"cpu:gloo,{device.type}:{library}"
    # A bound device must be supported by every group, also by groups of gloo alone.
    known = library != "gloo" and device.type in dist.Backend.backend_capability[dist.Backend.GLOO]
    options = {"device_id": device} if known else {}
    with _recording_sockets():
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, **meeting, **options)


def new_group(ranks: Sequence[int] | None = None, **options: Any) -> dist.ProcessGroup:
    """A process group of `ranks`, created collectively by all processes."""
    with _recording_sockets():
        return dist.new_group(None if ranks is None else list(ranks), timeout=COLLECTIVE_TIMEOUT, **options)


def join_group_of_one() -> None:
    """Create a default group of this process alone, for a library that needs one: it would open a port on every
    interface otherwise. Does nothing if there is a group already."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def leave_world() -> None:
    own_heartbeat.left = True
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def collectives_of(device: torch.device) -> str | None:
    """The collectives backend of the device, if any."""
    if (known := kind_of(device).collectives) is not None:
        return known
    try:
        return dist.get_default_backend_for_device(device.type)
    except ValueError:
        return None


def use_interface_of(address: str) -> None:
    """Make collectives use the network interface with this IPv4 address, unless the environment names another."""
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
# shared store and shuts down its sockets; the others then fail where they wait, read the reason, and shut down theirs.
# Afterwards all create a new default group at the same store. torch can abort NCCL groups; gloo's `abort` does nothing,
# and its connections close only with the last reference to a group. So the sockets themselves are shut down: torch does
# not list them, but opens all of them while a group is created, so those that appear then are recorded.

_group_sockets: set[int] = set()  # inodes, since descriptors are reused


@contextlib.contextmanager
def _recording_sockets() -> Iterator[None]:
    """Record the sockets that are opened inside, while a process group is created."""
    before = _tcp_sockets()
    try:
        yield
    finally:
        _group_sockets.update(_tcp_sockets().keys() - before.keys())


def abort_collectives(why: str) -> None:
    """Abort the collectives of this world in all processes, with a reason."""
    if is_world():
        dist.distributed_c10d._get_default_store().set(ABORT_KEY, why)
        _break_sockets()


def abort_reason() -> str | None:
    """The reason if a process has aborted this world's collectives, else None. If so, this process aborts them too."""
    if not is_world():
        return None
    store = dist.distributed_c10d._get_default_store()
    try:
        if not store.check([ABORT_KEY]):
            return None
        why = store.get(ABORT_KEY).decode(errors="replace")
    except RuntimeError:  # the store's process is gone: a crash, not an abort
        return None
    _break_sockets()
    return why


def reinit_process_group(world: World) -> None:
    """Replace the aborted default group by a new one of the same processes. Objects made for the old group, sharded
    models above all, cannot be used with the new one."""
    if world.size == 1:
        return
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    with own_heartbeat.waiting():  # another process may be inside a long call
        init_process_group(world.device, store=store, rank=world.rank, world_size=world.size)


def is_world() -> bool:
    """Whether this process is one of several."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _break_sockets() -> None:
    """Shut down the sockets of all process groups except those to the store."""
    store_port = int(os.environ.get("MASTER_PORT", 0))
    for inode, descriptor in _tcp_sockets().items():
        if inode in _group_sockets:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if store_port not in (connection.getsockname()[1], connection.getpeername()[1]):
                    connection.shutdown(socket.SHUT_RDWR)


def _tcp_sockets() -> dict[int, int]:
    """The open TCP sockets of this process: inode -> descriptor."""
    found = {}
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):
            # Check first, since closing the duplicate of a locked file's descriptor would release its lock.
            status = os.fstat(int(name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    found[status.st_ino] = int(name)
    return found


# ---- stopping together
#
# A process inside a collective runs no Python signal handlers, so a thread does it: Python writes the signal's number
# to a socket at once. The thread writes it to the shared store, and polls the store for signals that others received.


@contextlib.contextmanager
def share_signals(stop: StopRequest, world: World) -> Iterator[None]:
    """Forward a stop signal that one process of the world receives to all of them, even inside collectives."""
    if world.size == 1 or threading.current_thread() is not threading.main_thread():
        yield
        return
    written, listening = socket.socketpair()
    written.setblocking(False)
    ended = threading.Event()
    store = dist.distributed_c10d._get_default_store().clone()  # a separate connection for the thread
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
    """Whether a stop was requested. Waits briefly: a process that exits for that reason may be gone before its message
    arrives."""
    deadline = time.monotonic() + (2 * SIGNAL_CHECK_SECONDS if world.size > 1 else 0.0)
    while not stop.requested() and time.monotonic() < deadline:
        time.sleep(0.05)
    return stop.requested()


def _pass_signals(stop: StopRequest, store: dist.Store, listening: socket.socket, ended: threading.Event) -> None:
    with contextlib.suppress(RuntimeError, ValueError):  # the store ends with rank 0; or a stranger wrote to it
        if stop.signal is not None:
            store.set(STOP_KEY, str(int(stop.signal)))
        while not ended.is_set():
            if select.select([listening], [], [], SIGNAL_CHECK_SECONDS)[0]:
                for number in listening.recv(64):
                    if number in SIGNALS:
                        store.set(STOP_KEY, str(number))
            elif stop.signal is None and store.check([STOP_KEY]) and (number := int(store.get(STOP_KEY))) in SIGNALS:
                stop.hear(number)


# ---- collectives of tensor-parallel and context-parallel groups
#
# With gradients, for tensors replicated over a group:
#
#     group_copy     forward: identity; backward: sum of the processes' gradients
#     group_reduce   forward: sum of the processes' tensors; backward: identity
#     group_gather   forward: concatenate the processes' columns; backward: each process's columns of the gradient
#
# All processes compute the same after a `group_reduce`, so their gradients are equal and need no sum.
#
# Without autograd, for tensors of which every process has a shard of the same shape: `gather_shards` and others. If
# processes use a gathered tensor differently, each has its own gradient; `reduce_scatter_shards` sums these for the
# owner of each shard.

# The second name of each is for torch before 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_copy(tensor: Tensor, group: ProcessGroup) -> Tensor:
    return _GroupCopy.apply(tensor, group)


def group_reduce(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    return _GroupReduce.apply(tensor, group)


def group_gather(tensor: Tensor, group: ProcessGroup, widths: list[int]) -> Tensor:
    """`widths`: the columns of every process, in rank order."""
    return _GroupGather.apply(tensor, group, widths)


def all_gather(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """[processes, ...] of tensors of one shape, without gradients."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.stack(parts)


def all_reduce(tensor: Tensor, group: ProcessGroup | None) -> None:
    """Add up over the processes, in place and without gradients."""
    dist.all_reduce(tensor, group=group)


def _sum(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    all_reduce(total, group)
    return total


class _GroupCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.group), None


class _GroupReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        return _sum(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _GroupGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, widths: list[int]) -> Tensor:
        ctx.widths, ctx.rank = widths, dist.get_rank(group)
        widest = torch.nn.functional.pad(tensor, (0, max(widths) - tensor.shape[-1]))  # all_gather needs equal shapes
        return torch.cat([part[..., :width] for part, width in zip(all_gather(widest, group), widths)], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.split(ctx.widths, -1)[ctx.rank].contiguous(), None, None


def gather_shards(shard: Tensor, peers: Peers) -> Tensor:
    """[processes * n, ...] from [n, ...] of each, in rank order."""
    return start_gather_shards(shard, peers)()


def start_gather_shards(shard: Tensor, peers: Peers) -> Callable[[], Tensor]:
    """Start `gather_shards` in the background; the returned function waits for the result."""
    shard = shard.contiguous()
    gathered = shard.new_empty(peers.size * shard.shape[0], *shard.shape[1:])
    if shard.is_meta:  # of a fake model
        return lambda: gathered
    work = _all_gather(gathered, shard, group=peers.group, async_op=True)

    def result() -> Tensor:
        work.wait()
        return gathered

    return result


def reduce_scatter_shards(parts: Tensor, peers: Peers) -> Tensor:
    """This process's shard [n, ...] of the sum of all processes' [processes * n, ...]."""
    own = parts.new_empty(parts.shape[0] // peers.size, *parts.shape[1:])
    if parts.is_meta:
        return own
    if (
        parts.device.type == "cpu" or dist.get_backend(peers.group) == "gloo"
    ):  # reduce_scatter: one more copy, or not supported
        parts = parts.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(parts, group=peers.group)
        return parts.chunk(peers.size)[peers.rank].clone()
    _reduce_scatter(own, parts.contiguous(), group=peers.group)
    return own
