"""A mesh says over which of its processes something is added up."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests import warm
from trimtab.distributed import fsdp as sharding
from trimtab.distributed.device import find_device
from trimtab.distributed.fsdp import shard
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.process_group import World, find_world, leave_world
from trimtab.train.checkpoint import ShardedTensors, write_sharded
from trimtab.train.optimizer import total_norm


def test_a_mesh_of_one_communicates_with_nobody():
    mesh = Mesh()
    assert mesh.here and mesh.is_rank_zero and mesh.size == mesh.data_size == 1
    for peers in (mesh.all, mesh.data, mesh.gradients, mesh.context, mesh.tensor):
        assert (peers.rank, peers.size, peers.gather("me")) == (0, 1, ["me"])
        assert peers.add_up({"x": torch.tensor(2.0)}) == {"x": 2.0}


def test_one_of_two_processes_alone_communicates_with_nobody_and_the_other_has_no_place():
    alone, outside = Mesh(World(1, 2), [1]), Mesh(World(0, 2), [1])  # nobody has met: any collective would fail
    assert alone.here and alone.is_rank_zero and alone.all.gather("me") == ["me"]
    assert not outside.here and not outside.is_rank_zero and outside.size == outside.data_size == 1
    with pytest.raises(AssertionError, match="has no place"):
        _ = outside.data


def test_ranks_and_sizes_that_make_no_mesh_are_refused():
    for ranks in ([1, 0], [0, 0], [2]):
        with pytest.raises(AssertionError):
            Mesh(World(0, 2), ranks)
    with pytest.raises(AssertionError, match="does not divide"):
        Mesh(World(0, 2), tensor=4)


def speak_over_two() -> None:
    world = find_world(find_device())
    split, copied, second = Mesh(world), Mesh(world, replicate=2), Mesh(world, [1])
    for mesh in (split, copied):
        assert (mesh.size, mesh.data_size, mesh.is_rank_zero) == (2, 2, world.rank == 0)
        for peers in (mesh.all, mesh.data, mesh.gradients):
            assert (peers.rank, peers.size) == (world.rank, 2)
            assert peers.gather(world.rank) == [0, 1] and peers.maximum(world.rank) == 1
            assert peers.add_up({"x": torch.tensor(world.rank + 1.0)}) == {"x": 3.0}
            peers.wait()
        assert mesh.tensor.size == mesh.context.size == 1
    assert second.here == second.is_rank_zero == (world.rank == 1)
    assert tuple(split.for_sharding().shape) == (2,) and split.for_sharding() is split.for_sharding()
    assert tuple(copied.for_sharding().shape) == (2, 1)
    assert tuple(copied.for_sharding(copies=False).shape) == (2,)
    leave_world()


def test_two_processes_speak_to_each_other():
    assert warm.call_world(speak_over_two, 2) == [0, 0]


def speak_over_four() -> None:
    """Three of four, which have a group of their own; four, two by two, in each pair of dimensions."""
    world = find_world(find_device())
    rank = world.rank
    three = Mesh(world, [0, 2, 3])
    hybrid, cut, shared = Mesh(world, replicate=2), Mesh(world, tensor=2), Mesh(world, context=2)
    if three.here:
        assert three.all.gather(rank) == three.data.gather(rank) == [0, 2, 3]
        assert three.data.rank == [0, 2, 3].index(rank) and three.for_sharding().size() == 3
    else:
        assert rank == 1 and not three.is_rank_zero
    row, column = rank // 2, rank % 2
    kept = Mesh(world, neighbours=2).for_neighbours()
    assert kept.get_coordinate() == (row, column) and kept.shape == (2, 2) and cut.for_neighbours() is None
    assert torch.distributed.get_process_group_ranks(kept.get_group("near")) == [2 * row, 2 * row + 1]
    for mesh in (hybrid, cut, shared):
        assert mesh.all.gather(rank) == [0, 1, 2, 3]
    assert hybrid.data.gather(rank) == hybrid.gradients.gather(rank) == [0, 1, 2, 3]
    assert hybrid.for_sharding().get_coordinate() == (row, column) and hybrid.for_sharding().shape == (2, 2)
    assert hybrid.for_sharding(copies=False).shape == (4,)
    with_my_cut, with_my_row = [column, column + 2], [2 * row, 2 * row + 1]
    assert cut.data.gather(rank) == cut.gradients.gather(rank) == with_my_cut and cut.tensor.gather(rank) == with_my_row
    assert shared.data.gather(rank) == with_my_cut and shared.context.gather(rank) == with_my_row
    assert shared.gradients.gather(rank) == [0, 1, 2, 3] and shared.data_size == cut.data_size == 2
    assert torch.equal(shared.data.sum(torch.tensor([rank])), torch.tensor([sum(with_my_cut)]))
    assert shared.for_sharding().shape == (4,) and cut.for_sharding().shape == (2,)
    assert torch.distributed.get_process_group_ranks(cut.for_sharding().get_group()) == with_my_cut
    leave_world()


def test_four_processes_speak_along_every_dimension():
    assert warm.call_world(speak_over_four, 4) == [0, 0, 0, 0]


def learn_in_some(folder: Path) -> None:
    """A model over the first and the last of three processes, and one in the second alone."""
    world = find_world(find_device())
    samples = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1))
    whole = gradients_of(network(), samples.flatten(0, 1))
    for stage in (0, 3):
        pair, single = Mesh(world, [0, 2], replicate=2 if stage == 0 else 1), Mesh(world, [1])
        if single.here:
            model = network()
            shard(model, list(model), single, zero_stage=stage)
            assert torch.equal(torch.cat(gradients_of(model, samples.flatten(0, 1))), torch.cat(whole))
            continue
        model = network()
        shard(model, list(model), pair, zero_stage=stage)
        found = gradients_of(model, samples[pair.data.rank], pair.gradients.size)
        split = [parameter.grad for parameter in model.parameters()]
        torch.testing.assert_close(torch.cat(found), torch.cat(whole))
        torch.testing.assert_close(total_norm(split), float(torch.cat(whole).norm()), rtol=1e-6, atol=0)
        write_sharded(folder / str(stage), dict(model.named_parameters()), pair, 1)
    leave_world()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def gradients_of(model: nn.Module, samples: torch.Tensor, factor: int = 1) -> list[torch.Tensor]:
    (model(samples).square().sum() * factor).backward()
    return [sharding.whole(parameter.grad).flatten() for parameter in model.parameters()]


def test_groups_of_different_sizes_learn_beside_each_other(tmp_path):
    assert warm.call_world(learn_in_some, 3, tmp_path) == [0, 0, 0]
    expected = dict(network().named_parameters())
    for stage in (0, 3):
        parts = ShardedTensors(tmp_path / str(stage))
        assert all(torch.equal(parts.whole(name), parameter) for name, parameter in expected.items())


def gather_by_sums() -> None:
    """What torch gathers and what we do where it cannot are the same bits, of uneven shards too."""
    mesh = Mesh(find_world(find_device()))
    for dtype in (torch.float32, torch.bfloat16):
        model = network().to(dtype)
        model[0].weight.data[0, :2] = torch.tensor([-0.0, torch.nan])
        shard(model, list(model), mesh, zero_stage=3)
        for parameter in model.parameters():
            expected = parameter.full_tensor()
            sharding._torch_cannot_gather = lambda tensor: True
            found = sharding.whole(parameter)
            bits = [tensor.detach().flatten().view(torch.uint8) for tensor in (found, expected)]
            assert found.dtype == dtype and found.shape == expected.shape and torch.equal(*bits)
    leave_world()


def test_shards_that_torch_cannot_gather_are_summed_to_the_same_bits():
    assert warm.call_world(gather_by_sums, 2) == [0, 0]
