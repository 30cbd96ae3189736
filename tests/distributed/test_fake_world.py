"""One process plays a rank of a world: collectives have the right shapes, and their bytes are counted."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from trimtab.distributed.device import Device
from trimtab.distributed.fake_world import Traffic, fake_world, traffic
from trimtab.distributed.mesh import Mesh

CPU = Device(torch.device("cpu"), "CPU")


def test_a_sharded_step_gathers_its_weights_twice_and_scatters_gradients_once():
    with fake_world(CPU, rank=5, size=64) as world:
        mesh = Mesh(world, tensor=4)
        assert (mesh.tensor.rank, mesh.data.rank, mesh.data.size) == (1, 1, 16)
        layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(3)))
        for layer in layers:
            fully_shard(layer, mesh=mesh.for_sharding())
        fully_shard(layers, mesh=mesh.for_sharding())
        traffic.clear()
        layers(torch.ones(2, 64)).sum().backward()
        size = 3 * 64 * 64 * 4
        # FSDP keeps the last layer of a backward pass gathered only if told so; every other one is gathered again.
        gathered = traffic[Traffic("all-gather", 16, 4)]
        assert gathered == 2 * size
        assert traffic[Traffic("reduce-scatter", 16, 4)] == size
        assert all(torch.isfinite(p.grad.to_local()).all() for p in layers.parameters())
        assert layers[0].weight.to_local().shape == (4, 64)
        assert layers[0].weight.full_tensor().shape == (64, 64)
    assert not dist.is_initialized()


def test_others_say_what_this_process_says():
    with fake_world(CPU, rank=1, size=3) as world:
        assert world.gather({"loss": 2.5}) == [{"loss": 2.5}] * 3
        assert world.maximum(7) == 7 and world.minimum(7) == 7
        world.wait()
