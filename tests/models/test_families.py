"""Every causal family of the installed transformers (make test-families), as docs/models.md says."""

import pytest
import torch

from tests.models.families import NAMES, documented_padded, log_prob_gap, tiny_policy
from tests.models.test_selfcheck import each_alone
from tests.samples import batch_of

TODAYS = {"gpt_oss", "llama4_text", "gemma4_text", "qwen3_5_text", "qwen3_next", "nemotron_h", "kimi_linear", "lfm2"}


def test_todays_families_train_with_rl():
    assert set(NAMES) >= TODAYS and not TODAYS & documented_padded()
    assert len(set(NAMES) - documented_padded()) >= 75


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_family_runs_as_documented(name):
    """Log-probs and gradients of packed or padded rows are transformers', and sampled log-probs the trainer's."""
    policy, batch = tiny_policy(name), batch_of([12, 3, 11, 7])
    assert (policy.path != "packed") == (name in documented_padded()), policy.not_packed
    if policy.path == "packed":
        assert log_prob_gap(policy) < 2e-5
    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    ours = policy(batch).log_probs_N
    found = torch.autograd.grad(ours.square().sum(), weights, allow_unused=True)
    theirs = each_alone(policy.inner, batch)
    expected = torch.autograd.grad(theirs.square().sum(), weights, allow_unused=True)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)
    for own, other in zip(found, expected, strict=True):
        if other is not None and other.abs().max() > 0:
            assert own is not None and (own - other).abs().max() <= 2e-3 * other.abs().max() + 1e-6
