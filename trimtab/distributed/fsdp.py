"""Split a model over the processes of a mesh with PyTorch's FSDP2. A mesh of one gets no wrapper.

    --zero_stage 0    every process keeps everything (but for those that share a row); gradients are summed
    --zero_stage 1, 2 gradients and optimiser are split; parameters stay gathered after a forward pass
    --zero_stage 3    parameters too are gathered only while a layer works; with --zpg few neighbours keep them
                      between them from its forward to its backward pass (neighbours.py)

The split parameters are the fp32 masters; with --bf16 the gathered ones are their bf16 working copies, and gradients
are summed in fp32 (or in --grad_accum_dtype). With --adam_offload the masters and Adam's moments live in main memory.
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
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from trimtab.distributed.device import release_main_memory
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.supervision import pulse

LARGE = 2**23  # bytes of a layer from which on it matters that the allocator keeps what was freed
WHOLE_SUMS = 2**32  # bytes of gradient sums that every process may hold whole between the passes of a step
GRADIENT_DTYPES = {None: torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16}


def accumulate_in(dtype: torch.dtype, parameter: Tensor, sums: dict[str, Tensor], name: str) -> None:
    """Add a parameter's gradients up in another dtype than its own, in `sums`: each as the backward pass completes it,
    so that no pass holds all of them in two dtypes."""

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
    """Split `module`, the root whose forward is called, and its `layers`, which are gathered one at a time.

    `dtype`: of the gathered parameters; None leaves them as they are. `copies=False`: split over all processes, also
    where the mesh has copies of the trained model. `kept`: over what else weights are split from a forward pass to its
    backward pass (Mesh.for_keeping). `prefetch`: gather a layer while the one before it works.
    """
    if mesh.size == 1:
        return
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    arguments: dict[str, Any] = {
        "mesh": mesh.for_sharding(copies=copies),
        "reshard_after_forward": zero_stage == 3,
        "mp_policy": MixedPrecisionPolicy(dtype, gradient_dtype, cast_forward_inputs=False),
    }
    if offload:
        arguments["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device.type != "cpu")
    in_main_memory = zero_stage == 3 and mesh.device.type == "cpu"
    for layer in layers:
        large = sum(p.numel() * p.element_size() for p in layer.parameters()) >= LARGE
        fully_shard(layer, **arguments)
        if in_main_memory and large:
            layer.register_forward_hook(_give_back)  # after FSDP's own, which has let go of the layer
    fully_shard(module, **arguments)
    if zero_stage == 3 and kept is not None:
        for part in (*layers, module):
            keep_among(part, kept)
    if zero_stage == 3 and prefetch:
        _prefetch([module, *layers])


def _prefetch(in_order: list[Any]) -> None:
    """Ask for the next one before the work of one begins, on the way there and back."""
    for earlier, later in itertools.pairwise(in_order):
        earlier.set_modules_to_forward_prefetch([later])
        later.set_modules_to_backward_prefetch([earlier])


def _give_back(*_: Any) -> None:
    release_main_memory()


def sync_gradients(module: nn.Module, last: bool) -> None:
    """Sum gradients over processes in the coming backward pass: in the last one of a step, before that only where sums
    are too large to be kept whole."""
    pulse.move()
    if hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(last or not keeps_whole_sums(learnt(module)))


def keeps_whole_sums(learnt: int) -> bool:
    """Whether gradients of so many parameters are added up in every process, and over processes once a step. A rule of
    the size alone: all processes must follow the same."""
    return 4 * learnt <= WHOLE_SUMS


def learnt(module: nn.Module) -> int:
    """Trained parameters, of a split model those of all processes."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def split_again(module: nn.Module) -> None:
    """Let go of what a forward pass outside training left gathered."""
    for part in module.modules():
        if hasattr(part, "reshard"):
            part.reshard()


