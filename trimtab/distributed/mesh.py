"""The processes of one model, as a mesh with named dimensions.

    replicate  replicas of the model, each with its own samples
    shard      shards of the parameters, each process with its own samples too
    context    parts of a row's tokens (context parallel)
    tensor     parts of every layer (tensor parallel)

Neighbours in the last dimension have adjacent ranks. The *peers* of a process differ from it in the named dimensions
only:

    data       replicate and shard: processes with different samples, over which counts and figures are summed
    gradients  data and context: processes over which a sharded model averages its gradients
    all        every process of the mesh

A mesh has all processes of a world or some of them. Creating a process group is collective, so every process of the
world creates the same meshes in the same order, also those that it is not part of (`here` is False). One process is a
mesh of one without communication.
"""

from collections.abc import Sequence

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trimtab.distributed.process_group import Peers, World, new_group

DIMENSIONS = ("replicate", "shard", "context", "tensor")
Over = tuple[str, ...]
ALL: Over = DIMENSIONS
DATA: Over = ("replicate", "shard")
GRADIENTS: Over = ("replicate", "shard", "context")
SPLIT: Over = ("shard", "context")  # parameters are sharded over context ranks too
CONTEXT: Over = ("context",)
TENSOR: Over = ("tensor",)
COPIES: Over = ("replicate",)
NEAR, FAR = ("near",), ("far",)  # SPLIT factored in two: neighbours, and ranks at the same place among others


