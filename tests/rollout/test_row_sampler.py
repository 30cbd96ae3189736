"""Requests of one session that are drawn by settings of their own: each gets the answer that it gets alone."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from tests.rollout.answers import check_log_probs
from tests.rollout.test_builtin_engine import TIGHT, policy_of, prompts
from tests.rollout.test_sampler import LOGITS, SEEDS, SHARES, VOCABULARY, assert_frequencies, renormalised
from tests.rollout.test_sessions import same
from trimtab.embedded.sort_task import make_tokenizer
from trimtab.errors import UserError
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.builtin.sampler import PerRequestSampler, Sampler
from trimtab.rollout.sampling import SamplingParams

TOKENIZER = make_tokenizer()
DEFAULT = SamplingParams(max_new_tokens=30)
SETTINGS = [
    DEFAULT,
    replace(DEFAULT, temperature=0.0),
    replace(DEFAULT, temperature=0.7, top_p=0.8, max_new_tokens=11),
    replace(DEFAULT, top_k=4, stop_token_ids=(3, 7, 11), min_new_tokens=5),
    replace(DEFAULT, min_p=0.2, stop_token_ids=tuple(range(20))),
    replace(DEFAULT, temperature=1.5, logit_bias={5: 4.0, 9: -3.0}, forbidden_tokens=(6, 8), n=2),
    replace(DEFAULT, temperature=0.0, repetition_penalty=1.4, stop_token_ids=(0,)),
    replace(DEFAULT, stop_strings=(" 1", "3 "), min_new_tokens=3),
    replace(DEFAULT, temperature=0.5, plain_log_probs=True, seed=4),
    replace(DEFAULT, temperature=0.6, top_k=9, top_p=0.9, min_p=0.02, top_log_probs=3),
]
PROMPTS = prompts(tuple(5 + 3 * i for i in range(len(SETTINGS))))


@cache
def alone(number):
    with BuiltinEngine(policy_of(), TOKENIZER).session(SETTINGS[number]) as session:
        session.add(PROMPTS[number], seed=number)
        return sorted(session, key=lambda r: r.sample)


@pytest.mark.parametrize("memory", [{}, TIGHT, {"max_num_seqs": 3}], ids=["ample", "tight", "few places"])
def test_mixed_requests_get_the_answers_they_get_alone(memory):
    policy, found = policy_of(), {}
    with BuiltinEngine(policy, TOKENIZER, **memory).session(DEFAULT) as session:
        for number, ids in enumerate(PROMPTS):
            session.add(ids, seed=number, sampling=SETTINGS[number] if number else None)
            if number % 3 == 2:
                found |= {(r.prompt, r.sample): r for r in session.step(2)}
        found |= {(r.prompt, r.sample): r for r in session}
    assert len(found) == len(SETTINGS) + 1
    for number, setting in enumerate(SETTINGS):
        for expected in alone(number):
            rollout = found[number, expected.sample]
            assert same(rollout, expected) and rollout.finish == expected.finish
            assert (rollout.plain_log_probs is not None) == setting.plain_log_probs
            if setting.plain_log_probs:
                np.testing.assert_allclose(rollout.plain_log_probs, expected.plain_log_probs, atol=1e-5)
            assert (rollout.alternatives is not None) == (setting.top_log_probs > 0)
            if setting.top_log_probs:
                assert rollout.alternatives.tokens.tolist() == expected.alternatives.tokens.tolist()
    assert len({finish.finish for finish in found.values()}) == 2  # some have stopped, some are full


def test_alternatives_are_the_trainers_most_likely_tokens():
    policy = policy_of()
    setting = replace(DEFAULT, temperature=0.6, top_log_probs=4, top_k=9)
    (found,) = BuiltinEngine(policy).generate([PROMPTS[0]], setting, seeds=[3])
    assert found.alternatives.tokens.shape == found.alternatives.log_probs.shape == (30, 4)
    whole = np.array(found.prompt_ids + found.ids)
    policy.inner.set_attn_implementation("eager")
    logits = policy.inner(torch.from_numpy(whole)[None]).logits[0, len(found.prompt_ids) - 1 : -1] / 0.6
    top = logits.log_softmax(-1).topk(4)
    assert found.alternatives.tokens.tolist() == top.indices.tolist()
    np.testing.assert_allclose(found.alternatives.log_probs, top.values.detach().numpy(), atol=1e-5)
    drawn = found.alternatives.tokens == found.tokens[:, None]
    np.testing.assert_allclose(found.alternatives.log_probs[drawn], found.log_probs[drawn.any(1)], atol=1e-6)


def test_log_probs_of_mixed_requests_are_the_trainers():
    policy = policy_of()
    settings = [replace(DEFAULT, temperature=heat, top_k=5 * row) for row, heat in enumerate((1.0, 0.5, 2.0))]
    with BuiltinEngine(policy).session(DEFAULT) as session:
        for ids, setting in zip(PROMPTS, settings):
            session.add(ids, sampling=setting)
        found = sorted(session, key=lambda r: r.prompt)
    for rollout, setting in zip(found, settings, strict=True):
        check_log_probs(policy, [rollout], setting.temperature)


def test_a_row_by_its_own_numbers_draws_the_samplers_token_to_the_bit():
    generator = torch.Generator().manual_seed(3)
    settings = SETTINGS * 5
    logits, seeds = torch.randn(len(settings), 61, generator=generator) * 3, torch.arange(len(settings))
    seen, drawn = torch.rand(logits.shape, generator=generator) < 0.3, seeds % 7
    found = PerRequestSampler(settings, torch.device("cpu")).draw(logits, seeds, drawn, seen)
    for row, setting in enumerate(settings):
        one = slice(row, row + 1)
        own = seen[one] if setting.repetition_penalty != 1 else None
        expected = Sampler(setting, 61, torch.device("cpu")).draw(logits[one], seeds[one], drawn[one], own)
        assert found.tokens_B[row] == expected.tokens_B[0] and found.log_probs_B[row] == expected.log_probs_B[0]
        if expected.plain_B is not None:
            assert found.plain_B[row] == expected.plain_B[0]


@pytest.mark.parametrize("setting, crowd", [(SamplingParams(min_p=0.3), 1), (SamplingParams(min_p=0.1, top_p=0.7), 2)])
def test_min_p_leaves_what_is_likely_enough_before_top_p_is_counted(setting, crowd):
    left = renormalised(SHARES, setting.min_p * SHARES.max() <= SHARES)
    order = np.argsort(-left)
    keep = order[: np.searchsorted(np.cumsum(left[order]), setting.top_p) + 1] if crowd > 1 else left > 0
    expected = renormalised(left, keep)
    assert 1 < (expected > 0).sum() < VOCABULARY
    logits = LOGITS.expand(len(SEEDS), -1)
    by_one = Sampler(setting, VOCABULARY, torch.device("cpu")).draw(logits, SEEDS, torch.zeros_like(SEEDS), None)
    assert_frequencies(np.bincount(by_one.tokens_B.numpy(), minlength=VOCABULARY), expected)
    few, settings = SEEDS[:10_000], [setting, SamplingParams(temperature=0)] * 5000
    by_row = PerRequestSampler(settings, torch.device("cpu")).draw(logits[:10_000], few, torch.zeros_like(few), None)
    assert torch.equal(by_row.tokens_B[::2], by_one.tokens_B[:10_000:2])
    assert (by_row.tokens_B[1::2] == LOGITS.argmax()).all()


@pytest.mark.parametrize(
    "setting, words",
    [
        ({"stop_token_ids": (3, 4000)}, "stop_token_ids has token 4000"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias has token -1"),
        ({"forbidden_tokens": (99999,)}, "forbidden_tokens has token 99999"),
        ({"stop_strings": ("a",)}, "stop strings need a tokenizer"),
    ],
)
def test_a_request_that_cannot_be_followed_is_refused_and_the_others_go_on(setting, words):
    with BuiltinEngine(policy_of()).session(DEFAULT) as session:
        session.add(PROMPTS[0])
        with pytest.raises(UserError, match=words):
            session.add(PROMPTS[1], sampling=SamplingParams(**setting))
        assert [r.prompt for r in session] == [0]


@pytest.mark.parametrize("setting", [{"min_p": 1.5}, {"min_p": -0.1}, {"top_log_probs": 21}, {"top_log_probs": -1}])
def test_settings_out_of_range_are_refused(setting):
    with pytest.raises(UserError, match=next(iter(setting))):
        SamplingParams(**setting)


def test_rows_have_the_settings_that_were_told_last():
    hot, cold = replace(DEFAULT, temperature=2.0, stop_token_ids=(4,)), replace(DEFAULT, temperature=0.5)
    followed = PerRequestSampler.blank(PerRequestSampler([hot, cold], torch.device("cpu")).kind, 4, torch.device("cpu"))
    for settings in ([hot, cold], [hot, cold], [cold, hot, hot], [cold, hot], [hot]):
        followed.follow(settings)
        expected = PerRequestSampler([*settings, *[SamplingParams()] * (4 - len(settings))], torch.device("cpu"))
        assert torch.equal(followed.numbers_BN, expected.numbers_BN)
        assert followed.stops_BK[:, 0].tolist() == [4 if s is hot else -1 for s in [*settings, *[None] * 4][:4]]
