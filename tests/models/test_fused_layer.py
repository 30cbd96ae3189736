"""Fused layers: every kernel against autograd in fp64, and, on an accelerator, sampled log-probs against the trainer's,
bit for bit."""

import importlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.rollout.kernel_device import DEVICE, DTYPE
from tests.tiny import tiny_model
from trimtab.config.jobs import SFTOptions
from trimtab.models import expert_kernels, fused_layer, layer_kernels
from trimtab.models.compile import fuse_layers
from trimtab.models.lora import add_adapters
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.sampling import SamplingParams


def noise(*shape, seed=0, learns=True):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE).requires_grad_(learns)


def check_gradients(function, reference, inputs):
    """Values and gradients of fp32 kernels against autograd in fp64."""
    wide = [x.detach().double().requires_grad_() if x.requires_grad else x.double() for x in inputs]
    found, expected = function(*inputs), reference(*wide)
    slopes = [noise(*out.shape, seed=9 + i, learns=False) for i, out in enumerate(found)]
    for out, other in zip(found, expected, strict=True):
        torch.testing.assert_close(out.double(), other, atol=2e-5, rtol=2e-5)
    learnt = [x for x in inputs if x.requires_grad]
    ours = torch.autograd.grad(found, learnt, slopes)
    theirs = torch.autograd.grad(expected, [x for x in wide if x.requires_grad], [s.double() for s in slopes])
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.double(), other, atol=5e-5, rtol=5e-5)


def rms_norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("adds", [True, False])
def test_norms(adds, frozen):
    weight = noise(24, seed=2, learns=not frozen)

    def reference(stream, *rest):
        stream = stream + rest[0] if adds else stream
        return stream, rms_norm(stream, rest[-1])

    def kernel(stream, *rest):
        return fused_layer.AddNorm.apply(stream, rest[0] if adds else None, rest[-1], 1e-5)

    check_gradients(kernel, reference, [noise(7, 24), *([noise(7, 24, seed=1)] if adds else []), weight])


