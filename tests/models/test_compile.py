"""Compiled layers give what plain ones give, are used in training and scoring passes alone, and are left plain where a
trial finds something wrong. The compiler is one that fuses nothing and is fast; `-m long` has the real one."""

import contextlib
import os
import re
import shutil
import signal
from collections import Counter
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from tests import warm
from tests.tiny import FAMILIES, tiny_model
from trimtab.config.jobs import SFTOptions
from trimtab.config.rl_jobs import GRPOOptions
from trimtab.distributed.device import find_device
from trimtab.distributed.mesh import Mesh
from trimtab.errors import UserError
from trimtab.interrupts import unheard_by_children
from trimtab.models import compile as compiled
from trimtab.models.activation_memory import enable_gradient_checkpointing, layers_of
from trimtab.models.compile import COMPILER, CompiledLayer, compile_layers, fuse_layers, graphs_so_far
from trimtab.models.load import fuse_if_exact
from trimtab.models.lora import adapters_off, add_adapters
from trimtab.models.packed import scoring
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path, probe_batch
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.sampling import SamplingParams

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fast_compiler(monkeypatch):
    assert not torch._dynamo.config.disable, "these tests would pass without compiling anything"
    monkeypatch.setattr(compiled, "COMPILER", {"backend": "aot_eager"})


def policy_of(family="llama", **changes):
    policy = Policy(tiny_model(family, **changes))
    choose_path(policy)
    return policy.train()


def taking(policy):
    def take():
        found = [p.grad for p in policy.parameters() if p.grad is not None]
        policy.zero_grad()
        return found

    return take


def gradient(policy, lengths):
    values = policy(probe_batch(policy.config, CPU, lengths)).log_probs_N
    (values * torch.linspace(1, 2, len(values))).sum().backward()
    return values.detach(), torch.cat([g.flatten() for g in taking(policy)()])


def test_compiled_passes_are_plain_ones_and_an_engine_runs_none():
    policy = policy_of()
    engine = BuiltinEngine(policy, max_num_seqs=4)
    before = [rollout.ids for rollout in engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=5, n=2))]
    plain = [gradient(policy, lengths) for lengths in ((40, 9), (17, 30, 5))]
    begun = Counter(counters["aot_autograd"])
    trial = compile_layers(policy, gradients=taking(policy))
    assert not trial.problem and trial.seconds > 0 and all(p.grad is None for p in policy.parameters())
    pieces = Counter(counters["aot_autograd"]) - begun
    assert pieces["total"] == pieces["ok"]  # none was traced and thrown away, which no cache would know
    graphs = graphs_so_far()
    for lengths, (values, slopes) in zip(((40, 9), (17, 30, 5)), plain):
        ours, our_slopes = gradient(policy, lengths)
        torch.testing.assert_close(ours, values)
        torch.testing.assert_close(our_slopes, slopes, rtol=1e-4, atol=1e-5)
    with scoring(policy):
        torch.testing.assert_close(policy(probe_batch(policy.config, CPU, (40, 9))).log_probs_N, plain[0][0])
    calls = []
    for layer in layers_of(policy.inner):
        assert isinstance(layer.forward, CompiledLayer)
        layer.forward._compiled = lambda *a, **k: calls.append(1)
    after = [rollout.ids for rollout in engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=5, n=2))]
    assert after == before and not calls and graphs_so_far() == graphs  # no row met something new


def adapted_policy(**words):
    policy = Policy(add_adapters(policy_of().model, SFTOptions(lora_rank=4, **words))).train()
    choose_path(policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.3)  # else adapters would begin with nothing to say
    return policy


def test_above_frozen_embeddings_every_layer_is_given_what_one_compiled_layer_takes(monkeypatch):
    policy, kinds = adapted_policy(), []
    plain = gradient(policy, (40, 9))

    def recording(call):
        def recorded(hidden, *others, **named):
            kinds.append((torch.is_grad_enabled(), hidden.requires_grad, hidden._is_view()))
            return call(hidden, *others, **named)

        return recorded

    monkeypatch.setattr(torch, "compile", lambda call, **_: recording(call))
    assert not compile_layers(policy, gradients=taking(policy)).problem
    assert set(kinds) == {(True, True, False), (False, False, False)}  # it learns, it scores
    again = gradient(policy, (40, 9))
    assert torch.equal(again[0], plain[0]) and torch.equal(again[1], plain[1])


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (lambda call: lambda *a, **k: call(*a, **k) * 1.05, "values of compiled ones are off by"),
        (lambda call: lambda *a, **k: call(*a, **k) * float("nan"), "values of compiled ones are off by nan"),
        (lambda call: lambda *a, **k: call(*a, **k).detach(), "compiled ones give other gradients"),
        (lambda call: lambda *a, **k: 1 / 0, "the compiler fails \\(division by zero\\)"),
    ],
)
def test_what_the_trial_finds_wrong_leaves_layers_plain(monkeypatch, broken, told):
    policy = policy_of()
    monkeypatch.setattr(torch, "compile", lambda call, **_: broken(call))
    plain = gradient(policy, (40, 9))
    trial = compile_layers(policy, gradients=taking(policy))
    assert re.match(told, trial.problem) and not policy.attention.compiled
    again = gradient(policy, (40, 9))
    assert torch.equal(again[0], plain[0]) and torch.equal(again[1], plain[1])


