"""Rollouts with int8 weights: what is computed, how far it is off, and that the trained weights know nothing of it."""

import copy

import pytest
import torch

from tests.rollout.answers import fill_adapters, ids_of, sampled_log_probs, trained_log_probs
from tests.rollout.test_builtin_engine import policy_of, prompts
from tests.samples import random_examples
from tests.tiny import tiny_model
from trimtab.config.training_options import LoraOptions
from trimtab.data.batches import TokenBatch
from trimtab.models.lora import add_adapters
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.builtin.linear import Int8Weight, packed, quantize_int8
from trimtab.rollout.sampling import SamplingParams

SAMPLING = SamplingParams(max_new_tokens=16, n=2, seed=3)


def rounded(policy):
    """The same policy, its linear layers but the head and adapters rounded by hand."""
    policy = copy.deepcopy(policy)
    for name, layer in policy.named_modules():
        if type(layer) is torch.nn.Linear and not {"lm_head", "embed_out", "lora_A", "lora_B"} & set(name.split(".")):
            step = layer.weight.detach().abs().max(1, keepdim=True).values / 127
            layer.weight.data = torch.round(layer.weight.data / step) * step
    return policy


def answers_of_rounded(policy):
    answers = BuiltinEngine(policy, weight_only_int8=True).generate(prompts(), SAMPLING)
    exact = trained_log_probs(rounded(policy), answers)
    torch.testing.assert_close(sampled_log_probs(answers), exact, atol=1e-4, rtol=1e-4)
    return answers


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox"])
def test_answers_are_those_of_rounded_weights_and_close_to_the_trained_ones(family):
    policy = policy_of(family)
    answers = answers_of_rounded(policy)
    off = (sampled_log_probs(answers) - trained_log_probs(policy, answers)).abs()
    assert 0 < off.mean() < 0.05 and off.max() < 0.4


def test_a_weight_is_off_by_half_a_step_at_most():
    weight = torch.randn(5, 33) * torch.tensor([1e-3, 1.0, 50.0, 0.0, 1.0])[:, None]
    codes, scales = quantize_int8(weight)
    assert codes.dtype == torch.int8 and torch.isfinite(scales).all()
    assert ((codes * scales[:, None] - weight).abs() <= scales[:, None] / 2 * 1.0001).all()


@pytest.mark.parametrize("inner", [128, 127])
def test_packing_keeps_every_code(inner):
    codes = torch.arange(-127, 128, dtype=torch.int8).repeat(3)[: 5 * inner].view(5, inner)
    weight = Int8Weight(packed(codes), torch.ones(5), None, inner)
    assert weight.words_OJ.shape == (5, 64) and torch.equal(weight.codes(torch.bfloat16), codes.bfloat16())


def test_trained_weights_stay_bit_for_bit_and_training_uses_them():
    policy = policy_of().train()
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    batch = TokenBatch.of(random_examples([9, 5]))
    expected = policy(batch).log_probs_N
    engine = BuiltinEngine(policy, weight_only_int8=True)
    engine.generate(prompts(), SAMPLING)
    assert torch.equal(policy(batch).log_probs_N, expected)
    after = policy.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_new_weights_are_rounded_at_once():
    policy = policy_of()
    engine = BuiltinEngine(policy, weight_only_int8=True)
    before = engine.generate(prompts(), SAMPLING)
    optimiser = torch.optim.SGD(policy.parameters(), lr=0.5)
    policy(TokenBatch.of(random_examples([9, 5]))).log_probs_N.mean().backward()
    optimiser.step()
    after = engine.generate(prompts(), SAMPLING)
    fresh = BuiltinEngine(policy, weight_only_int8=True).generate(prompts(), SAMPLING)
    assert ids_of(after) == ids_of(fresh) != ids_of(before)
    engine.sleep()
    assert ids_of(engine.generate(prompts(), SAMPLING)) == ids_of(fresh)


def test_adapters_are_not_rounded():
    policy = Policy(add_adapters(tiny_model("llama"), LoraOptions(lora_rank=4, target_modules=["q_proj", "lm_head"])))
    fill_adapters(policy, 0.2)
    choose_path(policy)
    answers_of_rounded(policy)
