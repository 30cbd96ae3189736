"""Answers that are cut anywhere and written on, by the same weights or by others."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.rollout.answers import trained_log_probs
from tests.rollout.test_builtin_engine import FAMILIES, TIGHT, policy_of, prompts
from trimtab.embedded.sort_task import make_tokenizer
from trimtab.errors import UserError
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.builtin.kv_cache import KVCache
from trimtab.rollout.builtin.model_runner import ModelRunner
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Trajectory

PROMPTS, SEEDS = prompts((5, 17, 33, 1)), [11, 12, 13, 14]
DRAWN = SamplingParams(max_new_tokens=21, n=2, temperature=0.9)
TOKENIZER = make_tokenizer()
PIECES = {"max_num_batched_tokens": 5, "page_size": 4}  # a draft is longer than a pass
LONG = pytest.mark.long


def interrupted(engine, sampling, steps, between=lambda: None, given=PROMPTS, seeds=SEEDS, calls=1):
    """All answers, where after so many calls of so many steps everything stops and goes on in another session."""
    finished, rounds = {}, 0
    drafts = {prompt: None for prompt in range(len(given))}
    while drafts:
        with engine.session(sampling) as session:
            asked = [(session.add(given[p], seed=seeds[p], partials=kept), p) for p, kept in drafts.items()]
            of = dict(asked)
            found = []
            for _ in range(calls):
                found += session.step(steps)
            session.abort()
            found += list(session)
        drafts = {}
        for rollout in found:
            prompt = of[rollout.prompt]
            if rollout.finish == "abort":
                drafts.setdefault(prompt, []).append(rollout.stored())
            else:
                finished[prompt, rollout.sample] = replace(rollout, prompt=prompt)
        rounds += 1
        between()
    assert rounds > 1
    return [finished[place] for place in sorted(finished)]


def assert_same(found, expected, limit=1e-5):
    assert [(r.prompt, r.sample, r.ids, r.finish) for r in found] == [
        (r.prompt, r.sample, r.ids, r.finish) for r in expected
    ]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=limit)
        assert len(one.versions) == len(one.ids) and one.versions.dtype == np.int32


# mistral has a window of attention that is shorter than the texts here.
@pytest.mark.parametrize(
    "family, memory, cuts",
    [
        ("llama", {}, (1, 7)),
        ("mistral", TIGHT, (4,)),
        ("gpt2", PIECES, (5,)),
        *[pytest.param(f, m, (1, 2, 7), marks=LONG) for f in FAMILIES for m in (TIGHT, PIECES)],
    ],
)
def test_an_answer_cut_anywhere_goes_on_as_if_nothing_had_been(family, memory, cuts):
    policy = policy_of(family)
    expected = BuiltinEngine(policy).generate(PROMPTS, DRAWN, seeds=SEEDS)
    for steps in cuts:
        engine = BuiltinEngine(policy, **memory)
        assert_same(interrupted(engine, DRAWN, steps), expected)
        assert engine.memory.pool.num_used == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"stop_token_ids": tuple(range(3, 20))},
        {"stop_token_ids": tuple(range(3, 60)), "min_new_tokens": 6},
        {"repetition_penalty": 1.4},
        {"temperature": 0, "repetition_penalty": 1.4},
        {"top_k": 5, "top_p": 0.8},
        {"forbidden_tokens": tuple(range(10, 60))},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_whatever_a_setting_asks_for_is_asked_of_the_whole_answer(changes):
    policy, sampling = policy_of(), replace(DRAWN, **changes)
    expected = BuiltinEngine(policy).generate(PROMPTS, sampling, seeds=SEEDS)
    assert_same(interrupted(BuiltinEngine(policy, **TIGHT), sampling, 3), expected)


def test_a_stop_string_across_a_cut_is_found():
    policy = policy_of(vocab_size=len(TOKENIZER))
    given = prompts((5, 17, 33, 1), vocabulary=len(TOKENIZER))
    long = replace(DRAWN, max_new_tokens=40)
    texts = [TOKENIZER.decode(r.ids) for r in BuiltinEngine(policy).generate(given, long, seeds=SEEDS)]
    stops = tuple({text[len(text) // 2 :][:4] for text in texts})  # of several tokens each
    sampling = replace(long, stop_strings=stops, min_new_tokens=3)
    expected = BuiltinEngine(policy, TOKENIZER).generate(given, sampling, seeds=SEEDS)
    assert {r.finish for r in expected} == {"stop"} and len({len(r.ids) for r in expected}) > 3
    for steps in (1, 3):
        assert_same(interrupted(BuiltinEngine(policy, TOKENIZER), sampling, steps, given=given), expected)


def changed(policy, engine):
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    engine.weights_changed(engine.version + 1)


def trained(policy, rollout, temperature):
    """The trainer's log-probs of an answer."""
    return trained_log_probs(policy, [rollout], temperature).numpy()


