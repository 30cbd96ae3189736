import socket

import numpy as np
import pytest
import torch
import torch.distributed as dist

from trimtab.distributed import device, process_group
from trimtab.distributed.process_group import World, deal
from trimtab.distributed.supervision import PER_DEVICE


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


@pytest.mark.parametrize("others, most", [(["own"], 1), (["first", "second"], 1), (["same"], 2), (["same", "same"], 3)])
def test_processes_of_a_device_are_counted_by_its_name(monkeypatch, others, most):
    """A launcher may show each process its own device alone: their number says nothing."""
    monkeypatch.setenv(PER_DEVICE, "0")  # so that what is counted is forgotten after the test
    monkeypatch.delenv(PER_DEVICE)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(process_group, "count_accelerators", lambda: 1)
    monkeypatch.setattr(process_group, "device_name", lambda _: "same")
    store = dist.HashStore()
    for rank, name in enumerate(others, 1):
        store.set(f"{process_group.DEVICE_KEY}/{rank}", f"{socket.gethostname()}/{name}")
    found = process_group.most_per_device(torch.device("cuda"), store, 0, 1 + len(others))
    assert found == most == device.processes_per_device(1)


def test_names_of_devices_are_not_compared_where_each_process_has_its_own(monkeypatch):
    """Machines of a cluster may have one name, and devices no identity."""
    monkeypatch.setenv(PER_DEVICE, "0")  # so that what is counted is forgotten after the test
    monkeypatch.delenv(PER_DEVICE)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(process_group, "count_accelerators", lambda: 2)
    monkeypatch.setattr(process_group, "device_name", lambda _: "same")
    store = dist.HashStore()
    store.set(f"{process_group.DEVICE_KEY}/1", "1")
    assert process_group.most_per_device(torch.device("cuda"), store, 0, 2) == 1
    assert store.get(f"{process_group.DEVICE_KEY}/0") == b"0"