class Mesh:
    """Process groups of a model, by dimension, and torch's device meshes made of them."""

    def __init__(
        self,
        world: World | None = None,
        ranks: Sequence[int] | None = None,
        *,
        replicate: int = 1,
        context: int = 1,
        tensor: int = 1,
        neighbours: int = 1,
    ):
        """`ranks`: processes of the world, if not all. The shard dimension takes the remaining factor. `neighbours`:
        the number of processes over which gathered parameters stay sharded (--zpg); 1: all."""
        self.world = world or World()
        self.ranks = tuple(range(self.world.size) if ranks is None else ranks)
        assert self.ranks == tuple(sorted({*self.ranks} & {*range(self.world.size)})), self.ranks
        shard, rest = divmod(len(self.ranks), replicate * context * tensor)
        assert shard > 0 and rest == 0, f"{replicate} x {context} x {tensor} does not divide {len(self.ranks)}"
        self.sizes = dict(zip(DIMENSIONS, (replicate, shard, context, tensor)))
        self.neighbours = neighbours
        assert shard * context % neighbours == 0, f"{neighbours} neighbours of {shard * context}"
        self.size, self.device = len(self.ranks), self.world.device
        self.data_size = self._count(DATA)  # number of processes with different samples
        self.here = self.world.rank in self.ranks
        self.is_rank_zero = self.world.rank == self.ranks[0]  # the process that writes for the whole mesh
        self._grid = np.array(self.ranks).reshape(tuple(self.sizes.values()))
        self._groups: dict[Over, dist.ProcessGroup | None] = {}
        self._make_groups()
        self._device_meshes: dict[bool, DeviceMesh] = {}
        self._neighbour_mesh: DeviceMesh | None = None

    @property
    def parts(self) -> tuple[int, ...]:
        """The data-parallel part of each process."""
        return tuple(place // self._count(("context", "tensor")) for place in range(self.size))

    @property
    def tensor_groups(self) -> tuple[int, ...]:
        """The tensor-parallel group of each process."""
        return tuple(place // self._count(TENSOR) for place in range(self.size))

    # ---- for processes of the mesh

    @property
    def all(self) -> Peers:
        return self._peers(ALL)

    @property
    def data(self) -> Peers:
        return self._peers(DATA)

    @property
    def gradients(self) -> Peers:
        return self._peers(GRADIENTS)

    @property
    def context(self) -> Peers:
        return self._peers(CONTEXT)

    @property
    def tensor(self) -> Peers:
        return self._peers(TENSOR)

    def _peers(self, over: Over) -> Peers:
        assert self.here, f"process {self.world.rank} has no place in a mesh of {self.ranks}"
        peers = next(ranks for ranks in self._rank_sets(over) if self.world.rank in ranks)
        return Peers(peers.index(self.world.rank), len(peers), self.device, self._groups.get(over))

    def for_sharding(self, *, copies: bool = True) -> DeviceMesh:
        """The device mesh over which parameters are sharded. `copies=False`: without replicas, for a frozen model that
        is sharded although the trained one is replicated."""
        names = self._device_mesh(copies).mesh_dim_names
        assert names is not None
        return self._device_mesh(copies)[tuple(name for name in names if name != "tensor")]

    def for_tensor_parallel(self, *, copies: bool = True) -> DeviceMesh:
        """The device mesh for tensor parallelism, which is applied before sharding."""
        assert self.sizes["tensor"] > 1
        return self._device_mesh(copies)["tensor"]

    def for_neighbours(self) -> DeviceMesh | None:
        """The device mesh over whose last dimension parameters stay sharded between forward and backward pass. None:
        over the usual one."""
        if self.neighbours > 1 and self._neighbour_mesh is None:
            own = next(ranks for ranks in self._rank_sets(SPLIT) if self.world.rank in ranks)
            groups = [self._groups[FAR] or dist.group.WORLD, self._groups[NEAR] or dist.group.WORLD]
            grid = np.array(own).reshape(-1, self.neighbours)
            made = DeviceMesh.from_group(groups, self.device.type, grid, mesh_dim_names=(*FAR, *NEAR))
            self._neighbour_mesh = made
        return self._neighbour_mesh

    def _device_mesh(self, copies: bool) -> DeviceMesh:
        """torch's device mesh of this process, created once."""
        assert self.here and self.size > 1
        if copies not in self._device_meshes:
            splits = self._splits(copies)
            names, kind = tuple(splits), self.device.type
            groups = [self._groups[over] or dist.group.WORLD for over in splits.values()]
            if len(groups) == 1:
                made = DeviceMesh.from_group(groups[0], kind, mesh_dim_names=names)
            else:
                grid = self._grid.reshape([self._count(over) for over in splits.values()])
                made = DeviceMesh.from_group(groups, kind, grid, mesh_dim_names=names)
            self._device_meshes[copies] = made
        return self._device_meshes[copies]

    # ---- process groups

    def _splits(self, copies: bool) -> dict[str, Over]:
        """The dimensions of torch's mesh and the dimensions of this mesh that they combine."""
        copied = copies and self.sizes["replicate"] > 1
        splits = {"replicate": COPIES, "shard": SPLIT} if copied else {"shard": GRADIENTS}
        return splits | ({"tensor": TENSOR} if self.sizes["tensor"] > 1 else {})

    def _make_groups(self) -> None:
        """Create all process groups that will be needed, each once."""
        if self.size == 1:
            return
        torch_needs = {over for copies in (True, False) for over in self._splits(copies).values()}
        made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}
        for over in (ALL, DATA, GRADIENTS, SPLIT, COPIES, CONTEXT, TENSOR):
            if self._count(over) == 1 and over not in torch_needs:
                continue
            rank_sets = self._rank_sets(over)
            if rank_sets not in made:
                made[rank_sets] = self._new_group(rank_sets)
            self._groups[over] = made[rank_sets]
        if self.neighbours > 1:
            near = [np.array(ranks).reshape(-1, self.neighbours) for ranks in self._rank_sets(SPLIT)]
            self._groups[NEAR] = self._new_group(tuple(tuple(row) for grid in near for row in grid.tolist()))
            self._groups[FAR] = self._new_group(tuple(tuple(row) for grid in near for row in grid.T.tolist()))

    def _new_group(self, rank_sets: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup | None:
        """Create a group for each of `rank_sets` and return this process's; None: the default group."""
        if len(rank_sets[0]) == self.world.size:
            return None
        groups = [new_group(ranks) for ranks in rank_sets]
        return next((group for group, ranks in zip(groups, rank_sets) if self.world.rank in ranks), None)

    def _rank_sets(self, over: Over) -> tuple[tuple[int, ...], ...]:
        """The sets of ranks that differ in these dimensions only."""
        others = [axis for axis, name in enumerate(DIMENSIONS) if name not in over]
        along = [axis for axis, name in enumerate(DIMENSIONS) if name in over]
        rows = self._grid.transpose(others + along).reshape(-1, self._count(over))
        return tuple(tuple(row) for row in rows.tolist())

    def _count(self, over: Over) -> int:
        return int(np.prod([self.sizes[name] for name in over]))
