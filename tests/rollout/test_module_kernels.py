"""Kernels for norms, MLPs and experts do what each family's modules do, and replace them only then."""

import importlib

import pytest
import torch
from torch import nn

from tests.rollout.kernel_device import CLOSE, DEVICE, DTYPE
from tests.rollout.test_builtin_engine import prompts
from tests.rollout.test_cuda_engine import policy_of
from trimtab.rollout.builtin import model_runner
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.builtin.kernels import modules
from trimtab.rollout.builtin.kernels.modules import ONE_ADDED, ROUNDED_FIRST, ROUNDED_LAST, fused_modules
from trimtab.rollout.sampling import SamplingParams

CLASSES = {
    "llama.LlamaRMSNorm": (ROUNDED_FIRST, ROUNDED_LAST),  # the same in fp32
    "gpt_oss.GptOssRMSNorm": (ROUNDED_FIRST, ROUNDED_LAST),
    "gemma2.Gemma2RMSNorm": (ONE_ADDED,),
    "qwen3_5.Qwen3_5RMSNorm": (ONE_ADDED,),
    "qwen3_5.Qwen3_5RMSNormGated": (ROUNDED_FIRST, ROUNDED_LAST),
    "mamba2.MambaRMSNormGated": (None,),  # its gate comes first
}


def made(name: str, width: int) -> nn.Module:
    family, kind = name.split(".")
    norm = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), kind)(width)
    with torch.no_grad():
        norm.weight.normal_(generator=torch.Generator().manual_seed(1))
    return norm.to(DEVICE, DTYPE)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("shape", [(3, 1, 64), (2, 5, 4, 24)])
def test_a_kernel_does_what_the_module_does(name, shape):
    modules._kinds.clear()
    norm, random = nn.ModuleList([made(name, shape[-1])]), torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=random).to(DEVICE, DTYPE) for _ in range(1 + ("Gated" in name))]
    given[0] = given[0].transpose(0, 1)  # rows in another order
    given[1:] = [gate.transpose(0, 1) for gate in given[1:]]
    expected = norm[0](*given)
    with fused_modules(norm.modules()):
        found = norm[0](*given)
    assert next(iter(modules._kinds.values())) in CLASSES[name] and "forward" not in vars(norm[0])
    torch.testing.assert_close(found, expected, **CLOSE)
    assert found.shape == expected.shape and found.dtype == expected.dtype


def experts(family: str) -> list[nn.Module]:
    return [module for name, module in policy_of(family).named_modules() if name.endswith("experts")]


@pytest.mark.parametrize("family, known", [("deepseek_v2", True), ("mixtral", True), ("gpt_oss", False)])
@pytest.mark.parametrize("tokens", [1, 7, 90])
def test_kernels_do_what_stacked_experts_do(family, known, tokens):
    modules._known.clear()
    module = experts(family)[0]
    count, width = len(module.gate_up_proj), policy_of(family).config.hidden_size
    random = torch.Generator().manual_seed(tokens)
    states = torch.randn(tokens, width, generator=random).to(DEVICE)
    weights, chosen = torch.rand(tokens, count, generator=random).to(DEVICE).topk(2)
    with torch.no_grad():
        expected = module(states, chosen, weights)
        with fused_modules(module.modules()):
            found = module(states, chosen, weights)
    assert [*modules._known.values()] == [True] * known
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def mlp(family: str) -> nn.Module:
    model = policy_of(family)
    made = next(module for name, module in model.named_modules() if name.endswith(("mlp", "shared_experts")))
    assert made.down_proj.in_features
    return made


@pytest.mark.parametrize("family, known", [("deepseek_v2", [True]), ("qwen3_5_text", [True]), ("gemma2", [False])])
@pytest.mark.parametrize("shape", [(1,), (2, 3), (90,)])
def test_kernels_do_what_a_gated_mlp_does(family, known, shape):
    modules._known.clear()
    module, random = mlp(family).to(DTYPE), torch.Generator().manual_seed(len(shape))
    states = torch.randn(*shape, module.gate_proj.in_features, generator=random).to(DEVICE, DTYPE)
    with torch.no_grad():
        expected = module(states)
        with fused_modules(module.modules()):
            found = module(states)
    assert [*modules._known.values()] == known and "forward" not in vars(module)
    torch.testing.assert_close(found, expected, **CLOSE)


def test_what_is_no_such_mlp_stays():
    class Clamped(type(mlp("deepseek_v2"))):
        """Looks like one, and its activation leaves small numbers alone."""

        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    class Cut(nn.Module):
        def forward(self, x):
            return torch.nn.functional.silu(x).clamp(max=3)

    modules._known.clear()
    module = mlp("deepseek_v2").to(DTYPE)
    module.__class__, module.act_fn = Clamped, Cut()
    states = torch.randn(4, module.gate_proj.in_features).to(DEVICE, DTYPE)
    with torch.no_grad():
        expected = module(states)
        with fused_modules(module.modules()):
            assert torch.equal(module(states), expected)
    assert [*modules._known.values()] == [False]


PROJECTIONS = {"gemma2": {3}, "qwen3_5_text": {2, 3}, "qwen3_next": {3}, "gpt_oss": {3}, "deepseek_v2": set()}
"""How many there are of one input; those with two or four outputs stay."""


