import numpy as np
import pytest

from trimtab.distributed.process_group import World, deal


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 2, 5, 16, 37])
def test_everything_is_dealt_once_and_everyone_has_equally_many(size, count):
    rng = np.random.default_rng(count)
    items = [[(i, j) for j in range(rng.integers(1, 6))] for i in range(count)]
    shares = deal(items, size, cost=len)
    assert len({len(share) for share in shares}) == 1
    dealt = sorted(x for share in shares for part in share if part is not None for x in part)
    assert dealt == sorted(x for part in items for x in part)


def test_costs_are_balanced():
    rng = np.random.default_rng(0)
    items = [[i] * int(rng.integers(1, 100)) for i in range(64)]
    shares = deal(items, 4, cost=len)
    loads = [sum(len(part) for part in share) for share in shares]
    assert max(loads) / min(loads) < 1.05


def test_fewer_samples_than_processes_leave_some_with_nothing_that_counts():
    shares = deal([["a"]], 3, cost=len)
    assert sorted(str(share) for share in shares) == ["[None]", "[None]", "[['a']]"]


def test_a_world_of_one_communicates_with_nobody():
    import torch

    world = World()
    assert world.is_rank_zero and world.add_up({"x": torch.tensor(2.0)}) == {"x": 2.0} and world.gather("me") == ["me"]
    assert world.maximum(7) == 7
