"""Log-probs of prompts: those of plain transformers, for packed, recurrent and padded models."""

import pytest
import torch

from tests.rollout.test_builtin_engine import policy_of, prompts
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.sampling import SamplingParams


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text", "bloom"])
@pytest.mark.parametrize("most", [8192, 6])  # tokens of a pass: the longest prompt takes several
def test_prompts_have_the_log_probs_of_plain_transformers(family, most):
    policy = policy_of(family)
    policy.inner.set_attn_implementation("eager")
    given = prompts((3, 20, 5))
    with torch.no_grad():
        expected = [policy.inner(torch.tensor([ids])).logits[0].log_softmax(-1) for ids in given]
    engine = BuiltinEngine(policy_of(family), max_num_batched_tokens=most)
    for rollout in engine.generate(given, SamplingParams(max_new_tokens=2, prompt_log_probs=2)):
        ids, log_probs_TV = given[rollout.prompt], expected[rollout.prompt][:-1]
        found = rollout.prompt_log_probs
        own_T = log_probs_TV.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found.log_probs), own_T, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(
            torch.tensor(found.alternatives.log_probs), log_probs_TV.topk(2).values, atol=2e-5, rtol=1e-5
        )
