"""States of recurrent layers: sampled log-probs depend on them; samples do not change their prompts' states."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.models.families import log_prob_gap
from tests.rollout.test_builtin_engine import policy_of
from tests.tiny import RECURRENT_FAMILIES
from trimtab.rollout.builtin import state_cache
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.builtin.model_runner import ModelRunner
from trimtab.rollout.builtin.state_cache import DecodeStates, state_bytes
from trimtab.rollout.sampling import SamplingParams


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


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_the_size_of_a_sequences_states_is_known_before_any_is_sampled(family, monkeypatch):
    policy, sizes = policy_of(family), set()
    split = state_cache.split_states

    def measured(cache, count):
        sizes.add(state_bytes(cache) / count)
        return split(cache, count)

    monkeypatch.setattr(state_cache, "split_states", measured)
    shape, _ = ModelRunner.measure(policy)
    BuiltinEngine(policy, max_num_seqs=4).generate([[5, 6, 7], [8, 9]], SamplingParams(max_new_tokens=3), seeds=[0, 1])
    assert sizes == {shape.state_bytes} and shape.state_bytes > 0
    if "experts" in str(policy):  # grouped products have no fake kernel in fp32
        return
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert ModelRunner.measure(policy)[0] == shape
