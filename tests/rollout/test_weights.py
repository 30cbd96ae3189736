"""Which weights an answer comes from: those the trainer has at that moment, adapters on or off."""

import pytest
import torch

from tests.rollout.answers import fill_adapters, ids_of
from tests.rollout.test_builtin_engine import hugging_face, policy_of, prompts
from tests.samples import random_examples
from tests.tiny import tiny_model
from trimtab.config.training_options import LoraOptions
from trimtab.data.batches import TokenBatch
from trimtab.models.lora import adapters_off, add_adapters
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.sampling import SamplingParams

GREEDY = SamplingParams(max_new_tokens=16, temperature=0)


@pytest.mark.short(1)
@pytest.mark.parametrize("family", ["qwen2_moe", "llama"])
def test_adapters_on_and_off(family):
    base = [hugging_face(tiny_model(family), ids, 16) for ids in prompts()]
    adapted = add_adapters(tiny_model(family), LoraOptions(lora_rank=4, target_modules=["all-linear"])).eval()
    fill_adapters(adapted, 0.2)
    on = [hugging_face(adapted, ids, 16) for ids in prompts()]
    policy = Policy(adapted)
    choose_path(policy)
    engine = BuiltinEngine(policy)
    assert ids_of(engine.generate(prompts(), GREEDY)) == on != base
    with adapters_off(policy):
        assert ids_of(engine.generate(prompts(), GREEDY)) == base
    assert ids_of(engine.generate(prompts(), GREEDY)) == on


def test_after_a_step_the_same_prompts_are_answered_by_the_new_weights():
    """Nothing that was read of a prompt before the step survives it."""
    policy = policy_of()
    engine = BuiltinEngine(policy)
    before = ids_of(engine.generate(prompts(), GREEDY))
    optimiser = torch.optim.AdamW(policy.parameters(), lr=0.05)
    policy.train()
    policy(TokenBatch.of(random_examples([9, 5]))).log_probs_N.mean().neg().backward()
    optimiser.step()
    after = ids_of(engine.generate(prompts(), GREEDY))
    model = tiny_model("llama")
    model.load_state_dict(policy.inner.state_dict())
    expected = [hugging_face(model, ids, 16) for ids in prompts()]
    assert after == expected != before
