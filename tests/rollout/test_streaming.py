"""Answers as they come: limits of their own, answers that are stopped, streams that nobody reads to the end."""

import pytest

from tests.rollout.test_builtin_engine import TIGHT, policy_of, prompts
from trimtab.errors import UserError
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.engine import Engine
from trimtab.rollout.sampling import SamplingParams

FOUR = prompts((3, 20, 5, 6))


def by_place(rollouts):
    return {(r.prompt, r.sample): r for r in rollouts}


def test_the_builtin_engine_is_an_engine():
    assert isinstance(BuiltinEngine(policy_of()), Engine)


@pytest.mark.parametrize("memory", [{}, TIGHT])
def test_every_prompt_may_have_a_limit_of_its_own(memory):
    policy, limits = policy_of(), [1, 30, 9, 17]
    free = by_place(BuiltinEngine(policy).generate(FOUR, SamplingParams(max_new_tokens=30, n=2)))
    limited = BuiltinEngine(policy, **memory).generate(FOUR, SamplingParams(max_new_tokens=5, n=2), limits=limits)
    for answer in limited:
        assert answer.ids == free[answer.prompt, answer.sample].ids[: limits[answer.prompt]]
        assert answer.finish == "length"


def test_wrong_limits_and_seeds_are_told_in_one_line():
    engine = BuiltinEngine(policy_of())
    with pytest.raises(UserError, match="3 limits for 4 prompts"):
        engine.generate(FOUR, SamplingParams(), limits=[1, 2, 3])
    with pytest.raises(UserError, match="1 seeds for 4 prompts"):
        engine.generate(FOUR, SamplingParams(), seeds=[1])
    with pytest.raises(UserError, match="limit of prompt 2 is 0"):
        engine.generate(FOUR, SamplingParams(), limits=[1, 2, 0, 3])


@pytest.mark.parametrize("memory", [{}, {"max_num_seqs": 3}, TIGHT])
def test_aborted_answers_come_as_far_as_they_got(memory):
    policy, sampling, limits = policy_of(), SamplingParams(n=2), [4, 60, 60, 60]
    whole = by_place(BuiltinEngine(policy).generate(FOUR, sampling, limits=limits))
    engine = BuiltinEngine(policy, **memory)
    stream = engine.stream(FOUR, sampling, limits=limits)
    first = next(stream)
    engine.abort()
    rest = list(stream)
    assert first.finish == "length" and len(rest) == 7
    aborted = [r for r in rest if r.finish == "abort"]
    assert {r.prompt for r in aborted} >= {1, 2, 3}
    for answer in rest:
        expected = whole[answer.prompt, answer.sample]
        assert answer.ids == expected.ids[: len(answer.ids)]
        assert len(answer.log_probs) == len(answer.ids)
        assert (len(answer.ids) < limits[answer.prompt]) == (answer.finish == "abort")
    again = engine.generate(FOUR, sampling, limits=limits)  # and the engine goes on
    assert [r.ids for r in again] == [r.ids for r in whole.values()]


def test_other_prompts_go_on_when_one_is_aborted():
    policy, sampling = policy_of(), SamplingParams(max_new_tokens=25, n=3)
    whole = by_place(BuiltinEngine(policy).generate(FOUR, sampling))
    engine = BuiltinEngine(policy, max_num_seqs=7)  # some of prompt 2 run, some wait
    stream = engine.stream(FOUR, sampling, limits=[1, 25, 25, 25])
    answers = [next(stream)]
    engine.abort([2])
    answers += stream
    assert len(answers) == 12
    for answer in answers:
        assert (answer.finish == "abort") == (answer.prompt == 2)
        if answer.prompt in (1, 3):
            assert answer.ids == whole[answer.prompt, answer.sample].ids


def test_a_stream_that_is_closed_leaves_policy_and_engine_as_they_were():
    policy = policy_of().train()
    before = policy.inner.config._attn_implementation
    engine = BuiltinEngine(policy)
    stream = engine.stream(FOUR, SamplingParams(max_new_tokens=40), limits=[1, 40, 40, 40])
    next(stream)
    with pytest.raises(UserError, match="at work already"):
        engine.generate(FOUR, SamplingParams())
    with pytest.raises(UserError, match="cannot sleep"):
        engine.sleep()
    stream.close()
    assert policy.training and policy.inner.config._attn_implementation == before
    engine.abort()  # nothing is at work: nothing happens
    engine.sleep()
    assert len(engine.generate(FOUR, SamplingParams(max_new_tokens=2))) == 4
