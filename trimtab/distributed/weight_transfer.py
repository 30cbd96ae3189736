"""Links: a way for tensors from one process to others that are not of its world, such as rollout engines.

A link has a store of its own, on the sender, bound to the address of its node, and a group that is not torch's default
one. Tensors travel in buckets; their names, types and shapes are told once, in the plan.

    gloo     through main memory
    nccl     between accelerators, or what else their library is called (devices.py)
    shared   between processes on one accelerator: both see the sender's bucket (CUDA IPC), gloo says when

A *plan* is a list of links, the same for all that take part, in plain values: the `store` of each, its `way`, the
`seats` of its receivers in the order of their ranks, the `tensors` and whatever else is to be known `about` them. Who
plans knows the offers of the senders and the seats of the receivers (`plan_links`).
"""

import contextlib
import json
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.distributed.device import device_name, kind_of
from trimtab.distributed.process_group import collectives_of, use_interface_of
from trimtab.distributed.supervision import pulse

NODE_ADDRESS = "TRIMTAB_NODE_ADDRESS"
"""Environment variable: this machine's address among those of a cluster."""
GLOO, SHARED = "gloo", "shared"
IN_MAIN_MEMORY = (GLOO, SHARED)  # what is said besides tensors
LOOPBACK = "127.0.0.1"
TransferPlan = list[dict[str, Any]]


def node_address() -> str:
    return os.environ.get(NODE_ADDRESS, LOOPBACK)


def describe_receiver(device: torch.device) -> dict[str, Any]:
    """Who a receiver is, for plans."""
    return {"seat": f"{node_address()}/{os.getpid()}", "device": _device_name(device)}


class TransferOffer:
    """A sender's open door: a port on its node's address, on which a store will listen."""

    def __init__(self, device: torch.device):
        address = node_address()
        self.socket = socket.create_server((address, 0))
        self.store = [address, self.socket.getsockname()[1]]
        self.device = device

    def described(self) -> dict[str, Any]:
        return {
            "store": self.store,
            "device": _device_name(self.device),
            "library": collectives_of(self.device) or GLOO,
            "shares": kind_of(self.device).shared_memory,
        }

    def accept(self, plan: TransferPlan) -> "TransferChannel | None":
        """The link of the plan that begins here; None: there is none."""
        entry = next((entry for entry in plan if entry["store"] == self.store), None)
        if entry is None:
            self.socket.close()
            return None
        return TransferChannel(entry, 0, self.device, listening=self.socket.detach())


def join_as_receiver(plan: TransferPlan, device: torch.device) -> "TransferChannel":
    own = describe_receiver(device)["seat"]
    entry = next(entry for entry in plan if own in entry["seats"])
    return TransferChannel(entry, entry["seats"].index(own) + 1, device)


def plan_transfer(
    offers: Sequence[dict[str, Any]],
    seats: Sequence[dict[str, Any]],
    *,
    backend: str,
    tensors: list[Any],
    about: dict[str, Any],
    patience: float,
) -> TransferPlan:
    """Who sends to whom: a receiver on a sender's own accelerator shares its memory, all others hear the first one."""
    sharing: dict[int, list[str]] = {}
    others: list[str] = []
    for found in seats:
        near = [i for i, offer in enumerate(offers) if found["device"] and offer["device"] == found["device"]]
        if near and not offers[near[0]]["shares"]:
            near, backend = [], GLOO  # between devices, which a library wants to be different ones
        (sharing.setdefault(near[0], []) if near else others).append(found["seat"])
    common = {"tensors": tensors, "about": about, "patience": patience}
    plan = [{"store": offers[i]["store"], "way": SHARED, "seats": near, **common} for i, near in sharing.items()]
    if others and 0 in sharing:
        # The first sender has one door, and it is taken: all hear it through main memory.
        plan[list(sharing).index(0)] |= {"way": GLOO, "seats": [*sharing[0], *others]}
    elif others:
        plan.append({"store": offers[0]["store"], "way": backend, "seats": others, **common})
    return plan