def in_fp32(layer_forward):
    """What a compiler may do with half precision: round at the end alone."""

    def call(hidden, *others, **named):
        layer = layer_forward.__self__
        wide = {name: weight.float() for name, weight in layer.named_parameters()}
        angles = tuple(x.float() for x in named.pop("position_embeddings"))
        with torch.nn.utils.stateless._reparametrize_module(layer, wide):
            return layer_forward(hidden.float(), *others, position_embeddings=angles, **named).to(hidden.dtype)

    return call


@pytest.mark.parametrize("learns", [pytest.param(True, marks=pytest.mark.long), False])
def test_rounding_over_many_layers_is_believed_and_a_wrong_layer_is_not(monkeypatch, learns):
    monkeypatch.setattr(compiled, "FIRST", (50, 52))  # bf16 is slow on a CPU that does not know it
    monkeypatch.setattr(compiled, "OTHER", (21, 13, 7))
    policy = Policy(tiny_model("llama", num_hidden_layers=16)).train()
    choose_path(policy)
    policy.bfloat16()
    gradients = taking(policy) if learns else None
    monkeypatch.setattr(torch, "compile", lambda call, **_: in_fp32(call))
    assert compile_layers(policy, gradients=gradients).problem == ""
    for layer in layers_of(policy.inner):
        right = layer.forward._compiled
        layer.forward._compiled = lambda hidden, *a, right=right, **k: 2 * right(hidden, *a, **k) - hidden
    assert re.match("values of compiled ones are off by", compile_layers(policy, gradients=gradients).problem)


def test_a_gradient_that_is_lost_on_the_way_is_found(monkeypatch):
    policy = policy_of()

    def losing(call):
        return lambda hidden, *a, **k: hidden + (call(hidden.detach(), *a, **k) - hidden.detach())

    monkeypatch.setattr(torch, "compile", lambda call, **_: losing(call))
    assert re.match("gradients of compiled ones are off by", compile_layers(policy, gradients=taking(policy)).problem)


def test_a_model_that_compiles_anew_for_every_length_is_left_plain(monkeypatch):
    policy = policy_of()
    counted = iter(range(100))
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    monkeypatch.setattr(compiled, "graphs_so_far", lambda: next(counted))
    assert compile_layers(policy).problem == "they are compiled anew for rows of another length"


def test_padded_rows_are_not_compiled():
    policy = policy_of("bloom")
    assert policy.path == "padded" and compile_layers(policy).problem == "its rows are padded"


def test_without_a_compiler_it_is_said_in_one_line(monkeypatch):
    from torch._inductor import cpp_builder, exc

    def missing():
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(UserError, match=r"^--compile on: no C\+\+ compiler is here"):
        compiled.require_compiler(CPU)
    with pytest.raises(UserError, match=r"^--compile on: layers cannot be compiled for an Apple GPU here"):
        compiled.require_compiler(torch.device("mps"))


@pytest.mark.long
def test_adapters_on_and_off_and_layers_that_recompute():
    policy = adapted_policy()
    enable_gradient_checkpointing(policy, SFTOptions(gradient_checkpointing=True, gradient_checkpointing_layers=1))
    off = partial(adapters_off, policy.model)
    row = probe_batch(policy.config, CPU, (40, 9))

    def everything():
        with off(), scoring(policy):
            base = policy(row).log_probs_N
        return [*gradient(policy, (40, 9)), base]

    plain = everything()
    assert not torch.equal(plain[0], plain[2])
    assert not compile_layers(policy, gradients=taking(policy), scores=[contextlib.nullcontext, off]).problem
    graphs = graphs_so_far()
    for ours, theirs in zip(everything(), plain):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()
    assert graphs_so_far() == graphs


@pytest.mark.parametrize("family", ["llama", "mamba", "gpt2"])
def test_layers_that_cannot_be_fused_stay_as_they_are(family):
    policy = policy_of(family)
    before = [vars(module).get("forward") for module in policy.modules()]
    assert "bf16" in fuse_layers(policy, CPU, bf16=True)
    assert not policy.attention.fused and [vars(module).get("forward") for module in policy.modules()] == before


