"""Kernels for decode steps of recurrent layers do what transformers' functions do, and replace them only then."""

import importlib
from collections.abc import Callable

import pytest
import torch

from tests.rollout.kernel_device import CLOSE, DEVICE, DTYPE
from tests.rollout.test_builtin_engine import prompts
from tests.rollout.test_cuda_engine import policy_of
from tests.tiny import RECURRENT_FAMILIES, tiny_model
from trimtab.models import recurrent, recurrent_kernels
from trimtab.models.recurrent_kernels import StepFunction, step_forward
from trimtab.rollout.builtin import state_cache
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.sampling import SamplingParams

S, H = 3, 4
FAMILIES = {
    "torch_recurrent_gated_delta_rule": "qwen3_5",
    "recurrent_kimi_delta_attention": "kimi_linear",
    "mamba2_selective_state_update": "mamba2",
    "causal_conv1d_update": "qwen3_5",
}


def function(name: str) -> Callable:
    """Of transformers, which imports Triton."""
    family = FAMILIES[name]
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)


def random(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def delta_rule(width: int, wide: int, norm: bool, *by_key: int) -> dict:
    mixed = random(S, 2 * H * width + H * wide, 1).transpose(1, 2)
    query, key, value = mixed.split([H * width, H * width, H * wide], -1)
    return {
        "query": query.reshape(S, 1, H, width),
        "key": key.reshape(S, 1, H, width),
        "value": value.reshape(S, 1, H, wide),
        "g": -random(S, 1, H, *by_key, dtype=torch.float32).abs(),
        "beta": random(S, 1, H).sigmoid(),
        "initial_state": random(S, H, width, wide, dtype=torch.float32),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": norm,
    }


def mamba2(groups: int, width: int, size: int, bias: bool, skip: bool, gate: bool = False) -> dict:
    return {
        "state": random(S, H, width, size, dtype=torch.float32),
        "hidden_states": random(S, H, width),
        "dt": random(S, 1, H).transpose(1, 2).expand(-1, -1, width),
        "A": (-random(H, dtype=torch.float32).exp())[:, None, None].expand(-1, width, size),
        "B": random(S, groups, size),
        "C": random(S, groups + 1, size)[:, :groups],
        "D": random(H)[:, None].expand(-1, width) if skip else None,
        "dt_bias": random(H)[:, None].expand(-1, width) if bias else None,
        "dt_softplus": True,
        "z": random(S, 1, H * width).view(S, H, width) if gate else None,
    }


def convolution(channels: int, taps: int, places: int, bias: bool, activation: str | None) -> dict:
    return {
        "hidden_states": random(S, 1, channels).transpose(1, 2),
        "conv_state": random(S, channels, places),
        "weight": random(channels, taps),
        "bias": random(channels) if bias else None,
        "activation": activation,
    }


CASES = {
    "delta rule": ("torch_recurrent_gated_delta_rule", delta_rule(16, 32, True)),
    "delta rule of odd widths": ("torch_recurrent_gated_delta_rule", delta_rule(12, 40, False)),
    "delta rule with a decay for every key": ("recurrent_kimi_delta_attention", delta_rule(24, 16, True, 24)),
    "mamba2 with a gate": ("mamba2_selective_state_update", mamba2(2, 16, 32, True, True, gate=True)),
    "mamba2": ("mamba2_selective_state_update", mamba2(2, 16, 32, True, True)),
    "mamba2 of odd widths": ("mamba2_selective_state_update", mamba2(1, 40, 12, False, False)),
    "convolution": ("causal_conv1d_update", convolution(300, 4, 4, False, "silu")),
    "convolution with a bias": ("causal_conv1d_update", convolution(64, 4, 4, True, "silu")),
    "convolution of 3 with a short state": ("causal_conv1d_update", convolution(20, 3, 2, True, None)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_makes_the_output_and_state_of_the_function(case):
    name, given = CASES[case]
    kernel, state = recurrent_kernels.STEPS[name]
    results = []
    for how in (function(name), kernel):
        own = given | {state: given[state].clone()}
        for _ in range(3):
            out = how(**own)
            if isinstance(out, tuple):
                out, own[state] = out
        results.append((out, own[state]))
    for expected, found in zip(*results):
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("case", CASES)
def test_a_function_is_replaced_by_a_kernel_that_agrees_and_by_no_other(case, caplog):
    name, given = CASES[case]
    kernel, state = recurrent_kernels.STEPS[name]
    before = given[state].clone()
    right = StepFunction(function(name), kernel, state)
    assert right._agrees((), given) and torch.equal(given[state], before)

    def wrong(*arguments, **named):
        out = kernel(*arguments, **named)
        (out[1] if isinstance(out, tuple) else named[state])[0].mul_(1.5)
        return out

    wrong.__signature__ = right._signature
    assert not StepFunction(function(name), wrong, state)._agrees((), given) and "its kernel differs by" in caplog.text


def test_a_function_of_another_package_may_have_other_names():
    name, given = CASES["convolution"]
    own = function(name)

    def update(x, state, weight, bias=None, activation=None):
        return own(x, state, weight, bias, activation)

    step = StepFunction(update, *recurrent_kernels.STEPS[name])
    expected, found = given["conv_state"].clone(), given["conv_state"].clone()
    rest = given["weight"], given["bias"]
    for state, how in ((expected, own), (found, step)):
        out = how(given["hidden_states"], state, *rest, activation=given["activation"])
    torch.testing.assert_close(found, expected, **CLOSE)
    assert list(step._agree.values()) == [True] and out.shape == given["hidden_states"].shape


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_a_model_samples_the_same_with_kernels(family, monkeypatch):
    policy, asked = policy_of(family), prompts((5, 17, 9, 1))
    settings = SamplingParams(max_new_tokens=6, n=2, seed=4)
    expected = BuiltinEngine(policy, eager=True).generate(asked, settings)
    step_forward.cache_clear()
    recurrent_kernels._known.clear()
    monkeypatch.setattr(recurrent, "has_kernels", lambda device: True)
    found = BuiltinEngine(policy, eager=True).generate(asked, settings)
    assert [answer.ids for answer in found] == [answer.ids for answer in expected]
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(torch.tensor(ours.log_probs), torch.tensor(theirs.log_probs), atol=2e-5, rtol=0)
    forwards = {type(module).forward for module in recurrent.recurrent_modules(policy.inner)}
    steps = [f for own in forwards for f in step_forward(own).__globals__.values() if isinstance(f, StepFunction)]
    assert all(step._agree and all(step._agree.values()) for step in steps)
    assert steps, family
    whole = {fresh for (kind, *_, fresh), same in recurrent_kernels._known.items() if same}
    assert whole == ({True, False} if family.startswith("qwen3_5") else set())


@torch.no_grad()
def test_a_module_that_does_something_else_keeps_its_forward():
    model = tiny_model("qwen3_5_text").to(DEVICE, DTYPE)
    module, cache = recurrent.recurrent_modules(model)[0], state_cache.empty_cache(model.config)
    model(input_ids=torch.arange(3, 8, device=DEVICE)[None], past_key_values=cache)
    hidden = random(1, 1, module.in_proj_z.in_features)

    class Doubled(type(module)):
        def forward(self, *given, **named):
            return 2 * super().forward(*given, **named)

    before = [tensor.clone() for tensor in state_cache.tensors_of(cache.layers)]
    assert recurrent_kernels._is_same(module, hidden, cache)
    module.__class__ = Doubled
    assert not recurrent_kernels._is_same(module, hidden, cache)
    assert recurrent_kernels.delta_net_output(torch.nn.Linear(2, 2), hidden, cache) is None
    assert all(map(torch.equal, before, state_cache.tensors_of(cache.layers)))


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 2, 5, 70])
def test_whole_sequences_leave_the_states_of_the_module(length):
    """Shorter than the convolution, in one of its own chunks, in several; then another token."""
    model = tiny_model("qwen3_5_text").to(DEVICE, DTYPE)
    module = recurrent.recurrent_modules(model)[0]
    hidden, later = (random(S, count, module.in_proj_z.in_features) for count in (length, 1))
    results = []
    for forward in (lambda x, cache: module(x, cache_params=cache), lambda x, cache: run(module, x, cache)):
        cache = state_cache.empty_cache(model.config)
        outs = [forward(x, cache) for x in (hidden, later)]
        results.append([*outs, *state_cache.tensors_of([cache.layers[module.layer_idx]])])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)


def run(module: torch.nn.Module, hidden: torch.Tensor, cache: object) -> torch.Tensor:
    out = recurrent_kernels.delta_net_output(module, hidden, cache)
    assert out is not None
    return out


@torch.no_grad()
def test_long_prompts_are_read_in_chunks(monkeypatch):
    monkeypatch.setattr(recurrent_kernels, "LONGEST", 7)
    model = tiny_model("qwen3_5_text").to(DEVICE, DTYPE)
    module = recurrent.recurrent_modules(model)[0]
    hidden = random(1, 8, module.in_proj_z.in_features)
    for length in (7, 8):
        cache = state_cache.empty_cache(model.config)
        out = recurrent_kernels.delta_net_output(module, hidden[:, :length], cache)
        assert (out is None) == (length == 8)


def test_a_forward_without_such_functions_stays():
    assert step_forward(torch.nn.Linear.forward) is torch.nn.Linear.forward