class TransferChannel:
    def __init__(self, entry: dict[str, Any], rank: int, device: torch.device, listening: int | None = None):
        """`rank`: 0 is the sender, whose store listens on the socket `listening`."""
        self.way, self.rank, self.about = entry["way"], rank, entry["about"]
        self.device = torch.device("cpu") if self.way == GLOO else device
        self.tensors = [(name, dtype, tuple(shape)) for name, dtype, shape in entry["tensors"]]
        self.parts = plan_buckets(self.tensors)
        size, patience = len(entry["seats"]) + 1, timedelta(seconds=entry["patience"])
        address, port = entry["store"]
        server = {} if listening is None else {"is_master": True, "master_listen_fd": listening}
        with pulse.waiting():
            self.store = dist.TCPStore(address, port, size, timeout=patience, wait_for_workers=False, **server)
            self.group = _group(self.way, self.store, rank, size, patience, address)
            self._barrier()
        self._shared = _shared_bucket(self.store, rank, self.device, self.parts) if self.way == SHARED else None

    # ---- buckets

    def send(self, bucket: Tensor) -> None:
        """One bucket; `packed` makes them."""
        with pulse.waiting():
            if self._shared is None:
                self.group.broadcast(bucket, 0).wait()
                return
            self._shared[: len(bucket)].copy_(bucket)
            torch.accelerator.synchronize()
            self._barrier()  # it is there
            self._barrier()  # it was taken

    @contextlib.contextmanager
    def receiving(self) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Everything that is sent, by name. What did not come are zeros, and the end of the block raises: whoever takes
        tensors in then gets through all of them, and can begin anew."""
        failures: list[RuntimeError] = []
        yield self._received(failures)
        if failures:
            raise failures[0]

    def _received(self, failures: list[RuntimeError]) -> Iterator[tuple[str, Tensor]]:
        for part in self.parts:
            bucket = torch.zeros(part.size, dtype=torch.uint8, device=self.device)
            if not failures:
                try:
                    self._receive(bucket)
                except RuntimeError as error:
                    failures.append(error)
                    bucket.zero_()
            yield from unpack_bucket(bucket, part)

    def _receive(self, bucket: Tensor) -> None:
        with pulse.waiting():
            if self._shared is None:
                self.group.broadcast(bucket, 0).wait()
                return
            self._barrier()
            bucket.copy_(self._shared[: len(bucket)])
            torch.accelerator.synchronize()
            self._barrier()

    def close(self) -> None:
        self._shared = None
        self.group.shutdown()
        del self.group  # only now does gloo close its connections, which whoever waits at the other end must see

    def _barrier(self) -> None:
        options = dist.BarrierOptions()
        if self.way not in IN_MAIN_MEMORY:  # left to itself it takes a device by its own rank
            index = self.device.index
            options.device_ids = [torch.accelerator.current_device_index() if index is None else index]
        self.group.barrier(options).wait()


class TransferSender:
    """What a process sends over. Of a split model every process must send, one without a link too: it gathers with the
    others."""

    def __init__(self, device: torch.device):
        self.device = device
        self._offer: TransferOffer | None = None
        self._link: TransferChannel | None = None

    def offer(self) -> dict[str, Any]:
        self.close()
        self._offer = TransferOffer(self.device)
        return self._offer.described()

    def open(self, plan: TransferPlan) -> None:
        assert self._offer is not None, "nothing was offered"
        offer, self._offer = self._offer, None
        self._link = offer.accept(plan)

    def send(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Where a receiver is gone nothing more is sent, but the others that gather are not left alone: it raises at
        the end."""
        if self._link is None:
            for _ in tensors:
                pulse.move()
            return
        failure: RuntimeError | None = None
        for bucket in pack_buckets(tensors, self._link.parts, self._link.device):
            if self._link is None:
                pulse.move()
                continue
            try:
                self._link.send(bucket)
            except RuntimeError as error:
                failure = error
                self._link.close()  # so that the other receivers wait no longer
                self._link = None
        if failure is not None:
            raise failure

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._offer is not None:
            self._offer.socket.close()
            self._offer = None


