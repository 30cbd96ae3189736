"""Weight transfer from a process to others outside its world, such as rollout engines.

A channel has its own store on the sender, bound to its node's address, and its own process group. Tensors are sent in
buckets; their names, dtypes and shapes are sent once, in the plan.

    gloo     through main memory
    nccl     between accelerators (or the device's own backend)
    shared   between processes on one accelerator: receivers read the sender's bucket (CUDA IPC), gloo synchronizes

A *plan* is a list of channels as plain values, the same for all processes: the `store` of each channel, its `way` (one
of the above), the `seats` (names) of its receivers by rank, the `tensors`, and further facts `about` them.
`plan_transfer` makes it from the senders' offers and the receivers' descriptions.
"""

import contextlib
import json
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.distributed.device import device_name, kind_of
from trimtab.distributed.process_group import collectives_of, use_interface_of
from trimtab.distributed.supervision import own_heartbeat

NODE_ADDRESS = "TRIMTAB_NODE_ADDRESS"
"""Environment variable: this machine's address in the cluster."""
GLOO, SHARED = "gloo", "shared"
IN_MAIN_MEMORY = (GLOO, SHARED)  # barriers use gloo
BUCKET_BYTES = 64 * 2**20
ALIGNMENT = 16
TransferPlan = list[dict[str, Any]]
TensorSpec = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


# ---- buckets: a few large messages instead of one per tensor


class BucketEntry(NamedTuple):
    """A tensor's place in a bucket of bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        return self.start + torch.Size(self.shape).numel() * self.dtype.itemsize


Bucket = list[BucketEntry]


def tensor_specs(tensors: Iterable[tuple[str, Tensor]]) -> list[TensorSpec]:
    return [(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors]


def plan_buckets(tensors: Sequence[TensorSpec], bucket: int = BUCKET_BYTES) -> list[Bucket]:
    """Buckets of at most `bucket` bytes, in order; a larger tensor gets its own."""
    buckets: list[Bucket] = []
    for name, dtype, shape in tensors:
        entry = BucketEntry(name, getattr(torch, dtype), shape, _size(buckets[-1]) if buckets else 0)
        if not buckets or entry.end > bucket:
            entry = entry._replace(start=0)
            buckets.append([])
        buckets[-1].append(entry)
    return buckets


def _size(bucket: Bucket) -> int:
    return -(-bucket[-1].end // ALIGNMENT) * ALIGNMENT


def pack_buckets(
    tensors: Iterable[tuple[str, Tensor]], buckets: Sequence[Bucket], device: torch.device
) -> Iterator[Tensor]:
    """Copy tensors, given in the order of the buckets, into one bucket after another."""
    coming = iter(tensors)
    for bucket in buckets:
        packed = torch.empty(_size(bucket), dtype=torch.uint8, device=device)
        for entry in bucket:
            name, tensor = next(coming)
            assert (name, tensor.dtype, tuple(tensor.shape)) == entry[:3], name
            packed[entry.start : entry.end].view(entry.dtype).copy_(tensor.detach().reshape(-1))
        yield packed
    assert next(coming, None) is None, "more tensors than were described"


def unpack_bucket(packed: Tensor, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    for entry in bucket:
        yield entry.name, packed[entry.start : entry.end].view(entry.dtype).view(entry.shape)


# ---- plans


def node_address() -> str:
    return os.environ.get(NODE_ADDRESS, "127.0.0.1")


def _device_name(device: torch.device) -> str | None:
    """A name of the accelerator that is the same in all processes of the cluster; None for a CPU."""
    name = device_name(device)
    return None if name is None else f"{node_address()}/{name}"


def describe_receiver(device: torch.device) -> dict[str, Any]:
    """The description of this process as a receiver, for a plan."""
    return {"seat": f"{node_address()}/{os.getpid()}", "device": _device_name(device)}


def plan_transfer(
    offers: Sequence[dict[str, Any]],
    seats: Sequence[dict[str, Any]],
    *,
    backend: str,
    tensors: list[Any],
    about: dict[str, Any],
    patience: float,
) -> TransferPlan:
    """Make a plan: a receiver on a sender's accelerator shares its memory, all others receive from the first sender."""
    sharing: dict[int, list[str]] = {}
    others: list[str] = []
    for found in seats:
        near = [i for i, offer in enumerate(offers) if found["device"] and offer["device"] == found["device"]]
        if near and not offers[near[0]]["shares"]:
            near, backend = [], GLOO  # NCCL needs different devices
        (sharing.setdefault(near[0], []) if near else others).append(found["seat"])
    common = {"tensors": tensors, "about": about, "patience": patience}
    plan = [{"store": offers[i]["store"], "way": SHARED, "seats": near, **common} for i, near in sharing.items()]
    if others and 0 in sharing:
        # The first sender has one store, which is in use already: all its receivers get weights through main memory.
        plan[list(sharing).index(0)] |= {"way": GLOO, "seats": [*sharing[0], *others]}
    elif others:
        plan.append({"store": offers[0]["store"], "way": backend, "seats": others, **common})
    return plan


