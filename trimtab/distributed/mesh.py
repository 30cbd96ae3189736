"""The processes that hold one model together, as a mesh with named dimensions.

    replicate  copies of the model, each with its own samples
    shard      parts of the model's parameters, each process with its own samples too
    context    parts of a row's tokens
    tensor     parts of every layer's arithmetic

Neighbours in the last dimension have neighbouring ranks. A process computes with its *peers*, those that differ from it
in the named dimensions and in no other:

    data       replicate and shard: processes with their own samples. Counts, figures, what is distributed
    gradients  data and context: over which a split model averages its gradients
    all        every process of the mesh: what is written, and who writes it

A mesh takes all processes of a world or some of them. Groups of processes are made by all together, so every process of
the world makes the same meshes in the same order, also those that it is not part of (`here` is False). One process is a
mesh of one, without any communication.
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
SPLIT: Over = ("shard", "context")  # processes with other tokens of the same row can hold another part of a parameter
CONTEXT: Over = ("context",)
TENSOR: Over = ("tensor",)
COPIES: Over = ("replicate",)
NEAR, FAR = ("near",), ("far",)  # no dimensions: neighbours among those of SPLIT, and those at the same place elsewhere


class Mesh:
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
        """`ranks`: which processes of the world, if not all. The shard dimension is what the others leave.
        `neighbours`: of those that parameters are split over, how many keep gathered ones split among them; 1: all."""
        self.world = world or World()
        self.ranks = tuple(range(self.world.size) if ranks is None else ranks)
        assert self.ranks == tuple(sorted({*self.ranks} & {*range(self.world.size)})), self.ranks
        shard, rest = divmod(len(self.ranks), replicate * context * tensor)
        assert shard > 0 and rest == 0, f"{replicate} x {context} x {tensor} does not divide {len(self.ranks)}"
        self.sizes = dict(zip(DIMENSIONS, (replicate, shard, context, tensor)))
        self.neighbours = neighbours
        assert shard * context % neighbours == 0, f"{neighbours} neighbours of {shard * context}"
        self.size, self.device = len(self.ranks), self.world.device
        self.data_size = self._count(DATA)  # over how many processes samples are distributed
        self.here = self.world.rank in self.ranks
        self.is_rank_zero = self.world.rank == self.ranks[0]  # the one process that writes for the whole mesh
        self._grid = np.array(self.ranks).reshape(tuple(self.sizes.values()))
        self._groups: dict[Over, dist.ProcessGroup | None] = {}
        self._make_groups()
        self._device_meshes: dict[bool, DeviceMesh] = {}
        self._neighbour_mesh: DeviceMesh | None = None

    @property
    def parts(self) -> tuple[int, ...]:
        """Which part of distributed samples each process gets."""
        return tuple(place // self._count(("context", "tensor")) for place in range(self.size))

    @property
    def tensor_groups(self) -> tuple[int, ...]:
        """The tensor group of each process: which part it gets of what is distributed without splitting rows."""
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
        circle = next(ranks for ranks in self._circles(over) if self.world.rank in ranks)
        return Peers(circle.index(self.world.rank), len(circle), self.device, self._groups.get(over))

    def for_sharding(self, *, copies: bool = True) -> DeviceMesh:
        """What the parameters of a model are split over; one for all models. `copies=False`: without copies, for a
        model that is worth splitting where the trained one is not."""
        names = self._device_mesh(copies).mesh_dim_names
        assert names is not None
        return self._device_mesh(copies)[tuple(name for name in names if name != "tensor")]

    def for_tensor_parallel(self, *, copies: bool = True) -> DeviceMesh:
        """What the layers of the same model are split over, before its parameters are."""
        assert self.sizes["tensor"] > 1
        return self._device_mesh(copies)["tensor"]

    def for_neighbours(self) -> DeviceMesh | None:
        """What gathered parameters are kept split over between forward and backward pass, in its last dimension. None:
        over the same as always."""
        if self.neighbours > 1 and self._neighbour_mesh is None:
            own = next(ranks for ranks in self._circles(SPLIT) if self.world.rank in ranks)
            groups = [self._groups[FAR] or dist.group.WORLD, self._groups[NEAR] or dist.group.WORLD]
            grid = np.array(own).reshape(-1, self.neighbours)
            made = DeviceMesh.from_group(groups, self.device.type, grid, mesh_dim_names=(*FAR, *NEAR))
            self._neighbour_mesh = made
        return self._neighbour_mesh

    def _device_mesh(self, copies: bool) -> DeviceMesh:
        """torch's mesh of this process, made once."""
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

    # ---- groups of processes

    def _splits(self, copies: bool) -> dict[str, Over]:
        """The dimensions of torch's mesh, and which of ours they are."""
        copied = copies and self.sizes["replicate"] > 1
        splits = {"replicate": COPIES, "shard": SPLIT} if copied else {"shard": GRADIENTS}
        return splits | ({"tensor": TENSOR} if self.sizes["tensor"] > 1 else {})

    def _make_groups(self) -> None:
        """Make every group that will be needed, each once."""
        if self.size == 1:
            return
        torch_needs = {over for copies in (True, False) for over in self._splits(copies).values()}
        made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}
        for over in (ALL, DATA, GRADIENTS, SPLIT, COPIES, CONTEXT, TENSOR):
            if self._count(over) == 1 and over not in torch_needs:
                continue
            circles = self._circles(over)
            if circles not in made:
                made[circles] = self._new_group(circles)
            self._groups[over] = made[circles]
        if self.neighbours > 1:
            near = [np.array(ranks).reshape(-1, self.neighbours) for ranks in self._circles(SPLIT)]
            self._groups[NEAR] = self._new_group(tuple(tuple(row) for grid in near for row in grid.tolist()))
            self._groups[FAR] = self._new_group(tuple(tuple(row) for grid in near for row in grid.T.tolist()))

    def _new_group(self, circles: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup | None:
        """The group of the circle that this process is in. None: the default group."""
        if len(circles[0]) == self.world.size:
            return None
        groups = [new_group(ranks) for ranks in circles]
        return next((group for group, ranks in zip(groups, circles) if self.world.rank in ranks), None)

    def _circles(self, over: Over) -> tuple[tuple[int, ...], ...]:
        """Ranks that differ in these dimensions only, for every place in the others."""
        others = [axis for axis, name in enumerate(DIMENSIONS) if name not in over]
        along = [axis for axis, name in enumerate(DIMENSIONS) if name in over]
        rows = self._grid.transpose(others + along).reshape(-1, self._count(over))
        return tuple(tuple(row) for row in rows.tolist())

    def _count(self, over: Over) -> int:
        return int(np.prod([self.sizes[name] for name in over]))
