"""The self-check, of a model with weights and of one without."""

import copy
import re
import sys
import types

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.samples import batch_of, random_examples
from tests.tiny import COMMON, FAMILIES, RECURRENT_FAMILIES, VARIANT_FAMILIES, tiny_model
from trimtab.config.jobs import SFTOptions
from trimtab.data.batches import TokenBatch
from trimtab.errors import UserError
from trimtab.models import attention, selfcheck
from trimtab.models.activation_memory import enable_gradient_checkpointing
from trimtab.models.policy import Policy
from trimtab.models.reward import RewardModel
from trimtab.models.selfcheck import choose_path
from trimtab.rollout.builtin.engine import BuiltinEngine, why_slow

PADDED = {"bloom", "falcon"}


@pytest.mark.parametrize("family", [*FAMILIES, *VARIANT_FAMILIES, *RECURRENT_FAMILIES])
def test_every_family_takes_a_path_whose_log_probs_are_hugging_faces(family):
    policy = Policy(tiny_model(family))
    verdict = choose_path(policy)
    assert verdict.path == ("padded" if family in PADDED else "packed"), verdict
    batch = batch_of([13, 3, 11, 7])
    torch.testing.assert_close(policy(batch).log_probs_N, each_alone(policy.inner, batch), atol=2e-5, rtol=1e-5)


def each_alone(model, batch):
    """Log-probs of the trained tokens by transformers, of one sequence at a time."""
    model.set_attn_implementation("eager")
    expected = []
    lengths = [span.length for span in batch.spans]
    for ids, trained in zip(batch.ids_T.split(lengths), batch.trained_T.split(lengths)):
        log_probs = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        expected.append(log_probs.gather(1, ids[1:, None])[:, 0][trained[1:]])
    return torch.cat(expected)


LONG = {
    "phimoe": {"sliding_window": 30},
    "qwen2_moe_window": {"sliding_window": 30},
    "mistral": {"sliding_window": 30},
    "gemma2": {"sliding_window": 30},
    "gpt_oss": {"sliding_window": 30},
    "llama4_text": {"attention_chunk_size": 30},
    "phi3_longrope": {
        "original_max_position_embeddings": 30,
        "rope_parameters": FAMILIES["phi3_longrope"]["rope_parameters"] | {"original_max_position_embeddings": 30},
    },
    "llama": {
        "max_position_embeddings": 30,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    },
}
"""With limits that lie beyond what the self-check runs."""


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("family", LONG)
def test_samples_on_both_sides_of_a_limit_have_the_log_probs_of_each_alone(family, allowed):
    """In rows of both, and in an order that would show what a pass leaves to the next."""
    changes = copy.deepcopy(LONG[family])
    policy = Policy(tiny_model(family, attn_implementation="eager", **changes))
    assert choose_path(policy, packed_allowed=allowed).path == ("packed" if allowed else "padded")
    assert all(getattr(policy.config, name) == value for name, value in changes.items())  # put back after the check
    for lengths in ([45, 20, 31], [12, 29], [30, 40]):
        batch = batch_of(lengths)
        ours, expected = policy(batch).log_probs_N, each_alone(tiny_model(family, **copy.deepcopy(changes)), batch)
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-5)