# ---- channels


class TransferChannel:
    """The process group of one sender and its receivers."""

    def __init__(self, entry: dict[str, Any], rank: int, device: torch.device, listening: int | None = None):
        """`rank`: 0 is the sender, whose store listens on the descriptor `listening`."""
        self.way, self.rank, self.about = entry["way"], rank, entry["about"]
        self.device = torch.device("cpu") if self.way == GLOO else device
        self.tensors = [(name, dtype, tuple(shape)) for name, dtype, shape in entry["tensors"]]
        self.buckets = plan_buckets(self.tensors)
        size, patience = len(entry["seats"]) + 1, timedelta(seconds=entry["patience"])
        address, port = entry["store"]
        server = {} if listening is None else {"is_master": True, "master_listen_fd": listening}
        with own_heartbeat.waiting():
            self.store = dist.TCPStore(address, port, size, timeout=patience, wait_for_workers=False, **server)
            if self.way in IN_MAIN_MEMORY:
                self.group = _gloo_group(self.store, rank, size, patience, address)
            else:
                self.group = _device_group(self.way, self.store, rank, size, patience)
            self._barrier()
        self._shared = _shared_bucket(self.store, rank, self.device, self.buckets) if self.way == SHARED else None

    def transfer(self, packed: Tensor) -> None:
        """Send one bucket of `pack_buckets`, or receive it into `packed`."""
        with own_heartbeat.waiting():
            if self._shared is None:
                self.group.broadcast(packed, 0).wait()
                return
            shared = self._shared[: len(packed)]
            if self.rank == 0:
                shared.copy_(packed)
                torch.accelerator.synchronize()
                self._barrier()  # the bucket is complete
            else:
                self._barrier()
                packed.copy_(shared)
                torch.accelerator.synchronize()
            self._barrier()  # all receivers have copied it

    @contextlib.contextmanager
    def receiving(self) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Yield an iterator over all tensors that are sent. After a failure the remaining tensors are zeros, and the
        end of the context raises: the model's loader can finish, so that a later sync can load again."""
        failures: list[RuntimeError] = []
        yield self._received(failures)
        if failures:
            raise failures[0]

    def _received(self, failures: list[RuntimeError]) -> Iterator[tuple[str, Tensor]]:
        for bucket in self.buckets:
            packed = torch.zeros(_size(bucket), dtype=torch.uint8, device=self.device)
            if not failures:
                try:
                    self.transfer(packed)
                except RuntimeError as error:
                    failures.append(error)
                    packed.zero_()
            yield from unpack_bucket(packed, bucket)

    def close(self) -> None:
        self._shared = None
        self.group.shutdown()
        del self.group  # gloo closes its connections only now, which ends the wait of receivers

    def _barrier(self) -> None:
        options = dist.BarrierOptions()
        if self.way not in IN_MAIN_MEMORY:  # by default the backend chooses a device by rank
            index = self.device.index
            options.device_ids = [torch.accelerator.current_device_index() if index is None else index]
        self.group.barrier(options).wait()


