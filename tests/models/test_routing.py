"""Loads of experts: those of the routers' own choices."""

from functools import partial

import pytest
import torch

from tests.models.families import NAMES, tiny_policy
from tests.samples import batch_of
from tests.tiny import tiny_model
from trimtab.config.training_options import LoraOptions
from trimtab.distributed.process_group import Peers
from trimtab.errors import UserError
from trimtab.models.fused_layer import is_llama_like
from trimtab.models.lora import add_adapters
from trimtab.models.policy import Policy
from trimtab.models.routing import (
    check_routes,
    counted_experts,
    recorded_routes,
    replay_routes_of_batches,
    replayed_routes,
    routed_layers,
    routers_of,
)
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


# ---- choices of an engine


UNKNOWN = 255
MIXTURES = {
    "mixtral": {},
    "olmoe": {"norm_topk_prob": True},
    "qwen2_moe": {},
    "qwen3_moe": {"norm_topk_prob": True},
    "shares": {"family": "qwen3_moe", "norm_topk_prob": False},
}


def mixture(name, **more):
    settings = {"family": name} | MIXTURES[name] | more
    return tiny_model(settings.pop("family"), **settings)


def routed_batch(seed=0):
    """Two sequences with random experts, of which some tokens have none."""
    batch, generator = batch_of([9, 6]), torch.Generator().manual_seed(seed)
    routes_TLK = torch.rand(batch.tokens, 2, 4, generator=generator).argsort(-1)[..., :2].to(torch.uint8)
    routes_TLK[[3, 11]] = UNKNOWN
    batch.routes_TLK = routes_TLK
    return batch


def plain_block(mlp, norm, given_TK, hidden):
    """A mixture as a loop over tokens and their experts; a row of UNKNOWN chooses the most likely ones."""
    rows = hidden.flatten(0, 1)
    outputs = []
    for x, given in zip(rows, given_TK.tolist()):
        shares = (mlp.gate.weight @ x).softmax(0)
        chosen = shares.argsort(descending=True)[:2].tolist() if UNKNOWN in given else given
        total = sum(shares[expert] for expert in chosen) if norm else 1.0
        out = torch.zeros_like(x)
        for expert in chosen:
            gate, up = (mlp.experts.gate_up_proj[expert] @ x).chunk(2)
            out = out + shares[expert] / total * (mlp.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
        if hasattr(mlp, "shared_expert"):
            out = out + torch.sigmoid(mlp.shared_expert_gate(x)) * mlp.shared_expert(x)
        outputs.append(out)
    return torch.stack(outputs).view_as(hidden)


@pytest.mark.parametrize("path", ["packed", "checkpointed", "padded"])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_batch_with_experts_is_the_loop_over_these_experts(name, path):
    batch, policy, other = routed_batch(), Policy(mixture(name)), mixture(name)
    assert choose_path(policy, packed_allowed=path != "padded").path == ("padded" if path == "padded" else "packed")
    if path == "checkpointed":
        policy.inner.gradient_checkpointing_enable({"use_reentrant": False})
        policy.train()
    replay_routes_of_batches(policy)
    log_probs = []
    for i, span in enumerate(batch.spans):
        for layer, block in enumerate(other.model.layers):
            norm = getattr(block.mlp.gate, "norm_topk_prob", True)
            given_TK = batch.routes_TLK[span.start : span.start + span.length, layer]
            block.mlp.forward = partial(plain_block, block.mlp, norm, given_TK)
        ids = batch.sequence(i)
        own = other(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        log_probs.append(own[batch.trained_T[span.start + 1 : span.start + span.length]])
    expected = torch.cat(log_probs)
    found = policy(batch).log_probs_N
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    for values in (found, expected):
        (values * torch.linspace(-1, 1, len(values))).sum().backward()
    theirs = dict(other.named_parameters())
    for parameter, weights in policy.inner.named_parameters():
        torch.testing.assert_close(weights.grad, theirs[parameter].grad, atol=2e-5, rtol=1e-4)
    batch.routes_TLK = None
    assert not torch.allclose(policy(batch).log_probs_N, expected, atol=1e-3)  # as if nothing was replayed


@pytest.mark.parametrize("name", MIXTURES)
def test_the_models_own_experts_change_no_bit(name):
    policy, batch = Policy(mixture(name)), batch_of([9, 4])
    choose_path(policy)
    with recorded_routes(policy) as routes:
        plain = policy(batch).log_probs_N
    plain.sum().backward()
    gradients = [weights.grad for weights in policy.parameters()]
    policy.zero_grad()
    replay_routes_of_batches(policy)
    batch.routes_TLK = torch.stack([chosen for (chosen,) in routes.values()], 1).to(torch.uint8)
    again = policy(batch).log_probs_N
    again.sum().backward()
    assert torch.equal(again, plain)
    assert all(torch.equal(weights.grad, before) for weights, before in zip(policy.parameters(), gradients))


@pytest.mark.parametrize("family", ["llama", "phimoe", "deepseek_v2", "deepseek_v3", "gpt_oss", "llama4_text"])
def test_other_routers_are_not_replayed(family):
    assert routers_of(tiny_model(family)) == []


@pytest.mark.parametrize("family", ["minimax_m2", "flint"])
def test_a_sigmoid_over_experts_is_no_softmax(family):
    if family not in NAMES:
        pytest.skip("a later version of transformers has it")
    assert routers_of(tiny_policy(family)) == []


def test_attention_that_scales_by_position_is_not_fused():
    """Ministral 3 scales queries beyond its original context, which no short self-check sees."""
    assert not is_llama_like(tiny_policy("ministral3").inner.model)
    assert is_llama_like(tiny_policy("ministral").inner.model)


def test_experts_of_another_model_are_refused():
    model, routes_TLK = tiny_model("mixtral"), routed_batch().routes_TLK
    check_routes(model, routes_TLK)
    for wrong in (routes_TLK[:, :1], routes_TLK[:, :, :1], torch.where(routes_TLK == 3, 4, routes_TLK)):
        with pytest.raises(UserError, match="of another model"):
            check_routes(model, wrong)


def test_adapters_of_all_linear_layers_hide_no_router():
    plain, adapted = tiny_model("mixtral"), add_adapters(tiny_model("mixtral"), LoraOptions(lora_rank=2))
    found = routers_of(adapted)
    assert len(found) == len(routers_of(plain)) == 2 and routed_layers(adapted) == routed_layers(plain) == (0, 1)
    policy = Policy(adapted)
    choose_path(policy)
    with recorded_routes(policy) as routes:
        policy(batch_of([9, 4]))
    assert all(len(choices) == 1 for choices in routes.values())
