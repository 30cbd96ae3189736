"""What processes have alike, worked on in branches: each process does a part, and the parts are put together.

    branch    from what all have to a branch of each; gradients of the branches are added up
    join      the sum of the branches, which all then have; the gradient of it is the gradient of each branch
    beside    the branches' columns one beside another; each takes its own columns of the gradient

What follows a `join` is computed alike by all of them, so its gradients are alike and nothing has to be added up.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def branch(tensor: Tensor, group: ProcessGroup) -> Tensor:
    return _Branch.apply(tensor, group)


def join(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    return _Join.apply(tensor, group)


def beside(tensor: Tensor, group: ProcessGroup, widths: list[int]) -> Tensor:
    """`widths`: the columns of every process, in rank order."""
    return _Beside.apply(tensor, group, widths)


def gather(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """[processes, ...] of tensors of one shape, without gradients."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.stack(parts)


def add_up(tensor: Tensor, group: ProcessGroup | None) -> None:
    """In place, over the processes, without gradients."""
    dist.all_reduce(tensor, group=group)


def _sum(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    add_up(total, group)
    return total


class _Branch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.group), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        return _sum(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, widths: list[int]) -> Tensor:
        ctx.widths, ctx.rank = widths, dist.get_rank(group)
        widest = torch.nn.functional.pad(tensor, (0, max(widths) - tensor.shape[-1]))  # all send as much
        return torch.cat([part[..., :width] for part, width in zip(gather(widest, group), widths)], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.split(ctx.widths, -1)[ctx.rank].contiguous(), None, None