@pytest.mark.parametrize("family", ["mamba", "gpt2", "qwen2_moe"])
def test_layers_unlike_llamas_are_refused_by_name(family, monkeypatch):
    monkeypatch.setattr(compiled, "is_hopper", lambda device: True)
    policy = policy_of(family).to(torch.bfloat16)
    assert fuse_layers(policy, CPU, bf16=True) == f"{type(policy.inner).__name__} has other layers than Llama"


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"exact": "off"}, "--exact off"),
        ({"compile": "on"}, "not with --compile on"),
        ({"aux_loss_coef": 0.1}, "not with --aux_loss_coef"),
        ({"weight_only_int8": True}, "not with --weight_only_int8"),
        ({"gradient_checkpointing": True, "gradient_checkpointing_keep": "attention"}, "_checkpointing_keep"),
        ({"use_liger_kernel": True}, "not with --use_liger_kernel"),
        ({}, "it needs bf16"),
    ],
)
def test_what_is_not_exact_says_why_and_is_refused_if_it_was_asked_for(changes, reason):
    policy, options = Policy(tiny_model("llama")), GRPOOptions(pretrain="model", bf16=True, **changes)
    fuse_if_exact(policy, options, find_device(), Mesh())
    assert reason in policy.not_exact and not policy.attention.fused
    if options.exact != "off":
        asked = GRPOOptions(pretrain="model", bf16=True, **changes | {"exact": "on"})
        with pytest.raises(UserError, match=f"^--exact on: .*{reason}"):
            fuse_if_exact(policy, asked, find_device(), Mesh())
    frozen = policy.requires_grad_(False)
    fuse_if_exact(frozen, GRPOOptions(pretrain="model", bf16=True, exact="on"), find_device(), Mesh())
    assert frozen.not_exact.startswith("it needs bf16")


@pytest.mark.long
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_that_is_packed_is_compiled(family):
    torch._dynamo.reset()
    policy = policy_of(family)
    plain, graphs = gradient(policy, (40, 9)), graphs_so_far()
    trial = compile_layers(policy, gradients=taking(policy))
    assert (graphs_so_far() > graphs) == (policy.path == "packed")
    assert trial.problem == ("" if policy.path == "packed" else "its rows are padded")
    for ours, theirs in zip(gradient(policy, (40, 9)), plain):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles for a CPU with g++")
def test_the_compiler_itself(monkeypatch):
    monkeypatch.setattr(compiled, "COMPILER", COMPILER)
    torch._dynamo.reset()
    policy = policy_of()
    plain = gradient(policy, (40, 9))
    assert not compile_layers(policy, gradients=taking(policy)).problem
    for ours, theirs in zip(gradient(policy, (40, 9)), plain):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles for a CPU with g++")
def test_a_second_start_finds_all_that_adapted_layers_were_compiled_to(monkeypatch):
    monkeypatch.setattr(compiled, "COMPILER", COMPILER)
    policy = adapted_policy(lora_dropout=0.1)
    scores = [contextlib.nullcontext, partial(adapters_off, policy.model)]

    def start():
        torch._dynamo.reset()
        counters.clear()
        assert not compile_layers(policy, gradients=taking(policy), scores=scores).problem
        return counters["stats"]["unique_graphs"], dict(counters["aot_autograd"])

    assert start()[0] == 6  # two pieces of a layer, for all of them: it learns, it scores, it scores without adapters
    graphs, pieces = start()
    assert graphs == 6 and pieces["autograd_cache_hit"] == pieces["total"] == 6


def test_what_compiles_for_an_accelerator_does_not_hear_a_signal_to_the_whole_group(monkeypatch):
    from torch._inductor.async_compile import AsyncCompile

    blocked = []
    monkeypatch.setattr(compiled, "has_kernels", lambda device: True)
    monkeypatch.setattr(AsyncCompile, "warm_pool", lambda: blocked.append(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
    policy = policy_of()
    assert not compile_layers(policy, gradients=taking(policy)).problem
    assert [{signal.SIGTERM, signal.SIGHUP} <= found for found in blocked] == [True]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & {signal.SIGTERM, signal.SIGHUP}


@pytest.mark.long
def test_what_was_asked_of_torchs_compile_processes_comes_after_a_signal_to_them():
    assert warm.call(ask_after_a_signal) == 0


def ask_after_a_signal():
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    config.compile_threads = 2
    with unheard_by_children():
        AsyncCompile.warm_pool()
    pool = AsyncCompile.process_pool()
    assert pool.submit(abs, -1).result(timeout=120) == 1
    os.kill(pool.process.pid, signal.SIGTERM)
    assert pool.submit(abs, -2).result(timeout=60) == 2
