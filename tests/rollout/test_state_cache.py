"""States of recurrent layers: sampled log-probs depend on them; captured steps keep them in a table."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.models.families import log_prob_gap
from tests.rollout.answers import RecordedOperations, decode_without_host, ids_of
from tests.rollout.test_builtin_engine import policy_of, prompts
from tests.tiny import RECURRENT_FAMILIES
from trimtab.rollout.builtin import cuda_graphs, state_cache
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


@pytest.fixture
def captured(monkeypatch):
    decode_without_host(monkeypatch)
    monkeypatch.setattr(cuda_graphs, "has_graphs", lambda device: True)
    monkeypatch.setattr(cuda_graphs, "capture_graph", RecordedOperations)
    monkeypatch.setattr(cuda_graphs.DecodeGraphs, "chunk_size", 3)
    monkeypatch.setattr(cuda_graphs.DecodeGraphs, "long_chunk_size", 7)


MEMORY = {"plenty": {}, "rows are reused": {"max_num_seqs": 3}, "preempted": {"max_num_seqs": 5, "kv_tokens": 40}}


@pytest.mark.parametrize("memory", [pytest.param(m, marks=[pytest.mark.long] * (m == "plenty")) for m in MEMORY])
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_captured_steps_sample_what_eager_ones_do(family, memory, captured):
    policy, asked, limits = policy_of(family), prompts((5, 17, 9)), [20, 3, 13]
    stops = () if memory == "preempted" else (7, 11, 19)
    settings = SamplingParams(max_new_tokens=20, n=3, stop_token_ids=stops, seed=4)
    expected = BuiltinEngine(policy, eager=True).generate(asked, settings, limits=limits)
    engine = BuiltinEngine(policy, **MEMORY[memory], page_size=8)
    for _ in range(2):  # the second time with the table that the first has left
        found = engine.generate(asked, settings, limits=limits)
        assert engine.captured.possible and engine.captured.decodes.graphs
        engine.captured.decodes.graphs.clear()  # a recording has the arguments of its session
        assert ids_of(found) == ids_of(expected)
        for ours, theirs in zip(found, expected):
            np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=2e-5)
    assert (engine.prefilled_tokens > 2 * (5 + 17 + 9)) == (memory == "preempted")


ASKED = prompts((5, 9, 12, 7), seed=3)


def one_after_another(policy, **how) -> dict:
    """Answers to requests that come while others run, some of which want what is not captured."""
    found = {}
    with BuiltinEngine(policy, **how).session(PLAIN) as session:
        for number, ids in enumerate(ASKED):
            session.add(ids, seed=number, sampling=LISTED if number == 1 else PLAIN, limit=[30, 5, 20, 9][number])
            found |= {answer.prompt: answer for answer in session.step(4)}
        found |= {answer.prompt: answer for answer in session}
    return {number: answer.ids for number, answer in found.items()}


PLAIN, LISTED = SamplingParams(max_new_tokens=30), SamplingParams(max_new_tokens=30, top_log_probs=2)


@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba2", "lfm2"])
def test_states_move_between_captured_and_eager_steps(family, captured, monkeypatch):
    policy, returned = policy_of(family), []
    expected = one_after_another(policy, eager=True)
    give_back = state_cache.StateTable.give_back
    note = lambda table, owners: returned.append(len(table._owners)) or give_back(table, owners)  # noqa: E731
    monkeypatch.setattr(state_cache.StateTable, "give_back", note)
    assert one_after_another(policy) == expected and max(returned) > 0
    for number in range(3):  # the first, second or third capture fails: with sequences in the table, or none
        left = iter(range(number))
        record = lambda work, pool, left=left: RecordedOperations(work, pool) if next(left, None) is not None else 1 / 0  # noqa: E731
        monkeypatch.setattr(cuda_graphs, "capture_graph", record)
        assert one_after_another(policy) == expected


def test_the_table_has_rows_for_the_sequences_there_are_and_grows_with_their_states(captured):
    policy, settings = policy_of("qwen3_5_text"), SamplingParams(max_new_tokens=25)
    expected = {
        n: BuiltinEngine(policy, eager=True).generate([ids], settings, seeds=[n])[0].ids for n, ids in enumerate(ASKED)
    }
    engine, sizes, found = BuiltinEngine(policy, max_num_seqs=256), [], {}
    with engine.session(settings) as session:
        for number, ids in enumerate(ASKED):
            session.add(ids, seed=number)
            for _ in range(3):
                found |= {answer.prompt: answer.ids for answer in session.step(1)}
            sizes.append(engine.captured.state_bytes // engine.memory.shape.state_bytes)
        found |= {answer.prompt: answer.ids for answer in session}
    assert found == expected and sizes == [1, 2, 4, 4]


def test_prepared_steps_begin_with_the_states_of_each_sequence(captured):
    policy = policy_of("qwen3_5_text")
    expected = [a.ids for a in BuiltinEngine(policy, eager=True).generate(ASKED, PLAIN, seeds=range(4))]
    engine = BuiltinEngine(policy, max_num_seqs=4)
    with engine.session(PLAIN) as session:
        session.prepare(64)
        assert engine.captured.state_bytes == 4 * engine.memory.shape.state_bytes
        for number, ids in enumerate(ASKED):
            session.add(ids, seed=number)
        found = {answer.prompt: answer.ids for answer in session}
    assert [found[number] for number in range(4)] == expected
    engine.sleep()
    assert engine.captured.state_bytes == 0