def _group(way: str, store: dist.Store, rank: int, size: int, patience: timedelta, address: str) -> Any:
    if way not in IN_MAIN_MEMORY:
        if NODE_ADDRESS in os.environ:
            use_interface_of(node_address())
        return _group_of_devices(way, store, rank, size, patience)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = patience
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_address_towards(address))]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _group_of_devices(library: str, store: dist.Store, rank: int, size: int, patience: timedelta) -> Any:
    """A group outside torch's own list of them: of a library that torch has, or that another package has brought."""
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


def _address_towards(other: str) -> str:
    """This machine's own address on the way to another: what to listen on, instead of on every interface."""
    with socket.socket(socket.AF_INET6 if ":" in other else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # nothing is sent
        return probe.getsockname()[0]


def _device_name(device: torch.device) -> str | None:
    """Of an accelerator, a name that all processes of the cluster give it."""
    name = device_name(device)
    return None if name is None else f"{node_address()}/{name}"


def _shared_bucket(store: dist.Store, rank: int, device: torch.device, plan: Sequence[Any]) -> Tensor:
    """The sender's bucket, seen by all on its accelerator."""
    size = max([BUCKET_BYTES, *(part.size for part in plan)])
    if rank == 0:
        bucket = torch.empty(size, dtype=torch.uint8, device=device)
        told = [v.hex() if isinstance(v, bytes) else v for v in bucket.untyped_storage()._share_cuda_()]
        store.set("bucket", json.dumps([bucket.storage_offset(), told]))
        return bucket
    offset, told = json.loads(store.get("bucket"))
    _, handle, *rest = told  # the device has another number here
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index or 0, *(bytes.fromhex(v) if isinstance(v, str) else v for v in (handle, *rest))
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, offset, (size,))


# ---- Tensors packed into buckets of bytes: a few large messages instead of one a tensor.


BUCKET_BYTES = 64 * 2**20  # bytes
ALIGNMENT = 16
TensorSpec = tuple[str, str, tuple[int, ...]]  # name, type, shape


@dataclass(frozen=True)
class BucketEntry:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # in the bucket

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """What travels in one bucket."""

    pieces: tuple[BucketEntry, ...]

    @property
    def size(self) -> int:
        return self.pieces[-1].start + _aligned(self.pieces[-1].bytes)


def tensor_specs(tensors: Iterable[tuple[str, Tensor]]) -> list[TensorSpec]:
    return [(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors]


def plan_buckets(tensors: Sequence[TensorSpec], bucket: int = BUCKET_BYTES) -> list[Bucket]:
    """In their order; a tensor larger than a bucket travels alone."""
    found: list[list[BucketEntry]] = []
    end = 0
    for name, dtype, shape in tensors:
        piece = BucketEntry(name, getattr(torch, dtype), shape, end)
        if not found or end + piece.bytes > bucket:
            found.append([])
            piece = BucketEntry(name, piece.dtype, shape, 0)
        found[-1].append(piece)
        end = piece.start + _aligned(piece.bytes)
    return [Bucket(tuple(pieces)) for pieces in found]


def pack_buckets(
    tensors: Iterable[tuple[str, Tensor]], buckets: Sequence[Bucket], device: torch.device
) -> Iterator[Tensor]:
    """The buckets of tensors that come in the order of the parts, one at a time."""
    coming = iter(tensors)
    for part in buckets:
        bucket = torch.empty(part.size, dtype=torch.uint8, device=device)
        for piece in part.pieces:
            name, tensor = next(coming)
            assert (name, tensor.dtype, tuple(tensor.shape)) == (piece.name, piece.dtype, piece.shape), name
            bucket[piece.start : piece.start + piece.bytes].view(piece.dtype).copy_(tensor.detach().reshape(-1))
        yield bucket
    assert next(coming, None) is None, "more tensors than were described"


def unpack_bucket(bucket: Tensor, part: Bucket) -> Iterator[tuple[str, Tensor]]:
    for piece in part.pieces:
        yield piece.name, bucket[piece.start : piece.start + piece.bytes].view(piece.dtype).view(piece.shape)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
