"""Loads of experts: those of the routers' own choices."""

import torch

from tests.samples import batch_of
from tests.tiny import tiny_model
from trimtab.distributed.process_group import Peers
from trimtab.models.policy import Policy
from trimtab.models.routing import counted_experts, recorded_routes, replayed_routes, routers_of
from trimtab.models.selfcheck import choose_path


def test_loads_are_counted_over_all_passes():
    policy = Policy(tiny_model("mixtral"))
    choose_path(policy)
    chosen = [[] for _ in policy.inner.model.layers]
    for layer, found in zip(policy.inner.model.layers, chosen):
        layer.mlp.gate.register_forward_hook(lambda _, given, out, found=found: found.append(out[2].flatten()))
    with counted_experts(policy) as load:
        for seed in range(2):
            policy(batch_of([9, 4 + seed]))
    policy(batch_of([7]))  # outside
    loads = [torch.bincount(torch.cat(found[:2]), minlength=4).double() for found in chosen]
    figures = load.figures(Peers())
    assert figures["expert_max_load"] == sum(own.max() / own.mean() for own in loads) / len(loads)
    assert figures["idle_experts"] == sum((own == 0).double().mean() for own in loads) / len(loads)
    assert figures["expert_max_load"] > 1


def test_models_without_experts_have_no_loads():
    policy = Policy(tiny_model("llama"))
    choose_path(policy)
    with counted_experts(policy) as load:
        policy(batch_of([9, 4]))
    assert load.figures(Peers()) == {}


def test_replayed_experts_have_the_weights_of_the_model_that_replays():
    policies = [Policy(tiny_model(family, seed=seed)) for family in ("mixtral", "qwen3_moe") for seed in (0, 1)]
    for policy in policies:
        choose_path(policy)
    for one, other in zip(policies[::2], policies[1::2]):
        batch = batch_of([9, 4])
        with recorded_routes(one.inner) as routes:
            plain = one(batch).log_probs_N
        with replayed_routes(routes):
            again = one(batch).log_probs_N
        torch.testing.assert_close(again, plain, atol=1e-6, rtol=1e-6)
        own = other(batch).log_probs_N
        given = dict(zip(routers_of(other.inner), routes.values()))
        with replayed_routes(given), recorded_routes(other.inner) as taken:
            replayed = other(batch).log_probs_N
        assert not torch.allclose(replayed, own)
        assert all(torch.equal(found[0], given[router][0]) for router, found in taken.items())
