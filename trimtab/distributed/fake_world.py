"""A world of which this process plays one rank: collectives return at once, and their bytes are counted.

Every other rank is taken to say what this one says: a gather returns copies of this process's tensor, a sum is this
process's own. So control flow goes on, shapes and allocations are those of the real run, and values are meaningless.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.futures import Future

from trimtab.distributed.device import Device
from trimtab.distributed.process_group import World

BACKEND = "rehearsal"


class Traffic(NamedTuple):
    """A kind of collective in one group of processes."""

    collective: str
    processes: int
    stride: int
    """Distance of neighbouring ranks."""


traffic: Counter[Traffic] = Counter()
"""Bytes so far: of the whole gathered, scattered or summed tensor."""


class FakeGroup(dist.ProcessGroup):
    """A process group without communication. Some methods have two names, the second for torch before 2.13."""

    def __init__(self, rank: int, size: int, ranks: list[int]):
        super().__init__(rank, size)
        self._rank, self._size, self._name = rank, size, ""
        self._stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def _done(self, collective: str, sent: Tensor | list[Tensor]) -> Any:
        tensors = [sent] if isinstance(sent, Tensor) else sent
        # Counts and flags of the host are not worth a line.
        if (size := sum(tensor.nbytes for tensor in tensors)) > 4096:
            traffic[Traffic(collective, self._size, self._stride)] += size
        future: Future = Future()
        future.set_result(None)
        return _create_work_from_future(future)

    def allreduce(self, tensors: list[Tensor], *_: Any, **__: Any) -> Any:
        if tensors[0].device.type == "cpu":
            copied = [tensor.clone() for tensor in tensors]  # gloo works on a copy
            del copied
        return self._done("all-reduce", tensors)

    def broadcast(self, tensors: list[Tensor], *_: Any, **__: Any) -> Any:
        return self._done("broadcast", tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *_: Any, **__: Any) -> Any:
        for parts, own in zip(outputs, inputs):
            for part in parts:
                part.copy_(own)
        return self._done("all-gather", [part for parts in outputs for part in parts])

    def all_gather_single(self, output: Tensor, own: Tensor, *_: Any, **__: Any) -> Any:
        output.view(self._size, -1).copy_(own.reshape(1, -1).expand(self._size, -1))
        return self._done("all-gather", output)

    def reduce_scatter_single(self, output: Tensor, parts: Tensor, *_: Any, **__: Any) -> Any:
        output.view(-1).copy_(parts.reshape(self._size, -1)[self._rank])
        return self._done("reduce-scatter", parts)

    def all_to_all_single(self, output: Tensor, own: Tensor, *_: Any, **__: Any) -> Any:
        count = min(output.numel(), own.numel())
        output.view(-1)[:count].copy_(own.reshape(-1)[:count])
        return self._done("all-to-all", own)

    def allreduce_coalesced(self, tensors: list[Tensor], *_: Any, **__: Any) -> Any:
        return self._done("all-reduce", tensors)

    def all_gather_single_coalesced(self, outputs: list[Tensor], owned: list[Tensor], *_: Any, **__: Any) -> Any:
        return [self.all_gather_single(output, own) for output, own in zip(outputs, owned)][-1]

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], *_: Any, **__: Any) -> Any:
        return [self.reduce_scatter_single(output, parts) for output, parts in zip(outputs, inputs)][-1]

    def barrier(self, *_: Any, **__: Any) -> Any:
        return self._done("barrier", [])

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


class FakeWorld(World):
    """All processes of a run that this one plays a rank of; its lines are of no interest."""

    def say(self, line: str) -> None:
        pass


def _create(common: Any, _: Any) -> FakeGroup:
    return FakeGroup(common.group_rank, common.group_size, list(common.global_ranks_in_group))


@contextlib.contextmanager
def fake_world(device: Device, rank: int, size: int) -> Iterator[FakeWorld]:
    """The world of `size` processes of which this one plays `rank`."""
    if size == 1:
        yield FakeWorld(device=device.torch)
        return
    if BACKEND.upper() not in dist.Backend._plugins:
        devices = sorted({"cpu", device.torch.type})
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=devices)
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=size)
    traffic.clear()
    try:
        yield FakeWorld(rank, size, device.torch)
    finally:
        dist.destroy_process_group()
        # DTensor remembers meshes by their ranks alone, whose groups are gone.
        _clear_sharding_prop_cache()