@pytest.mark.parametrize("normed", [False, True])
def test_rotary_positions(normed):
    tokens, width = 5, 8
    angles = noise(tokens, width // 2, seed=3, learns=False)
    cos, sin = (torch.cat([f(angles)] * 2, 1) for f in (torch.cos, torch.sin))
    weights = [noise(width, seed=4), noise(width, seed=5)] if normed else []

    def turned(x, weight):
        x = x.unflatten(1, (-1, width))
        if weight is not None:
            x = rms_norm(x, weight)
        half = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
        return x * cos.double()[:, None] + half * sin.double()[:, None]

    def reference(query, key, *norms):
        return tuple(turned(x, w) for x, w in zip((query, key), norms or (None, None)))

    def kernel(query, key, *norms):
        return fused_layer.Rotate.apply(query, key, cos, sin, *(norms or (None, None)), 1e-5)

    check_gradients(kernel, reference, [noise(tokens, 3 * width), noise(tokens, width, seed=1), *weights])


def test_gates():
    check_gradients(
        lambda *both: [fused_layer.Gate.apply(*both)],
        lambda gate, up: [F.silu(gate) * up],
        [noise(6, 40), noise(6, 40, seed=1)],
    )


@pytest.mark.parametrize("window", [None, 9])
def test_attention_over_sequences_with_shared_prefixes(window):
    heads, kv_heads, width, own, whole = 4, 2, 16, [70, 5, 1], [70, 75, 30]
    starts = [torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int() for lengths in (own, whole)]
    query = noise(sum(own), heads, width, learns=False)
    key, value = (noise(sum(whole), kv_heads, width, seed=i, learns=False) for i in (1, 2))
    found, sums = layer_kernels.attend_rows(query, key, value, *starts, max(whole), 0.3, window, learns=True)
    for i in range(len(own)):
        q = query[starts[0][i] : starts[0][i + 1]].transpose(0, 1)
        k, v = (
            x[starts[1][i] : starts[1][i + 1]].transpose(0, 1).repeat_interleave(heads // kv_heads, 0)
            for x in (key, value)
        )
        back = torch.arange(own[i], device=DEVICE)[:, None] + whole[i] - own[i] - torch.arange(whole[i], device=DEVICE)
        seen = (back >= 0) & (back < (window or 10**6))
        scores = (q @ k.transpose(1, 2) * 0.3).masked_fill(~seen, float("-inf"))
        part = slice(starts[0][i], starts[0][i + 1])
        torch.testing.assert_close(found[part], (scores.softmax(-1) @ v).transpose(0, 1), atol=3e-3, rtol=3e-3)
        torch.testing.assert_close(sums[:, part], scores.logsumexp(-1), atol=3e-3, rtol=3e-3)


@pytest.mark.parametrize("rows, biased", [(1, False), (5, True), (70, False), (300, True)])
def test_products(rows, biased):
    x, weight, bias = (noise(*n, seed=n[0], learns=False).to(DTYPE) for n in ((rows, 72), (200, 72), (200,)))
    found = layer_kernels.product(x, weight, bias if biased else None, torch.float32)
    expected = F.linear(x.double(), weight.double(), bias.double() if biased else None)
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


def mixture(x, router, gate_up, down, k, normed):
    """Of every token by itself."""
    weights, chosen = (x @ router.t()).softmax(1).topk(k)
    weights = weights / weights.sum(1, keepdim=True) if normed else weights
    rows = []
    for token, own, experts in zip(x, weights, chosen.tolist()):
        gates = [(gate_up[e] @ token).chunk(2) for e in experts]
        rows.append(sum(w * (down[e] @ (F.silu(gate) * up)) for w, e, (gate, up) in zip(own, experts, gates)))
    return [torch.stack(rows)]


@pytest.mark.parametrize("tokens, k, normed", [(1, 2, True), (5, 1, False), (40, 3, True), (300, 2, False)])
@pytest.mark.parametrize("frozen", [False, True])
def test_mixtures(tokens, k, normed, frozen):
    def kernel(x, router, gate_up, down):
        weights, chosen = fused_layer.Route.apply(x @ router.t(), k, normed, x.dtype, None)
        return [fused_layer.Experts.apply(x, weights, chosen, gate_up, down)]

    stacked = [(0.3 * noise(5, 2 * 40, 24, seed=2)).detach(), (0.3 * noise(5, 24, 40, seed=3)).detach()]
    given = [noise(tokens, 24), noise(5, 24, seed=1), *(x.requires_grad_(not frozen) for x in stacked)]
    check_gradients(kernel, lambda *wide: mixture(*wide, k, normed), given)
    with torch.no_grad():  # gate and up in one kernel
        torch.testing.assert_close(kernel(*given)[0], mixture(*given, k, normed)[0], atol=2e-5, rtol=2e-5)


def test_given_experts_get_their_weights():
    logits, given = noise(6, 5, learns=False), torch.tensor([[4, 1], [0, 3]] * 3, device=DEVICE)
    weights, chosen = expert_kernels.route(logits, 2, True, torch.float32, given)
    shares = logits.softmax(1).gather(1, given)
    torch.testing.assert_close(weights, shares / shares.sum(1, keepdim=True))
    assert (chosen == given).all()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs tensor cores")
@pytest.mark.parametrize(
    "family, rank", [("llama", 0), ("mistral", 0), ("qwen2", 0), ("qwen3", 0), ("llama", 16), ("qwen2", 8),
     ("mixtral", 0), ("qwen3_moe", 0)],
)  # fmt: skip
def test_sampled_log_probs_are_the_trainers_bit_for_bit(family, rank, monkeypatch):
    monkeypatch.syspath_prepend("benchmarks/h200")
    log_probs = importlib.import_module("exact").log_probs
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
    model = tiny_model(family, spread=0.05, **sizes)  # of wider matrices, the modules' own gradients are wrong by 5 %
    policy = Policy(add_adapters(model, SFTOptions(lora_rank=rank, lora_alpha=12)) if rank else model)
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    choose_path(policy)
    policy.to(DEVICE, torch.bfloat16)
    assert fuse_layers(policy, policy.device, bf16=True) == ""
    engine = BuiltinEngine(policy, max_num_seqs=24)
    assert engine.exact
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, policy.head.out_features, n).tolist() for n in (3, 90, 17, 140)]
    sampling = SamplingParams(max_new_tokens=40, n=6)
    rollouts = engine.generate(prompts, sampling, seeds=range(4))
    sampled = torch.cat([torch.tensor(r.log_probs) for r in rollouts])
    ordered, shuffled = list(range(24)), rng.permutation(24).tolist()
    for order, rows, shared in ((ordered, 24, True), (ordered, 6, True), (shuffled, 5, False), (shuffled, 1, False)):
        found = log_probs(policy, rollouts, order, rows, 1.0, shared)
        assert (found != sampled).sum() == 0
    alone = engine.generate(prompts[1:2], sampling, seeds=[1])
    assert all((a.log_probs == b.log_probs).all() for a, b in zip(alone, rollouts[6:12], strict=True))