@pytest.mark.parametrize("family", PROJECTIONS)
def test_projections_of_one_input_are_found(family):
    every = list(policy_of(family).modules())
    found = [own for module in every for own in modules._projections_of(module)]
    assert {len(own) for own in found} == PROJECTIONS[family]
    before = [module for module in every if "forward" in vars(module)]
    with fused_modules(every):
        assert all("forward" in vars(module) for own in found for module in own)
    assert [module for module in every if "forward" in vars(module)] == before


def test_projections_of_one_input_are_made_together_and_no_others(monkeypatch):
    modules._known.clear()
    monkeypatch.setattr(modules, "is_plain", lambda *_: True)  # in the interpreter's precision, too
    launches, made = [], modules.small_batch_linears
    monkeypatch.setattr(modules, "small_batch_linears", lambda x, own: launches.append(len(x)) or made(x, own))
    projections = [nn.Linear(32, width).to(DEVICE, DTYPE).requires_grad_(False) for width in (48, 16)]
    joined, random = modules.JoinedLinears(projections), torch.Generator().manual_seed(0)
    first, second, many = (torch.randn(2, n, 32, generator=random).to(DEVICE, DTYPE) for n in (3, 3, 40))
    # Another input, the same one again, and one that was not asked for before.
    asked = [(0, first), (1, first), (1, second), (0, first), (0, second), (1, second), (0, many), (1, many)]
    for index, states in asked:
        torch.testing.assert_close(joined(index, states), projections[index](states), **CLOSE)
    assert launches == [*[modules.TRIED] * 2, 6, 6, 6, 6] and joined._input is None


def test_projections_stay_if_the_kernel_disagrees(monkeypatch):
    modules._known.clear()
    monkeypatch.setattr(modules, "is_plain", lambda *_: True)
    monkeypatch.setattr(modules, "small_batch_linears", lambda x, own: [1.1 * module(x) for module in own])
    projections = [nn.Linear(32, width).to(DEVICE, DTYPE).requires_grad_(False) for width in (48, 16)]
    states, joined = torch.randn(3, 32).to(DEVICE, DTYPE), modules.JoinedLinears(projections)
    assert torch.equal(joined(0, states), projections[0](states)) and [*modules._known.values()] == [False]


@pytest.mark.skipif(DEVICE != "cpu", reason="Triton's products of fp32 are tf32 there")
@pytest.mark.parametrize("family", [name for name, found in PROJECTIONS.items() if found])
def test_a_model_samples_the_same_with_projections_together(family, monkeypatch):
    policy, settings = policy_of(family), SamplingParams(max_new_tokens=6, n=2, seed=4)
    expected = BuiltinEngine(policy, eager=True).generate(prompts((5, 17, 9, 1)), settings)
    monkeypatch.setattr(model_runner, "has_kernels", lambda _: True)
    launches, made = [], modules.small_batch_linears
    monkeypatch.setattr(modules, "is_plain", lambda *_: True)
    monkeypatch.setattr(modules, "small_batch_linears", lambda x, own: launches.append(len(x)) or made(x, own))
    found = BuiltinEngine(policy, eager=True).generate(prompts((5, 17, 9, 1)), settings)
    assert len(launches) > 6
    assert [answer.ids for answer in found] == [answer.ids for answer in expected]
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(torch.tensor(ours.log_probs), torch.tensor(theirs.log_probs), atol=2e-5, rtol=0)


def test_what_is_no_such_norm_stays():
    class HalfRMSNorm(nn.Module):
        """Of the first half alone."""

        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(8, device=DEVICE, dtype=DTYPE)), 1e-6

        def forward(self, x):
            return torch.cat([x[..., :4] * 2, x[..., 4:]], -1) * self.weight

    modules._kinds.clear()
    model, x = nn.Sequential(HalfRMSNorm(), nn.LayerNorm(8).to(DEVICE, DTYPE)), torch.randn(2, 8).to(DEVICE, DTYPE)
    expected = model(x)
    with fused_modules(model.modules()):
        assert torch.equal(model(x), expected) and "forward" not in vars(model[1])
    assert [*modules._kinds.values()] == [None]


KNOWN = {"gpt_oss": [], "deepseek_v2": [True] * 3, "qwen3_next": [True], "gemma2": [False], "nemotron_h": []}
"""Of MLPs and experts, by shape."""


@pytest.mark.parametrize("family", KNOWN)
def test_a_model_samples_the_same_with_them(family, monkeypatch):
    modules._kinds.clear()
    modules._known.clear()
    policy, asked = policy_of(family), prompts((5, 17, 9, 1))
    settings = SamplingParams(max_new_tokens=6, n=2, seed=4)
    with monkeypatch.context() as patched:
        patched.setattr(modules, "_epsilon", lambda _: None)
        patched.setattr(modules, "_has_stacked_experts", lambda _: False)
        patched.setattr(modules, "_is_gated_mlp", lambda _: False)
        expected = BuiltinEngine(policy, eager=True).generate(asked, settings)
    assert not modules._kinds
    monkeypatch.setattr(model_runner, "has_kernels", lambda _: True)
    found = BuiltinEngine(policy, eager=True).generate(asked, settings)
    assert any(kind is not None for kind in modules._kinds.values())
    assert [*modules._known.values()] == KNOWN[family]
    assert [answer.ids for answer in found] == [answer.ids for answer in expected]
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(torch.tensor(ours.log_probs), torch.tensor(theirs.log_probs), atol=2e-5, rtol=0)
