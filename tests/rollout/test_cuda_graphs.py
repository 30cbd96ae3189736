"""The table that recorded steps read and move on: rows that go on are followed, not filled in anew. A recording is
replayed by doing the work again, so this runs anywhere."""

import numpy as np
import pytest

from tests.rollout.answers import DoneAgain, ids_of
from tests.rollout.test_builtin_engine import policy_of, prompts
from trimtab.rollout.builtin import cuda_graphs
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.sampling import SamplingParams


@pytest.fixture(autouse=True)
def _recorded(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "has_graphs", lambda device: True)
    monkeypatch.setattr(cuda_graphs, "capture_graph", DoneAgain)
    monkeypatch.setattr(cuda_graphs.DecodeGraphs, "chunk_size", 3)
    monkeypatch.setattr(cuda_graphs.DecodeGraphs, "long_chunk_size", 7)


@pytest.mark.parametrize(
    "memory",
    [
        {},
        {"max_num_seqs": 3},
        {"max_num_seqs": 5, "kv_tokens": 130, "page_size": 8},
        {"page_size": 4, "prefix_caching": True},
    ],
    ids=["at ease", "places are filled again", "some make room", "pages are kept"],
)
def test_recorded_steps_draw_what_single_ones_draw(memory):
    policy, asked = policy_of(), prompts((5, 17, 33, 1, 9))
    limits = [40, 3, 26, 31, 1]
    settings = SamplingParams(max_new_tokens=40, n=3, stop_token_ids=(7, 11, 19), seed=4)
    expected = BuiltinEngine(policy, eager=True).generate(asked, settings, limits=limits)
    engine = BuiltinEngine(policy, **memory)
    for _ in range(2):  # the second time with the table that the first has left
        found = engine.generate(asked, settings, limits=limits)
        assert engine.captured.possible and engine.captured.decodes.graphs
        engine.captured.decodes.graphs.clear()  # what is done again is done in the session it was made in
        assert ids_of(found) == ids_of(expected)
        assert [a.finish for a in found] == [a.finish for a in expected]
        for ours, theirs in zip(found, expected):
            np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=1e-5)
    assert {a.finish for a in expected} == {"stop", "length"} and len({len(a.ids) for a in expected}) > 5


SETTINGS, ASKED = SamplingParams(max_new_tokens=20, stop_token_ids=(7, 11, 19)), prompts((5, 17, 33, 1, 9, 21), seed=3)


def by_number(rollouts):
    return {rollout.prompt: rollout.ids for rollout in rollouts}


def step_by_step(policy, **how):
    return by_number(BuiltinEngine(policy, eager=True).generate(ASKED, SETTINGS, seeds=range(6), **how))


def test_requests_that_come_between_looks_find_rows_that_others_left():
    policy, limits, found = policy_of(), [9, 20, 12, 20, 15, 20], {}
    with BuiltinEngine(policy).session(SETTINGS) as session:
        for number, ids in enumerate(ASKED):
            session.add(ids, seed=number, limit=limits[number])
            found |= by_number(session.step(4))
        found |= by_number(session)
    assert found == step_by_step(policy, limits=limits)


def test_what_is_asked_while_a_device_draws_is_drawn_as_ever():
    policy, coming = policy_of(), iter(range(6))
    with BuiltinEngine(policy, max_num_seqs=4).session(SETTINGS) as session:

        def ask() -> None:
            for number in coming:
                session.add(ASKED[number], seed=number)
                break

        session.meanwhile = ask
        ask()
        assert by_number(session) == step_by_step(policy)


def test_what_is_prepared_is_all_that_is_recorded_and_draws_the_same(monkeypatch):
    policy, made, found = policy_of(), [], {}
    monkeypatch.setattr(cuda_graphs, "capture_graph", lambda work, pool: made.append(work) or DoneAgain(work, pool))
    with BuiltinEngine(policy, max_num_seqs=6).session(SETTINGS) as session:
        session.prepare(64)
        assert len(made) == 4  # steps of 1, 2, 4 and 8 rows
        for number, ids in enumerate(ASKED):
            session.add(ids, seed=number)
            found |= by_number(session.step(0))  # read, and one token drawn
            assert set(session.output_lengths().values()) == {1}
        found |= by_number(session)
    assert found == step_by_step(policy) and len(made) == 4