@contextlib.contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """All of the model in every process, to run without gradients. Every process must enter.

    FSDP's own hooks are away meanwhile, so that processes may run different numbers of passes: a pass would be counted,
    and whoever counted more would gather in another order in its next backward pass.
    """
    parts = [part for part in module.modules() if hasattr(part, "unshard")]
    split_again(module)  # what is gathered already may be older than the last step
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
        split_again(module)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor: all of it, where it is not split."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, gathered from its parts. Every process must ask."""
    if not isinstance(tensor, DTensor):
        return tensor
    return _from_stripes(tensor) if in_stripes(tensor) else tensor.full_tensor()


def _from_stripes(tensor: DTensor) -> Tensor:
    """Torch 2.11 cannot gather what was cut in stripes by hand."""
    gathered = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.to_local().device)
    for block in blocks_of(tensor):
        gathered[block.slices] = tensor.to_local()[block.held]
    return sum_over_parts(gathered, tensor)


def keep_part(whole: Tensor, tensor: Tensor) -> None:
    """Fill this process's part of `tensor` from what it is to be."""
    for block in blocks_of(tensor):
        local(tensor)[block.held].copy_(whole[block.slices])


def sum_over_parts(value: Tensor, tensor: Tensor) -> Tensor:
    """Add a figure of every part of `tensor` (a DTensor's, or the whole tensor's) together."""
    if not isinstance(tensor, DTensor):
        return value
    for dimension, placement in enumerate(tensor.placements):
        assert not placement.is_partial(), "parts that are still to be added up"
        if not placement.is_replicate():
            value = value.clone()
            torch.distributed.all_reduce(value, group=tensor.device_mesh.get_group(dimension))
    return value


# ---- Weights that few neighbours keep between them while a layer waits for its backward pass (--zpg, ZeRO++'s second
# partition): gathering them again needs no other process. FSDP2 can do that (`reshard_after_forward=2`), but makes
# groups of processes for every layer, and asks every process of the world to take part. Ours are made once, with the
# mesh. So what FSDP2 would have noted is noted here, in fields of it that have no public name.


