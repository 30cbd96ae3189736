from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests import warm
from trimtab.config.training_options import SCHEDULERS
from trimtab.distributed.device import find_device
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.process_group import find_world, leave_world
from trimtab.train.checkpoint import ShardedTensors, write_sharded
from trimtab.train.optimizer import Optimizer, total_norm


def settings(**changes):
    values = {
        "learning_rate": 1e-2, "l2": 0.1, "adam_betas": (0.9, 0.95), "max_norm": 1.0, "lr_warmup_ratio": 0.0,
        "lr_scheduler": "constant", "min_lr_ratio": 0.1, "adam_eps": 1e-8,
        "optimizer": "adamw", "muon_momentum": 0.95, "muon_scale": "match_rms_adamw",
    }  # fmt: skip
    return SimpleNamespace(**(values | changes))


def make(net, steps=10, *, fused=False, **changes):
    options = settings(**changes)
    return Optimizer(net, options, steps, learning_rate=options.learning_rate, fused=fused)


def network(dtype=torch.float32):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    for p in net.parameters():
        p.data = p.data.to(dtype)
    return net


def backward(net, seed, scale=1.0):
    torch.manual_seed(seed)
    x = torch.randn(16, 4, dtype=next(net.parameters()).dtype)
    (net(x).float().square().mean() * scale).backward()


def test_equals_torch_adamw_with_clipping_and_undecayed_vectors():
    ours, theirs = network(), network()
    optimizer = make(ours)
    matrices = [p for p in theirs.parameters() if p.ndim >= 2]
    vectors = [p for p in theirs.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    for step in range(5):
        backward(ours, step, scale=10)
        backward(theirs, step, scale=10)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        reference.step()
        reference.zero_grad()
        assert optimizer.step(step).applied
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()))


def test_adams_epsilon_is_the_one_that_was_asked_for():
    net = network()
    before = net[0].weight.detach().clone()
    optimizer = make(net, l2=0.0, max_norm=0.0, adam_eps=0.5)
    backward(net, 0)
    gradient = net[0].weight.grad.clone()
    optimizer.step(0)
    # In the first step both corrected averages are the gradient and its square.
    torch.testing.assert_close(net[0].weight, before - 1e-2 * gradient / (gradient.abs() + 0.5))


def test_small_updates_survive_in_the_fp32_masters_of_bf16_weights():
    net = network(torch.bfloat16)
    optimizer = make(net, 1000, learning_rate=1e-6, l2=0.0)
    start = {n: m.clone() for n, m in optimizer.masters.items()}
    for step in range(50):
        backward(net, step)
        optimizer.step(step)
    moved = (optimizer.masters["0.weight"] - start["0.weight"]).abs().mean()
    assert moved > 1e-5, "fifty steps of 1e-6 add up"
    for name, master in optimizer.masters.items():
        assert torch.equal(optimizer.working[name], master.bfloat16())


def test_gradients_of_bf16_weights_add_up_in_fp32():
    net = network(torch.bfloat16)
    optimizer = make(net)
    expected = torch.zeros(8, 4)
    for step in range(32):
        single = network(torch.bfloat16)
        backward(single, step)
        expected += single[0].weight.grad.float()
        backward(net, step)
    torch.testing.assert_close(optimizer.accumulated["0.weight"], expected, atol=1e-6, rtol=1e-6)
    assert net[0].weight.grad is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_moves_nothing(bad):
    net = network()
    optimizer = make(net)
    backward(net, 0)
    optimizer.step(0)
    before = {k: v.clone() for k, v in optimizer.state().items()}
    backward(net, 1)
    net[0].bias.grad[0] = bad
    assert not optimizer.step(1).applied
    after = optimizer.state()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
def test_restored_state_continues_bit_for_bit(tmp_path, dtype, fused):
    straight, resumed = network(dtype), network(dtype)
    first = make(straight, fused=fused)
    for step in range(3):
        backward(straight, step)
        first.step(step)
    write_sharded(tmp_path, first.state(), Mesh(), 1)
    second = make(resumed, fused=fused)
    second.restore(ShardedTensors(tmp_path))
    for step in range(3, 6):
        for net, optimizer in ((straight, first), (resumed, second)):
            backward(net, step)
            optimizer.step(step)
    for a, b in zip(straight.parameters(), resumed.parameters()):
        assert torch.equal(a, b)


def test_schedule_warms_up_then_falls_to_its_floor():
    optimizer = make(network(), 100, lr_scheduler="cosine_with_min_lr", lr_warmup_ratio=0.1)
    assert optimizer.rate(0) == pytest.approx(1e-3) and optimizer.rate(4) == pytest.approx(5e-3)
    assert optimizer.rate(9) == optimizer.rate(10) == pytest.approx(1e-2)
    assert optimizer.rate(55) == pytest.approx(5.5e-3), "halfway between peak and floor"
    assert optimizer.rate(100) == pytest.approx(1e-3)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_step_of_every_schedule_and_length_has_a_rate(name):
    for ratio in (0.0, 0.03, 0.5, 1.0):
        for steps in (1, 2, 3, 10, 33, 34, 100):
            optimizer = make(network(), steps, lr_scheduler=name, lr_warmup_ratio=ratio)
            rates = [optimizer.rate(step) for step in range(steps)]
            assert all(rate > 0 for rate in rates), (ratio, steps)
            assert max(rates) == pytest.approx(1e-2)
            if name == "constant" or steps * ratio < 1:
                assert rates[0] == pytest.approx(1e-2), "no warm-up"


def norms_in_two_processes() -> None:
    mesh = Mesh(find_world(find_device())).for_sharding()
    gradients = [torch.randn(5, 3, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    ways = [(Replicate(),), (Shard(0),), (Shard(1),), None, (Shard(0),), (Replicate(),)]
    split = [g if way is None else distribute_tensor(g, mesh, way) for g, way in zip(gradients, ways)]
    expected = float(torch.cat([g.flatten() for g in gradients]).norm())
    for order in (split, split[::-1], split[3:] + split[:3]):
        assert total_norm(order) == pytest.approx(expected, rel=1e-6)
    leave_world()


def test_the_norm_counts_every_part_once_however_gradients_are_split():
    assert warm.call_world(norms_in_two_processes, 2) == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sleeping_between_steps_changes_nothing(dtype):
    results = []
    for sleeps in (False, True):
        net = network(dtype)
        optimizer = make(net, 4, fused=True)
        for step in range(3):
            backward(net, step)
            optimizer.step(step)
            if sleeps:
                optimizer.sleep()
                away = {id(tensor) for tensor, _ in optimizer._away}
                moments = [v for state in optimizer.adam.state.values() for v in state.values() if v.ndim]
                assert away >= {id(tensor) for tensor in moments}
                assert {id(p) for p in net.parameters()}.isdisjoint(away)
                optimizer.wake()
        results.append([p.detach().clone() for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results))
