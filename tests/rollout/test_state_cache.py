"""States of recurrent layers: sampled log-probs depend on them; samples do not change their prompts' states."""

import pytest
import torch

from tests.models.families import log_prob_gap
from tests.rollout.test_builtin_engine import policy_of
from tests.tiny import RECURRENT_FAMILIES
from trimtab.rollout.builtin.state_cache import DecodeStates


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_without_states_the_log_probs_would_be_others(family, monkeypatch):
    joined = DecodeStates.of.__func__

    def forgetful(cls, states, config):
        found = joined(cls, states, config)
        for layer in found.cache.layers:
            for kind in ("conv_states", "recurrent_states"):
                for state in getattr(layer, kind, {}).values():
                    if isinstance(state, torch.Tensor):
                        state.zero_()
        return found

    policy = policy_of(family)
    assert log_prob_gap(policy) < 2e-4
    monkeypatch.setattr(DecodeStates, "of", classmethod(forgetful))
    assert log_prob_gap(policy) > 1e-2