def keep_among(part: nn.Module, kept: DeviceMesh) -> None:
    """`part`: already split, and not yet run. `kept`: neighbours in its last dimension."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

    where = HSDPMeshInfo(kept, shard_mesh_dim=1, replicate_mesh_dim=0)
    for group in _parameter_groups(part):
        group.post_forward_mesh_info = where
        for parameter in group.fsdp_params:
            parameter.post_forward_mesh_info = where
            whole = torch.empty(parameter._orig_size, device="meta")
            parameter._init_sharded_post_forward_param_metadata(whole)


def _parameter_groups(part: Any) -> list[Any]:
    state = part._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # before torch 2.13


# ---- Which blocks of a tensor a process holds: where they begin and how long they are, in every dimension. However a
# tensor is split (by rows, by columns, both, in stripes), a process holds one block of it, or one a stripe. So what
# one way of splitting wrote, any other can read: what two blocks have in common is a block again.


Slices = tuple[slice, ...]


class Block(NamedTuple):
    offsets: tuple[int, ...]  # in the whole tensor
    lengths: tuple[int, ...]
    place: tuple[int, ...]  # in the part that is held

    @property
    def size(self) -> int:
        return math.prod(self.lengths)

    @property
    def slices(self) -> Slices:
        """Where it lies in the whole tensor."""
        return tuple(slice(offset, offset + length) for offset, length in zip(self.offsets, self.lengths))

    @property
    def held(self) -> Slices:
        """Where it lies in the part that is held."""
        return tuple(slice(place, place + length) for place, length in zip(self.place, self.lengths))

    def common(self, other: "Block") -> tuple[Slices, Slices] | None:
        """Where the numbers that both have lie in the one's part and in the other's."""
        first = [max(pair) for pair in zip(self.offsets, other.offsets)]
        end = [min(pair) for pair in zip(self._ends(), other._ends())]
        if any(a >= b for a, b in zip(first, end)):
            return None
        return self._slices(first, end), other._slices(first, end)

    def _ends(self) -> list[int]:
        return [offset + length for offset, length in zip(self.offsets, self.lengths)]

    def _slices(self, first: list[int], end: list[int]) -> Slices:
        moved = [place - offset for place, offset in zip(self.place, self.offsets)]
        return tuple(slice(a + by, b + by) for a, b, by in zip(first, end, moved))


def whole_block(shape: Sequence[int]) -> Block:
    """Of a tensor that is not split."""
    nowhere = (0,) * len(shape)
    return Block(nowhere, tuple(shape), nowhere)


def blocks_of(tensor: Tensor) -> list[Block]:
    """What this process holds of a tensor; none, where there are more processes than rows."""
    if not isinstance(tensor, DTensor):
        return [whole_block(tensor.shape)]
    held = _held(tensor)
    assert math.prod(map(len, held)) == tensor.to_local().numel(), f"{tensor.placements} of {tuple(tensor.shape)}"
    runs = itertools.product(*(_runs(indices) for indices in held))
    return [Block(*zip(*run)) if run else Block((), (), ()) for run in runs]


def in_stripes(tensor: DTensor) -> bool:
    """Whether it is cut into several stretches of a dimension, of each of which a process has a part."""
    return any(_is_striped(tensor.placements, axis) for axis in range(len(tensor.placements)))


def is_first_holder(tensor: Tensor) -> bool:
    """Whether this process is the first of those that hold the same part of a split tensor."""
    if not isinstance(tensor, DTensor):
        return True
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    return all(c == 0 for c, placement in zip(coordinates, tensor.placements) if placement.is_replicate())


def covers_once(blocks: Sequence[Block], shape: Sequence[int]) -> bool:
    """Whether the blocks, together, have every number of a tensor, none of them twice."""
    blocks = [block for block in blocks if block.size]
    if sum(block.size for block in blocks) != math.prod(shape):
        return False
    first = np.array([block.offsets for block in blocks]).reshape(len(blocks), len(shape))
    end = first + np.array([block.lengths for block in blocks]).reshape(first.shape)
    meet = ((first[:, None] < end) & (first < end[:, None])).all(-1)  # each meets itself
    return bool((first >= 0).all() and (end <= np.array(shape)).all() and meet.sum() == len(blocks))


def _held(tensor: DTensor) -> list[np.ndarray]:
    """Indices that this process holds, of every dimension; the mesh's dimensions take their share one after another."""
    mesh, coordinates = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    held = [np.arange(length) for length in tensor.shape]
    for axis in _order(tensor.placements):
        placement = tensor.placements[axis]
        stripes = placement.split_factor if _is_striped(tensor.placements, axis) else 1
        held[placement.dim] = _share(held[placement.dim], stripes, mesh.size(axis), coordinates[axis])
    return held


def _order(placements: Sequence[Placement]) -> list[int]:
    """The mesh's dimensions that split something, each after those that split the same before it: FSDP2 splits what is
    cut already, and says so by a stride over the dimensions after its own."""
    assert not any(placement.is_partial() for placement in placements), "parts that are still to be added up"
    axes = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    return sorted(axes, key=lambda axis: _splits_a_part(placements, axis))


def _splits_a_part(placements: Sequence[Placement], axis: int) -> bool:
    placement, later = placements[axis], placements[axis + 1 :]
    return isinstance(placement, _StridedShard) and any(other.is_shard(placement.dim) for other in later)


def _is_striped(placements: Sequence[Placement], axis: int) -> bool:
    """Cut in stripes, of which each process has a part."""
    return isinstance(placements[axis], _StridedShard) and not _splits_a_part(placements, axis)


def _share(indices: np.ndarray, stripes: int, count: int, place: int) -> np.ndarray:
    return np.concatenate([_chunks(stripe, count)[place] for stripe in _chunks(indices, stripes)])


def _chunks(indices: np.ndarray, count: int) -> list[np.ndarray]:
    """As torch.chunk cuts, but with empty ones at the end."""
    size = -(-len(indices) // count)
    return [indices[i * size : (i + 1) * size] for i in range(count)]


def _runs(indices: np.ndarray) -> list[tuple[int, int, int]]:
    """First index, length and place of every stretch without a gap."""
    if not len(indices):
        return []
    starts = [0, *(np.flatnonzero(np.diff(indices) != 1) + 1).tolist()]
    return [(int(indices[a]), b - a, a) for a, b in zip(starts, [*starts[1:], len(indices)])]
