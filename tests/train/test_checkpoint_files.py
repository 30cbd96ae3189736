"""What is written in one way of splitting is read in any other, and parts that do not make a whole are refused."""

import itertools
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests import warm
from trimtab.distributed.device import find_device
from trimtab.distributed.fsdp import Block, blocks_of
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.process_group import find_world, leave_world
from trimtab.train import checkpoint as tensor_parts
from trimtab.train.checkpoint import ShardedTensors, write_file, write_sharded

SHAPE = (7, 6)
WHOLE = torch.arange(42.0).reshape(SHAPE)
# Cuts of rows and columns; what lies between two cuts is a block.
GRIDS = {
    "one": ([0, 7], [0, 6]),
    "rows": ([0, 3, 7], [0, 6]),
    "uneven rows": ([0, 1, 2, 7], [0, 6]),
    "columns": ([0, 7], [0, 2, 6]),
    "both": ([0, 4, 7], [0, 3, 6]),
    "more both": ([0, 2, 4, 6, 7], [0, 1, 5, 6]),
}


def blocks_of_grid(rows, columns):
    return [
        Block((top, left), (bottom - top, right - left), (0, 0))
        for (top, bottom), (left, right) in itertools.product(itertools.pairwise(rows), itertools.pairwise(columns))
    ]


def cut_out(block):
    (top, left), (height, width), _ = block
    return WHOLE[top : top + height, left : left + width].contiguous()