def check_under_new_weights(engine, policy, sampling, steps, limit=1e-5, **given):
    """Every token has the log-prob of the weights that drew it, and their version; other weights give another one."""
    torch.manual_seed(0)
    weights = [[p.clone() for p in policy.parameters()]]

    def between():
        changed(policy, engine)
        weights.append([p.clone() for p in policy.parameters()])

    found = interrupted(engine, sampling, steps, between, **given)
    assert max(len(set(r.versions)) for r in found) > 2
    assert all(len(r.versions) == len(r.ids) and (np.diff(r.versions) >= 0).all() for r in found)
    for version, kept in enumerate(weights):
        with torch.no_grad():
            for parameter, values in zip(policy.parameters(), kept):
                parameter.copy_(values)
        for rollout in found:
            own = rollout.versions == version
            expected = trained(policy, rollout, sampling.temperature)
            np.testing.assert_allclose(rollout.log_probs[own], expected[own], atol=limit)
            assert own.all() or np.abs(rollout.log_probs - expected)[~own].max() > 1e-2


@pytest.mark.parametrize("memory", [{}, TIGHT], ids=["plenty", "tight"])
def test_under_new_weights_every_token_has_the_log_prob_and_the_version_of_those_that_drew_it(memory):
    policy = policy_of()
    check_under_new_weights(BuiltinEngine(policy, **memory), policy, DRAWN, 5)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_answers_read_in_one_row_leave_the_keys_and_values_of_those_that_go_on_from_pages(family):
    policy, answers = policy_of(family), prompts((9, 1, 22), seed=3)
    shape, _ = ModelRunner.measure(policy)
    found = []
    for together in (False, True):
        cache = KVCache(shape, 60, 4, policy.device)
        pages, asked = iter(range(1, 61)), []
        with ModelRunner(policy, cache) as runner, torch.no_grad():
            for prompt in PROMPTS[:3]:
                own = [next(pages) for _ in range(-(-len(prompt) // 4))]
                runner.prefill([(prompt, 0, own)])
                whole = len(prompt) // 4
                texts = []
                for ids in answers[:2] if len(prompt) > 20 else answers:
                    further = [next(pages) for _ in range(-(-(len(prompt) + len(ids)) // 4) - whole)]
                    cache.copy_pages([(own[whole], further[0])] if len(prompt) % 4 else [])
                    texts.append((ids, own[:whole] + further))
                asked.append((prompt, texts))
            if together:
                runner.prefill_answers(asked)
            else:
                for prompt, texts in asked:
                    runner.prefill([(prompt + ids, len(prompt), held) for ids, held in texts])
        found.append(torch.stack(cache.tensors)[:, :, 1:])  # page 0 is nobody's
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    assert found[0].abs().sum() > 0


def test_drafts_are_those_samples_alone_and_count_towards_the_limit():
    policy = policy_of()
    engine = BuiltinEngine(policy)
    whole = engine.generate(PROMPTS[:1], replace(DRAWN, n=4), seeds=[3])
    last = whole[3]
    drafts = [
        Trajectory(0, 3, [], last.ids[:20], last.log_probs[:20], versions=last.versions[:20]),
        Trajectory.empty(1),
    ]
    before = engine.prefilled_tokens
    with engine.session(replace(DRAWN, n=4)) as session:
        session.add(PROMPTS[0], seed=3, partials=drafts)
        found = sorted(session, key=lambda r: r.sample)
        assert_same(found, [whole[1], whole[3]])
        assert engine.prefilled_tokens - before == len(PROMPTS[0]) + 19
        session.add(PROMPTS[0], seed=3, partials=[])
        assert list(session) == []
        with pytest.raises(UserError, match="20 tokens already, and its limit is 20; give at least 21"):
            session.add(PROMPTS[0], seed=3, limit=20, partials=drafts)
