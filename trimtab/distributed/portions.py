"""Tensors of which every one of some processes has a portion, all of the same shape: put together, and given back.

What processes put together and then use each in its own way has a gradient in each of them, to be added up for the
owner of a portion (`sum_portions`). What all of them use alike has the same gradient in all, and nothing is added up
(branches.py).
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.distributed.peers import Peers

# Their names before torch 2.13 are the second ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_portions(portion: Tensor, peers: Peers) -> Tensor:
    """[processes * n, ...] from [n, ...] of each, in rank order; without gradients."""
    return begin_gathering(portion, peers)()


def begin_gathering(portion: Tensor, peers: Peers) -> Callable[[], Tensor]:
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


def sum_portions(parts: Tensor, peers: Peers) -> Tensor:
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