def test_a_window_that_would_be_dropped_is_seen_by_the_check(monkeypatch):
    """Though the samples that it runs are shorter."""
    monkeypatch.setattr(attention, "with_window", lambda module, mask, arguments: arguments)
    verdict = choose_path(Policy(tiny_model("phimoe", sliding_window=4096)))
    assert verdict.path == "padded" and "packed values differ" in verdict.reason


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "mixtral", "gpt2", "gpt_oss", "llama4_text", "qwen3_5_text", "nemotron_h", "lfm2"]
)
def test_packed_and_padded_paths_give_the_same_gradients(family):
    batch = batch_of([12, 3, 11, 7])
    gradients = []
    for allowed in (True, False):
        policy = Policy(tiny_model(family, attn_implementation="eager"))
        assert choose_path(policy, packed_allowed=allowed).path == ("packed" if allowed else "padded")
        policy(batch).log_probs_N.sum().backward()
        gradients.append({n: p.grad for n, p in policy.named_parameters()})
    for name, gradient in gradients[0].items():
        scale = gradient.abs().max().clamp(min=1e-6)
        assert (gradient - gradients[1][name]).abs().max() / scale < 1e-4, name


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h"])
def test_layers_with_a_state_are_computed_again_in_the_backward_pass(family):
    batch, gradients = batch_of([12, 3, 11, 7]), []
    for again in (False, True):
        policy = Policy(tiny_model(family))
        choose_path(policy)
        if again:
            enable_gradient_checkpointing(policy, SFTOptions(gradient_checkpointing=True))
            policy.train()
        policy(batch).log_probs_N.sum().backward()
        policy.inner.set_attn_implementation("eager")
        policy.inner(input_ids=batch.ids_T[None, :5], use_cache=False)  # plain, though the last row is still known
        gradients.append({n: p.grad for n, p in policy.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name])


UNPACKED = {
    "bloom": ({}, r"BloomAttention does not use transformers' attention interface"),
    "codegen": ({"rotary_dim": 8}, "CodeGenAttention does not use"),  # its configuration names no padding token
    "minimax": (
        {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "num_local_experts": 4},
        "MiniMaxLightningAttention does not use transformers' attention interface",
    ),
    "diffllama": ({"head_dim": 8}, "DiffLlamaAttention attends 4 times in 2 layers"),
    "doge": ({"num_experts": 4, "num_experts_per_tok": 2}, "DogeAttention fails in packed rows"),
}


@pytest.mark.parametrize("family", UNPACKED)
def test_the_reason_names_the_layers_that_keep_a_model_from_being_packed(family):
    changes, reason = UNPACKED[family]
    policy = Policy(AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**{**COMMON, **changes})))
    verdict = choose_path(policy)
    assert verdict.path == "padded" and re.match(reason, verdict.reason) and policy.not_packed == verdict.reason
    assert re.search(f"rows are padded, not packed: {reason}.*; --rollout_engine vllm", why_slow(policy))


@pytest.mark.parametrize(("name", "job"), [("causal_conv1d_fn", choose_path), ("causal_conv1d_update", BuiltinEngine)])
def test_kernels_of_another_version_are_told_before_anything_runs(monkeypatch, name, job):
    """One is called in training, the other for single tokens."""
    policy = Policy(tiny_model("qwen3_5_text"))
    choose_path(policy)

    def changed(signal, kernel, *, layout):
        raise AssertionError

    monkeypatch.setattr(sys.modules[type(policy.inner).__module__], name, changed)
    monkeypatch.setitem(sys.modules, "causal_conv1d", types.SimpleNamespace(__version__="9.0"))
    with pytest.raises(UserError, match=r"GatedDeltaNet cannot be run by .*changed\(\).* of causal_conv1d 9.0$"):
        job(policy)


def test_a_head_we_do_not_know_is_read_from_the_models_own_logits(monkeypatch):
    model = tiny_model("llama")
    plain = type(model).forward

    def doubled(self, *args, **kwargs):
        out = plain(self, *args, **kwargs)
        out.logits = out.logits * 2
        return out

    monkeypatch.setattr(type(model), "forward", doubled)
    policy = Policy(model)
    verdict = choose_path(policy)
    assert verdict.path == "logits" and "differ" in verdict.reason
    batch = batch_of([6, 4])
    entropy = policy(batch, entropy=True).entropy_N
    assert entropy.shape == batch.targets_N.shape and (entropy > 0).all()


