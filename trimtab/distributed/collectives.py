"""Collectives of tensor-parallel and context-parallel groups.

With gradients, for tensors replicated over a group:

    group_copy     forward: identity; backward: sum of the processes' gradients
    group_reduce   forward: sum of the processes' tensors; backward: identity
    group_gather   forward: concatenate the processes' columns; backward: each process's columns of the gradient

All processes compute the same after a `group_reduce`, so their gradients are equal and need no sum.

Without autograd, for tensors of which every process has a shard of the same shape: `gather_shards` and others. If
processes use a gathered tensor differently, each has its own gradient; `reduce_scatter_shards` sums these for the owner
of each shard.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from trimtab.distributed.process_group import Peers

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
    if dist.get_backend(peers.group) == "gloo":  # reduce_scatter: one more copy, or not supported
        parts = parts.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(parts, group=peers.group)
        return parts.chunk(peers.size)[peers.rank].clone()
    _reduce_scatter(own, parts.contiguous(), group=peers.group)
    return own