def write(folder, blocks, shape=SHAPE):
    """As many processes would, one block each."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, block in enumerate(blocks):
        path = folder / f"tensors-{rank:05d}-of-{len(blocks):05d}.safetensors"
        write_file(path, {"a": cut_out(block)}, {"a": [block]}, {"a": list(shape)}, step=1)
    return folder


@pytest.mark.parametrize(("written", "wanted"), [*itertools.product(GRIDS, GRIDS)])
def test_any_split_reads_what_any_split_wrote(tmp_path, monkeypatch, written, wanted):
    parts = ShardedTensors(write(tmp_path, blocks_of_grid(*GRIDS[written])))
    assert torch.equal(parts.whole("a"), WHOLE) and parts.step == 1
    for block in blocks_of_grid(*GRIDS[wanted]):
        part = torch.full(block.lengths, -1.0)
        monkeypatch.setattr(tensor_parts, "local", lambda _, part=part: part)
        monkeypatch.setattr(tensor_parts, "blocks_of", lambda _, block=block: [block])
        parts.read_into("a", WHOLE)
        assert torch.equal(part, cut_out(block))


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        (blocks_of_grid([0, 4, 7], [0, 3, 6])[:-1], "a has 33 of 42 numbers"),
        ([*blocks_of_grid([0, 4, 7], [0, 6]), Block((1, 1), (1, 2), (0, 0))], "a has 44 of 42 numbers"),
        # As many numbers as there should be: one row twice, one not at all.
        (blocks_of_grid([0, 4], [0, 6]) + blocks_of_grid([3, 6], [0, 6]), "parts of a overlap"),
        (blocks_of_grid([0, 4], [0, 6]) + blocks_of_grid([3, 4, 5, 6], [0, 6]), "parts of a overlap"),
    ],
)
def test_blocks_that_are_missing_or_there_twice_are_refused(tmp_path, blocks, said):
    with pytest.raises(ValueError, match=said):
        ShardedTensors(write(tmp_path, blocks))


def test_a_block_outside_of_its_tensor_is_refused(tmp_path):
    with pytest.raises(ValueError, match="overlap or lie outside"):
        ShardedTensors(write(tmp_path, blocks_of_grid([0, 7], [0, 3, 6]), shape=(3, 14)))


@pytest.mark.parametrize(
    "block", [Block((0, 0), (7, 6), (0, 1)), Block((0, 0), (7, 5), (0, 0)), Block((0, 0), (6, 7), (0, 0))]
)
def test_a_note_that_is_not_of_the_part_beside_it_is_refused(tmp_path, block):
    write_file(tmp_path / "tensors.safetensors", {"a": WHOLE}, {"a": [block]}, {"a": [7, 6]}, step=1)
    with pytest.raises(ValueError, match="its parts of a are not those that it names"):
        ShardedTensors(tmp_path)


def test_stripes_of_one_part_go_where_they_belong(tmp_path):
    """Rows 0:2 and 4:6 in the first process, 2:4 and 6:7 in the second."""
    striped = {0: [(0, 2), (4, 2)], 1: [(2, 2), (6, 1)]}
    for rank, rows in striped.items():
        part = torch.cat([WHOLE[first : first + count] for first, count in rows])
        blocks = [Block((first, 0), (count, 6), (place, 0)) for (first, count), place in zip(rows, (0, 2))]
        path = tmp_path / f"tensors-{rank:05d}-of-00002.safetensors"
        write_file(path, {"a": part}, {"a": blocks}, {"a": [7, 6]}, step=1)
    assert torch.equal(ShardedTensors(tmp_path).whole("a"), WHOLE)


def test_numbers_without_dimensions_and_tensors_without_numbers_are_kept(tmp_path):
    tensors = {"step": torch.tensor(3.0), "none": torch.zeros(0, 4), "a": WHOLE}
    write_sharded(tmp_path, tensors, Mesh(), 1)
    parts = ShardedTensors(tmp_path)
    assert parts.names() == sorted(tensors) and "b" not in parts
    for name, tensor in tensors.items():
        again = torch.full_like(tensor, -1.0)
        parts.read_into(name, again)
        assert torch.equal(parts.whole(name), tensor) and torch.equal(again, tensor)
    with pytest.raises(ValueError, match=r"a has shape \[7, 6\], not \[6, 7\]"):
        parts.read_into("a", WHOLE.T.contiguous())
    with pytest.raises(ValueError, match="there is no b in it"):
        parts.whole("b")


def write_and_read_in_two(folder: Path) -> None:
    mesh = Mesh(find_world(find_device()))
    torch_mesh = mesh.for_sharding()
    even = torch.arange(96.0).reshape(8, 12)
    tall, wide = torch.arange(3.0).reshape(3, 1), torch.arange(5.0).reshape(1, 5)  # uneven; one process without a row
    layouts = {
        "rows": (Shard(0),),
        "columns": (Shard(1),),
        "copies": (Replicate(),),
        "stripes": (_StridedShard(0, split_factor=2),),
    }
    for how, placements in layouts.items():
        names = {"even": even} if how == "stripes" else {"even": even, "tall": tall, "wide": wide}
        tensors = {name: distribute_tensor(tensor, torch_mesh, placements) for name, tensor in names.items()}
        write_sharded(folder / how, tensors | {"plain": tall.clone()}, mesh, 1)
        mesh.all.wait()
        parts = ShardedTensors(folder / how)
        for name, tensor in names.items():
            assert torch.equal(parts.whole(name), tensor), (how, name)
            for then in layouts.values():
                if name != "even" and then == layouts["stripes"]:
                    continue
                again = distribute_tensor(torch.full_like(tensor, -1.0), torch_mesh, then)
                parts.read_into(name, again)
                assert torch.equal(again.to_local(), distribute_tensor(tensor, torch_mesh, then).to_local())
    leave_world()


def test_two_processes_read_each_others_rows_columns_copies_and_stripes(tmp_path):
    assert warm.call_world(write_and_read_in_two, 2, tmp_path) == [0, 0]
    for how in ("rows", "columns", "copies", "stripes"):
        parts = ShardedTensors(tmp_path / how)
        assert torch.equal(parts.whole("even"), torch.arange(96.0).reshape(8, 12))
        assert parts.whole("plain").shape == (3, 1)


def write_and_read_in_four(folder: Path) -> None:
    """Two by two; the last way is how FSDP splits over what tensor parallelism has split before."""
    mesh = Mesh(find_world(find_device()))
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    tensor = torch.arange(101.0 * 6).reshape(101, 6)

    def split(value, placements):
        if placements is not None:
            return distribute_tensor(value, pairs, placements)
        layer = torch.nn.Linear(6, 101, bias=False)
        layer.weight = torch.nn.Parameter(distribute_tensor(value, pairs["tensor"], (Shard(0),)))
        fully_shard(layer, mesh=pairs["shard"])
        return layer.weight.detach()

    layouts = [(Replicate(), Shard(0)), (Shard(1), Shard(0)), (Shard(0), Shard(0)), None]
    for number, placements in enumerate(layouts):
        write_sharded(folder / str(number), {"a": split(tensor, placements)}, mesh, 1)
        mesh.all.wait()
        parts = ShardedTensors(folder / str(number))
        for then in layouts:
            again = split(torch.full_like(tensor, -1.0), then)
            parts.read_into("a", again)
            assert torch.equal(again.to_local(), split(tensor, then).to_local()), (placements, then)
    leave_world()


def test_four_processes_read_blocks_of_any_two_dimensions(tmp_path):
    assert warm.call_world(write_and_read_in_four, 4, tmp_path) == [0, 0, 0, 0]
    for folder in tmp_path.iterdir():
        assert torch.equal(ShardedTensors(folder).whole("a"), torch.arange(101.0 * 6).reshape(101, 6))


def blocks_in_a_pretended_process(rows: int, shards: int, rank: int) -> None:
    """Of rows that do not divide, cut over two and then split."""
    torch.distributed.init_process_group("fake", rank=rank, world_size=2 * shards, store=FakeStore())
    mesh = init_device_mesh("cpu", (shards, 2), mesh_dim_names=("shard", "tensor"))
    whole = torch.arange(2.0 * rows).reshape(rows, 2)
    layer = torch.nn.Linear(2, rows, bias=False)
    layer.weight = torch.nn.Parameter(distribute_tensor(whole, mesh["tensor"], (Shard(0),), src_data_rank=None))
    fully_shard(layer, mesh=mesh["shard"])
    (block,) = blocks_of(layer.weight)
    assert torch.equal(layer.weight.to_local(), whole[block.slices])


@pytest.mark.parametrize(("rows", "shards", "rank"), [(13, 3, 4), (13, 3, 5), (33, 4, 7)])
def test_rows_that_do_not_divide_are_where_they_are_said_to_be(rows, shards, rank):
    assert warm.call(blocks_in_a_pretended_process, rows, shards, rank) == 0