def test_the_check_restores_training_mode():
    policy = Policy(tiny_model("llama")).train()
    choose_path(policy)
    assert policy.training and policy.inner.training


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "gemma2",
        "mistral",
        "gpt2",
        "bloom",
        "mixtral",
        "phi3_longrope",
        *VARIANT_FAMILIES,
        "qwen3_next",
        "mamba",
    ],
)
def test_two_answers_that_share_their_prompt_equal_two_whole_sequences(family):
    """Log-probs and gradients, with the prompt's tokens in the row once."""
    first, second = random_examples([14, 14], prompt_share=0.5)
    second = (np.concatenate([first[0][:7], second[0][7:12]]), second[1][:12])
    third = random_examples([9], seed=3)[0]
    results = []
    for shared in (None, [0, 7, 0]):
        policy = Policy(tiny_model(family))
        choose_path(policy)
        batch = TokenBatch.of([first, second, third], shared)
        log_probs = policy(batch).log_probs_N
        log_probs.square().sum().backward()
        results.append((batch, log_probs, {n: p.grad for n, p in policy.named_parameters()}))
    (whole, expected, gradients), (sharing, ours, our_gradients) = results
    assert sharing.tokens == whole.tokens - 7
    assert torch.equal(whole.sequence(1), sharing.sequence(1)) and torch.equal(whole.owners_N, sharing.owners_N)
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-5)
    for name, gradient in gradients.items():
        scale = gradient.abs().max().clamp(min=1e-3)
        assert (gradient - our_gradients[name]).abs().max() / scale < 1e-4, name


WIDER = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 4}


@pytest.fixture
def built(monkeypatch):
    """What was built to find a path."""
    models, plain = [], selfcheck._small_model

    def build(kind, config):
        models.append(plain(kind, config))
        return models[-1]

    monkeypatch.setattr(selfcheck, "_small_model", build)
    return models


def check(root, kind=Policy, **allowed):
    cpu = {"dtype": torch.float32, "device": torch.device("cpu")}
    return selfcheck.choose_path_without_weights(kind(root), **{"packed_allowed": True, **cpu, **allowed})


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_takes_the_path_that_it_takes_whole(family, built):
    wider = WIDER | ({"word_embed_proj_dim": 96} if family == "opt" else {})
    model = tiny_model(family, num_hidden_layers=3, **wider)
    verdict, whole = check(model), choose_path(Policy(model))
    assert (verdict.path, verdict.reason) == (whole.path, whole.reason.replace("in 3 layers", "in 2 layers"))
    assert [small.config.hidden_size for small in built] == [32]


@pytest.mark.parametrize(("kind", "root"), [(LlamaForCausalLM, Policy), (LlamaForSequenceClassification, RewardModel)])
def test_a_very_wide_model_is_checked_with_little_memory(kind, root, built):
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8}
    with torch.device("meta"):
        model = kind(LlamaConfig(**sizes, **heads, pad_token_id=128004, num_labels=1))
    module = root(model)
    assert check(model, root).path == "packed"
    assert module.config.hidden_size == 8192 and module.config.num_hidden_layers == 80
    assert sum(parameter.numel() for small in built for parameter in small.parameters()) < 2e7
    assert built[0].config.head_dim == 128


def test_an_attention_that_was_asked_for_is_checked_on_a_narrow_model_too(built):
    assert check(tiny_model("llama", **WIDER), packed_allowed=False).path == "padded"
    assert [small.config.hidden_size for small in built] == [32]


@pytest.mark.parametrize("change", [{"num_attention_heads": 3}, {"num_experts_per_tok": 99}, {"hidden_act": "none"}])
def test_where_a_narrow_model_does_not_work_a_wide_one_decides(change, built, monkeypatch):
    plain = selfcheck.narrow

    def broken(config):
        small = plain(config)
        for name, value in change.items():
            setattr(small, name, value)
        return small

    monkeypatch.setattr(selfcheck, "narrow", broken)
    assert check(tiny_model("mixtral", **WIDER)).path == "packed"
    assert built[-1].config.hidden_size == 96
