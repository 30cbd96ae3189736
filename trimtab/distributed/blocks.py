"""Which blocks of a tensor a process holds: where they begin and how long they are, in every dimension.

However a tensor is split (by rows, by columns, both, in stripes), a process holds one block of it, or one a stripe. So
what one way of splitting wrote, any other can read: what two blocks have in common is a block again.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

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