def join_as_receiver(plan: TransferPlan, device: torch.device) -> TransferChannel:
    own = describe_receiver(device)["seat"]
    entry = next(entry for entry in plan if own in entry["seats"])
    return TransferChannel(entry, entry["seats"].index(own) + 1, device)


class TransferSender:
    """The sending side in one process. All processes of a sharded model must call `send`, also those without a channel,
    because they take part in gathering."""

    def __init__(self, device: torch.device):
        self.device = device
        self._socket: socket.socket | None = None  # for the store of a channel, on the node's address
        self._channel: TransferChannel | None = None

    def offer(self) -> dict[str, Any]:
        """An offer for a plan: the address of a store on this process, and facts on its device."""
        self.close()
        self._socket = socket.create_server((node_address(), 0))
        return {
            "store": [node_address(), self._socket.getsockname()[1]],
            "device": _device_name(self.device),
            "library": collectives_of(self.device) or GLOO,
            "shares": kind_of(self.device).shared_memory,
        }

    def open(self, plan: TransferPlan) -> None:
        """Open the channel of the plan whose sender is this process, if any."""
        assert self._socket is not None, "nothing was offered"
        store = [node_address(), self._socket.getsockname()[1]]
        entry = next((entry for entry in plan if entry["store"] == store), None)
        if entry is None:
            self.close()
            return
        listening, self._socket = self._socket.detach(), None
        self._channel = TransferChannel(entry, 0, self.device, listening)

    def send(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Send all tensors. If a receiver is lost, sending stops but gathering continues, since other processes take
        part in it; the error is raised at the end."""
        if self._channel is None:
            for _ in tensors:
                own_heartbeat.move()
            return
        failure: RuntimeError | None = None
        for packed in pack_buckets(tensors, self._channel.buckets, self._channel.device):
            if self._channel is None:
                own_heartbeat.move()
                continue
            try:
                self._channel.transfer(packed)
            except RuntimeError as error:
                failure = error
                self.close()  # ends the wait of the other receivers
        if failure is not None:
            raise failure

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _gloo_group(store: dist.Store, rank: int, size: int, patience: timedelta, address: str) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = patience
    # Bind to the local address of the route to the store: gloo would listen on every interface otherwise.
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # nothing is sent
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=probe.getsockname()[0])]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _device_group(library: str, store: dist.Store, rank: int, size: int, patience: timedelta) -> Any:
    """A process group outside torch's registry, of a backend built into torch or added by another package."""
    if NODE_ADDRESS in os.environ:
        use_interface_of(node_address())
    if (own := getattr(dist, f"ProcessGroup{library.upper()}", None)) is not None:
        options = own.Options()
        options._timeout = patience
        return own(store, rank, size, options)
    brought = dist.Backend._plugins[library.upper()]
    if not brought.extended_api:
        return brought.creator_fn(store, rank, size, patience)
    about = dist.distributed_c10d._DistributedBackendOptions()
    about.store, about.timeout, about.group_id = store, patience, "link"
    about.group_rank, about.group_size, about.global_ranks_in_group = rank, size, list(range(size))
    return brought.creator_fn(about, None)


def _shared_bucket(store: dist.Store, rank: int, device: torch.device, buckets: Sequence[Bucket]) -> Tensor:
    """The sender's bucket, mapped into all processes on its accelerator."""
    size = max([BUCKET_BYTES, *map(_size, buckets)])
    if rank == 0:
        bucket = torch.empty(size, dtype=torch.uint8, device=device)
        shared = [v.hex() if isinstance(v, bytes) else v for v in bucket.untyped_storage()._share_cuda_()]
        store.set("bucket", json.dumps([bucket.storage_offset(), shared]))
        return bucket
    offset, shared = json.loads(store.get("bucket"))
    _, handle, *rest = shared  # the device may have another index here
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index or 0, *(bytes.fromhex(v) if isinstance(v, str) else v for v in (handle, *rest))
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, offset, (size,))
