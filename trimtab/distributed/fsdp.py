"""Sharding of a model over a mesh with torch's FSDP2, and the blocks of a sharded tensor. One process needs none.

    --zero_stage 0    every process has all parameters (except under context parallelism); gradients are summed
    --zero_stage 1, 2 gradients and optimizer are sharded; parameters stay gathered after a forward pass
    --zero_stage 3    parameters are gathered only while a layer runs; with --zpg, they stay sharded over a few
                      neighbours between its forward and its backward pass

The sharded parameters are the fp32 masters. With --bf16 the gathered ones are bf16 working copies, and gradients are
summed in fp32 (or in --grad_accum_dtype). With --adam_offload masters and Adam's moments are in main memory.
"""

import contextlib
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from trimtab.distributed.device import release_main_memory
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.supervision import own_heartbeat

LARGE = 2**23  # bytes of a layer above which freed memory is returned to the system
WHOLE_SUMS = 2**32  # bytes of unsharded gradient sums that a process may hold between micro-batches
GRADIENT_DTYPES = {None: torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16}


def accumulate_in(dtype: torch.dtype, parameter: Tensor, sums: dict[str, Tensor], name: str) -> None:
    """Accumulate a parameter's gradients in `dtype` in `sums`. Each is converted as soon as the backward pass has
    computed it, so that the gradients never exist in two dtypes at once."""

    def accumulate(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.to(dtype)
        parameter.grad = None
        if name in sums:
            sums[name] += gradient
        else:
            sums[name] = gradient

    parameter.register_post_accumulate_grad_hook(accumulate)


def shard(
    module: nn.Module,
    layers: list[nn.Module],
    mesh: Mesh,
    *,
    zero_stage: int,
    dtype: torch.dtype | None = None,
    gradient_dtype: torch.dtype | None = None,
    offload: bool = False,
    copies: bool = True,
    kept: DeviceMesh | None = None,
    prefetch: bool = False,
) -> None:
    """Shard `module`, the root whose forward is called, and its `layers`, which are gathered one at a time.

    `dtype`: of the gathered parameters; None: unchanged. `copies=False`: shard over all processes, even if the mesh has
    replicas of the trained model. `kept`: the mesh over which weights stay sharded between a forward and its backward
    pass (Mesh.for_neighbours). `prefetch`: gather a layer while the one before it runs.
    """
    if mesh.size == 1:
        return
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    split = mesh.for_sharding(copies=copies)
    arguments: dict[str, Any] = {
        "mesh": split,
        "reshard_after_forward": zero_stage == 3,
        "mp_policy": MixedPrecisionPolicy(dtype, gradient_dtype, cast_forward_inputs=False),
    }
    if kept is None:
        parts = split.size(-1)
        arguments["shard_placement_fn"] = lambda parameter: Shard(2) if splits_width(parameter, parts) else None
    if offload:
        arguments["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device.type != "cpu")
    in_main_memory = zero_stage == 3 and mesh.device.type == "cpu"
    for layer in layers:
        large = sum(p.numel() * p.element_size() for p in layer.parameters()) >= LARGE
        fully_shard(layer, **arguments)
        if in_main_memory and large:
            layer.register_forward_hook(lambda *_: release_main_memory())  # after FSDP's hook, which frees the layer
    fully_shard(module, **arguments)
    if zero_stage == 3 and kept is not None:
        for part in (*layers, module):
            _keep_among_neighbours(part, kept)
    if zero_stage == 3 and prefetch:
        in_order: list[Any] = [module, *layers]
        for earlier, later in itertools.pairwise(in_order):
            earlier.set_modules_to_forward_prefetch([later])
            later.set_modules_to_backward_prefetch([earlier])


def splits_width(parameter: Tensor, parts: int) -> bool:
    """Whether FSDP shards stacked experts [E, O, I] by their last dimension, because E does not divide: some processes
    would hold more experts, or none. Not by O: transformers stacks gate and up there when it reads files, so a shard
    would be part of each."""
    stacked = parameter.ndim == 3 and not isinstance(parameter, DTensor)
    return stacked and parameter.shape[0] % parts != 0 and parameter.shape[2] % parts == 0


def sync_gradients(module: nn.Module, last: bool) -> None:
    """Set whether the next backward pass sums gradients over processes: in the last one of a step, or in all if the
    sums are too large to be kept unsharded."""
    own_heartbeat.move()
    if hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(last or not keeps_unsharded_sums(learnt(module)))


def keeps_unsharded_sums(learnt: int) -> bool:
    """Whether gradients of this many parameters are accumulated unsharded and summed over processes once a step. It
    depends on the size alone, because all processes must decide alike."""
    return 4 * learnt <= WHOLE_SUMS


def learnt(module: nn.Module) -> int:
    """Number of trained parameters, over all shards."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def sharded_parts(module: nn.Module) -> list[nn.Module]:
    """The modules that FSDP gathers one by one."""
    return [part for part in module.modules() if hasattr(type(part), "unshard")]


def reshard_model(module: nn.Module) -> None:
    """Free the parameters that a forward pass outside training left gathered."""
    for part in sharded_parts(module):
        part.reshard()


@contextlib.contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Gather the whole model in every process, for inference. Every process must enter.

    FSDP's hooks are removed meanwhile, so that processes may run different numbers of forward passes. FSDP counts them,
    and a process with a higher count would gather in another order in its next backward pass.
    """
    parts = sharded_parts(module)
    for part in parts:
        part.reshard()  # parameters still gathered may be older than the last step
    for part in parts:
        part.unshard()
    hooks = [(part, part._forward_pre_hooks, part._forward_hooks) for part in parts]
    for part in parts:
        part._forward_pre_hooks, part._forward_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for part, before, after in hooks:
            part._forward_pre_hooks, part._forward_hooks = before, after
            part.reshard()


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor; all of it, if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor from its shards. Every process must call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not _torch_cannot_gather(tensor):
        return tensor.full_tensor()
    gathered = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.to_local().device)
    for block in blocks_of(tensor):
        gathered[block.slices] = tensor.to_local()[block.held]
    raw = gathered.reshape(-1).view(torch.uint8)  # 0 + x is x for bytes, not for -0.0
    return sum_over_parts(raw, tensor).view(tensor.dtype).view(tensor.shape)


def _torch_cannot_gather(tensor: DTensor) -> bool:
    """Whether `full_tensor` fails: torch 2.11 for tensors sharded in stripes, gloo for tensors of an accelerator, where
    it crashes (pytorch#152645)."""
    if any(_is_striped(tensor.placements, axis) for axis in range(len(tensor.placements))):
        return True
    on_device = tensor.to_local().device.type != "cpu"
    return on_device and any(
        torch.distributed.get_backend(tensor.device_mesh.get_group(axis)) == "gloo"
        for axis in range(len(tensor.placements))
    )


def keep_shard(whole: Tensor, tensor: Tensor) -> None:
    """Copy this process's shard of `tensor` from `whole`."""
    for block in blocks_of(tensor):
        local(tensor)[block.held].copy_(whole[block.slices])


def sum_over_parts(value: Tensor, tensor: Tensor) -> Tensor:
    """Sum a value over the shards of `tensor`."""
    if not isinstance(tensor, DTensor):
        return value
    for dimension, placement in enumerate(tensor.placements):
        assert not placement.is_partial(), "parts that are still to be added up"
        if not placement.is_replicate():
            value = value.clone()
            torch.distributed.all_reduce(value, group=tensor.device_mesh.get_group(dimension))
    return value


def part_of(tensor: Tensor) -> tuple[int, int]:
    """The number of this process's shard of a tensor, and the number of shards."""
    part, parts = 0, 1
    if isinstance(tensor, DTensor):
        coordinates = tensor.device_mesh.get_coordinate()
        assert coordinates is not None
        for axis, placement in enumerate(tensor.placements):
            if not placement.is_replicate():
                size = tensor.device_mesh.size(axis)
                part, parts = part * size + coordinates[axis], parts * size
    return part, parts


def _keep_among_neighbours(part: Any, kept: DeviceMesh) -> None:
    """Between forward and backward pass, keep weights sharded over a few neighbours (ZeRO++'s secondary partition), so
    that gathering them again needs no other process.

    FSDP2 can do this (`reshard_after_forward=2`), but creates process groups for every layer, in which every process of
    the world must take part. Ours are created once, with the mesh, so FSDP2's private fields are set here. `part`:
    already sharded, and not yet run. `kept`: neighbours in its last dimension.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

    where = HSDPMeshInfo(kept, shard_mesh_dim=1, replicate_mesh_dim=0)
    state = part._get_fsdp_state()
    one = getattr(state, "_fsdp_param_group", None)  # before torch 2.13
    for group in getattr(state, "_fsdp_param_groups", [one] if one else []):
        group.post_forward_mesh_info = where
        for parameter in group.fsdp_params:
            parameter.post_forward_mesh_info = where
            whole = torch.empty(parameter._orig_size, device="meta")
            parameter._init_sharded_post_forward_param_metadata(whole)


# ---- blocks of a sharded tensor
#
# However a tensor is sharded (by rows, by columns, both, in stripes), a process holds one block of it, or one block per
# stripe. The intersection of two blocks is a block again, so any layout can read what another has written.

Slices = tuple[slice, ...]


class Block(NamedTuple):
    """A rectangular part of a tensor, and its place in the shard that holds it."""

    offsets: tuple[int, ...]  # in the whole tensor
    lengths: tuple[int, ...]
    place: tuple[int, ...]  # offsets in the shard

    @property
    def size(self) -> int:
        return math.prod(self.lengths)

    @property
    def slices(self) -> Slices:
        """Its slices of the whole tensor."""
        return tuple(slice(offset, offset + length) for offset, length in zip(self.offsets, self.lengths))

    @property
    def held(self) -> Slices:
        """Its slices of the shard."""
        return tuple(slice(place, place + length) for place, length in zip(self.place, self.lengths))

    def common(self, other: "Block") -> tuple[Slices, Slices] | None:
        """The slices of the intersection in each of the two shards; None if the blocks do not intersect."""
        pairs = zip(self.slices, other.slices)
        spans = [(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs]
        if any(first >= end for first, end in spans):
            return None
        return self._in_part(spans), other._in_part(spans)

    def _in_part(self, spans: list[tuple[int, int]]) -> Slices:
        moved = [place - offset for place, offset in zip(self.place, self.offsets)]
        return tuple(slice(first + by, end + by) for (first, end), by in zip(spans, moved))


def whole_block(shape: Sequence[int]) -> Block:
    """The block of an unsharded tensor."""
    nowhere = (0,) * len(shape)
    return Block(nowhere, tuple(shape), nowhere)


def blocks_of(tensor: Tensor) -> list[Block]:
    """The blocks of a tensor in this process; none, if there are more processes than rows."""
    if not isinstance(tensor, DTensor):
        return [whole_block(tensor.shape)]
    held = _held(tensor)
    assert math.prod(map(len, held)) == tensor.to_local().numel(), f"{tensor.placements} of {tuple(tensor.shape)}"
    runs = itertools.product(*(_runs(indices) for indices in held))
    return [Block(*zip(*run)) if run else Block((), (), ()) for run in runs]


def is_first_holder(tensor: Tensor) -> bool:
    """Whether this process is the first of those that hold the same shard."""
    if not isinstance(tensor, DTensor):
        return True
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    return all(c == 0 for c, placement in zip(coordinates, tensor.placements) if placement.is_replicate())


def is_partition(blocks: Sequence[Block], shape: Sequence[int]) -> bool:
    """Whether the blocks cover a tensor exactly, without overlap."""
    blocks = [block for block in blocks if block.size]
    if sum(block.size for block in blocks) != math.prod(shape):
        return False
    first = np.array([block.offsets for block in blocks]).reshape(len(blocks), len(shape))
    end = first + np.array([block.lengths for block in blocks]).reshape(first.shape)
    meet = ((first[:, None] < end) & (first < end[:, None])).all(-1)  # each intersects itself
    return bool((first >= 0).all() and (end <= np.array(shape)).all() and meet.sum() == len(blocks))


def _held(tensor: DTensor) -> list[np.ndarray]:
    """This process's indices in every dimension. Mesh dimensions shard one after another. FSDP2 shards a tensor that a
    later mesh dimension has already sharded; its _StridedShard placement marks that, so it is applied last."""
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    assert not any(placement.is_partial() for placement in placements), "parts that are still to be added up"
    held = [np.arange(length) for length in tensor.shape]
    axes = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    for axis in sorted(axes, key=lambda axis: _splits_a_part(placements, axis)):
        dimension = placements[axis].dim
        stripes = placements[axis].split_factor if _is_striped(placements, axis) else 1
        parts = [_chunks(stripe, mesh.size(axis))[coordinates[axis]] for stripe in _chunks(held[dimension], stripes)]
        held[dimension] = np.concatenate(parts)
    return held


def _splits_a_part(placements: Sequence[Placement], axis: int) -> bool:
    """Whether a later mesh dimension has sharded the same dimension first."""
    placement, later = placements[axis], placements[axis + 1 :]
    return isinstance(placement, _StridedShard) and any(other.is_shard(placement.dim) for other in later)


def _is_striped(placements: Sequence[Placement], axis: int) -> bool:
    """Whether a dimension is divided into stripes, of each of which every process holds a part."""
    return isinstance(placements[axis], _StridedShard) and not _splits_a_part(placements, axis)


def _chunks(indices: np.ndarray, count: int) -> list[np.ndarray]:
    """Like torch.chunk, but with empty chunks at the end."""
    size = -(-len(indices) // count)
    return [indices[i * size : (i + 1) * size] for i in range(count)]


def _runs(indices: np.ndarray) -> list[tuple[int, int, int]]:
    """(first index, length, position) of every run of consecutive indices."""
    if not len(indices):
        return []
    starts = [0, *(np.flatnonzero(np.diff(indices) != 1) + 1).tolist()]
    return [(int(indices[a]), b - a, a) for a, b in zip(starts, [*starts[1:], len(indices)])]
