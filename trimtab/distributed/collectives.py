"""What processes have alike, worked on in branches: each process does a part, and the parts are put together.

    branch    from what all have to a branch of each; gradients of the branches are added up
    join      the sum of the branches, which all then have; the gradient of it is the gradient of each branch
    beside    the branches' columns one beside another; each takes its own columns of the gradient

What follows a `join` is computed alike by all of them, so its gradients are alike and nothing has to be added up.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from trimtab.distributed.process_group import Peers


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
    """In place, over the processes, without gradients."""
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
        widest = torch.nn.functional.pad(tensor, (0, max(widths) - tensor.shape[-1]))  # all send as much
        return torch.cat([part[..., :width] for part, width in zip(all_gather(widest, group), widths)], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.split(ctx.widths, -1)[ctx.rank].contiguous(), None, None


# ---- Tensors of which every one of some processes has a portion, all of the same shape: put together, and given
# back. What processes put together and then use each in its own way has a gradient in each of them, to be added up
# for the owner of a portion (`reduce_scatter_shards`). What all use alike has the same gradient in all, and nothing is
# added up (branches.py).


# Their names before torch 2.13 are the second ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_shards(portion: Tensor, peers: Peers) -> Tensor:
    """[processes * n, ...] from [n, ...] of each, in rank order; without gradients."""
    return start_gather_shards(portion, peers)()


def start_gather_shards(portion: Tensor, peers: Peers) -> Callable[[], Tensor]:
    """The same, which goes on beside other work until its result is asked for."""
    portion = portion.contiguous()
    gathered = portion.new_empty(peers.size * portion.shape[0], *portion.shape[1:])
    if portion.is_meta:  # a tensor without contents stands for one (plan)
        return lambda: gathered
    work = _all_gather(gathered, portion, group=peers.group, async_op=True)

    def result() -> Tensor:
        work.wait()
        return gathered

    return result


def reduce_scatter_shards(parts: Tensor, peers: Peers) -> Tensor:
    """This process's portion [n, ...] of the sum of all processes' [processes * n, ...]; without gradients."""
    own = parts.new_empty(parts.shape[0] // peers.size, *parts.shape[1:])
    if parts.is_meta:
        return own
    if dist.get_backend(peers.group) == "gloo":  # which would copy the sums once more, and older ones cannot
        parts = parts.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(parts, group=peers.group)
        return parts.chunk(peers.size)[peers.rank].clone()
    _reduce_scatter(own, parts.contiguous(), group=peers.group)
    return own
