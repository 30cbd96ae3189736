"""Answers of a vLLM engine that are cut anywhere and written on, by the same weights or by others."""

from dataclasses import replace

import numpy as np
import pytest

from tests.rollout.test_partial_rollouts import assert_same, check_under_new_weights, interrupted, trained
from tests.vllm.conftest import engine_of, write_model
from trimtab.embedded.sort_task import make_tokenizer
from trimtab.models.selfcheck import choose_path
from trimtab.rollout.sampling import SamplingParams, request_seed
from trimtab.rollout.trajectory import Trajectory

PROMPTS, SEEDS = [[5, 6, 7, 8], [9, 10, 11], [12]], [1, 2, 3]
GREEDY = SamplingParams(max_new_tokens=24, n=2, temperature=0)
LIMIT = 1e-3


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    policy = write_model(folder, tie_word_embeddings=True)
    choose_path(policy)
    engine = engine_of(folder, policy, tokenizer=make_tokenizer(), max_num_seqs=64)
    yield engine, policy
    engine.close()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"repetition_penalty": 1.4},
        {"stop_token_ids": tuple(range(3, 30)), "min_new_tokens": 9},
    ],
    ids=["plain", "repetition_penalty", "min_new_tokens"],
)
@pytest.mark.parametrize("steps", [2, 7])
def test_greedy_answers_cut_anywhere_go_on_as_if_nothing_had_been(changes, steps, made):
    engine, _ = made
    sampling = replace(GREEDY, **changes)
    expected = engine.generate(PROMPTS, sampling, seeds=SEEDS)
    found = interrupted(engine, sampling, 1, given=PROMPTS, seeds=SEEDS, calls=steps)
    assert_same(found, expected, LIMIT)


def test_a_stop_string_across_a_cut_is_found_and_one_that_nobody_has_seen_yet_ends_an_answer(made):
    engine, _ = made
    decode = engine.tokenizer.decode
    plain = engine.generate(PROMPTS, GREEDY, seeds=SEEDS)
    stops = tuple({decode(r.ids)[len(decode(r.ids)) // 2 :][:3] for r in plain})
    sampling = replace(GREEDY, stop_strings=stops)
    expected = engine.generate(PROMPTS, sampling, seeds=SEEDS)
    assert "stop" in {r.finish for r in expected}
    for steps in (1, 3):
        assert_same(interrupted(engine, sampling, 1, given=PROMPTS, seeds=SEEDS, calls=steps), expected, LIMIT)
    with engine.session(sampling) as session:
        session.add(PROMPTS[0], seed=1)
        for _ in range(len(expected[0].ids)):
            assert session.step() == []  # it looks at eight tokens at once
        session.abort()
        (found, _) = session
    assert (found.ids, found.finish) == (expected[0].ids, "stop")


def test_a_draft_goes_on_from_a_stream_of_its_own(made, monkeypatch):
    engine, _ = made
    drawn = SamplingParams(max_new_tokens=12, n=2)
    asked = []
    add = engine.llm.add_request

    def noted(name, prompt, parameters, **more):
        asked.append((prompt["prompt_token_ids"], parameters.seed))
        return add(name, prompt, parameters, **more)

    monkeypatch.setattr(engine.llm, "add_request", noted)
    found = interrupted(engine, drawn, 1, given=PROMPTS, seeds=SEEDS, calls=3)
    again = interrupted(engine, drawn, 1, given=PROMPTS, seeds=SEEDS, calls=3)
    assert [r.ids for r in again] == [r.ids for r in found]
    half = asked[: len(asked) // 2]
    assert half == asked[len(half) :] and len({seed for _, seed in half}) == len(half) > 6
    own, ids = request_seed(SEEDS[0], 0), found[0].ids
    expected = [(PROMPTS[0] + ids[:done], request_seed(own, done) if done else own) for done in (0, 3, 6, 9)]
    assert all(request in half for request in expected)


def test_an_empty_draft_is_the_sample_from_the_beginning(made):
    engine, _ = made
    drawn = SamplingParams(max_new_tokens=12, n=3)
    expected = engine.generate(PROMPTS[:1], drawn, seeds=[4])
    with engine.session(drawn) as session:
        session.add(PROMPTS[0], seed=4, partials=[Trajectory.empty(2), Trajectory.empty(0)])
        found = sorted(session, key=lambda r: r.sample)
    assert_same(found, [expected[0], expected[2]], LIMIT)


def test_more_to_read_than_one_pass_holds_is_read_one_after_another(made):
    """Seeded requests that are read in pieces end vLLM on a CPU."""
    engine, policy = made
    given = [[5 + i, *range(3, 60), *range(3, 55)] for i in range(40)]  # 4,400 tokens
    rollouts = engine.generate(given, SamplingParams(max_new_tokens=4), seeds=range(40))
    assert len(rollouts) == 40
    for rollout in rollouts:
        np.testing.assert_allclose(rollout.log_probs, trained(policy, rollout, 1.0), atol=LIMIT)


# Last: it changes the weights.
def test_under_new_weights_every_token_has_the_log_prob_and_the_version_of_those_that_drew_it(made):
    engine, policy = made
    drawn = SamplingParams(max_new_tokens=20, n=2, temperature=0.9)
    check_under_new_weights(engine, policy, drawn, 1, LIMIT, given=PROMPTS, seeds=SEEDS, calls=5)
