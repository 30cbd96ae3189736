"""Requests that are added while others run, and texts that go on from what was read before."""

from functools import partial

import numpy as np
import pytest
import torch

from tests.rollout.answers import check_log_probs, fill_adapters
from tests.rollout.test_builtin_engine import TIGHT, policy_of, prompts
from trimtab.config.rl_jobs import RLOptions
from trimtab.config.training_options import LoraOptions
from trimtab.data.batches import TokenBatch
from trimtab.distributed.device import find_device
from trimtab.errors import UserError
from trimtab.models.lora import adapters_off, add_adapters
from trimtab.models.proposal_policies import SharedBasePolicy
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.engine import Session
from trimtab.rollout.sampling import SamplingParams, request_seed

GREEDY, DRAWN = SamplingParams(max_new_tokens=21, temperature=0), SamplingParams(max_new_tokens=21, temperature=0.9)
FIRST, NEWS = prompts((37,))[0], prompts((11,), seed=5)[0]


def answer(session, ids, **settings):
    number = session.add(ids, **settings)
    (rollout,) = session
    assert rollout.prompt == number
    return rollout


def anew(policy, ids, sampling, seed):
    return BuiltinEngine(policy).generate([ids], sampling, seeds=[seed])[0]


def same(found, expected):
    np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-5)
    return found.ids == expected.ids


def two_turns(engine, sampling, first=FIRST, seeds=(1, 2)):
    """Both answers, and how many tokens each turn has read."""
    with engine.session(sampling) as session:
        one = answer(session, first, seed=seeds[0])
        read = engine.prefilled_tokens
        two = answer(session, first + one.ids + NEWS, seed=seeds[1])
    return one, two, read, engine.prefilled_tokens - read


# mistral has a window of attention that is shorter than the texts here.
@pytest.mark.short(3)
@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gemma2", "gpt2"])
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_second_turn_equals_the_text_read_anew_and_reads_only_what_is_new(family, sampling):
    policy = policy_of(family)
    for memory in ({}, {"page_size": 4}, {"kv_tokens": 112, "max_num_seqs": 1}, {"max_num_batched_tokens": 5}):
        one, two, read, read_again = two_turns(BuiltinEngine(policy, **memory), sampling)
        assert same(one, anew(policy, FIRST, sampling, 1)) and read == len(FIRST)
        assert same(two, anew(policy, two.prompt_ids, sampling, 2))
        assert read_again == 1 + len(NEWS)  # the last token that was drawn has not been read yet


def test_log_probs_of_a_second_turn_are_the_trainers():
    policy = policy_of()
    check_log_probs(policy, two_turns(BuiltinEngine(policy), DRAWN)[1:2], 0.9)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32])
def test_the_same_prompt_again_is_not_read_twice(length):
    policy, ids = policy_of(), prompts((length,))[0]
    engine = BuiltinEngine(policy, prefix_caching=True)
    for seed in (1, 2, 3):
        (found,) = engine.generate([ids], DRAWN, seeds=[seed])
        assert same(found, anew(policy, ids, DRAWN, seed))
        assert engine.prefilled_tokens == length + seed - 1  # only its last token, to go on from


def test_calls_read_anew_unless_asked_to_keep():
    engine = BuiltinEngine(policy_of())
    first, second = (engine.generate([FIRST], DRAWN, seeds=[4])[0] for _ in range(2))
    assert engine.prefilled_tokens == 2 * len(FIRST)
    assert first.log_probs.tobytes() == second.log_probs.tobytes()
    two_turns(engine, DRAWN)  # within a session it is kept, but not beyond
    before = engine.prefilled_tokens
    engine.generate([FIRST], DRAWN)
    assert engine.prefilled_tokens == before + len(FIRST)


def test_what_begins_alike_shares_its_whole_pages():
    policy = policy_of()
    engine = BuiltinEngine(policy, prefix_caching=True)
    engine.generate([FIRST], GREEDY)
    others = [FIRST[:35] + NEWS, FIRST[:32], FIRST[:5] + NEWS, FIRST[:16] + NEWS + FIRST]
    before = engine.prefilled_tokens
    found = engine.generate(others, DRAWN, seeds=[1, 2, 3, 4])
    assert engine.prefilled_tokens - before == (3 + 11) + 1 + 16 + (11 + 37)
    for rollout, ids, seed in zip(found, others, (1, 2, 3, 4)):
        assert same(rollout, anew(policy, ids, DRAWN, seed))


def write_in_place(policy):
    with torch.no_grad():
        policy.head.weight.mul_(-1)


def write_past_the_count(policy):
    policy.inner.model.layers[0].mlp.up_proj.weight.data.mul_(-1)


def step(policy, fused=False):
    policy.train()
    policy(TokenBatch.of([(np.array(FIRST), np.arange(37) > 3)])).log_probs_N.sum().backward()
    torch.optim.AdamW(policy.parameters(), lr=0.05, fused=fused).step()


@pytest.mark.parametrize("change", [write_in_place, write_past_the_count, step, partial(step, fused=True)])
def test_nothing_that_other_weights_have_read_is_used(change):
    policy = policy_of()
    engine = BuiltinEngine(policy, prefix_caching=True)
    before = engine.generate([FIRST], GREEDY)[0]
    change(policy)
    after = engine.generate([FIRST], GREEDY)[0]
    assert same(after, anew(policy, FIRST, GREEDY, 0)) and after.ids != before.ids
    assert engine.prefilled_tokens == 2 * len(FIRST)


def test_adapters_on_and_off_do_not_share_what_they_read():
    policy = policy_of()
    policy.model = add_adapters(policy.model, LoraOptions(lora_rank=4, target_modules=["all-linear"]))
    fill_adapters(policy, 0.3)
    engine = BuiltinEngine(policy, prefix_caching=True)
    for _ in range(2):
        on = engine.generate([FIRST], GREEDY)[0]
        assert same(on, anew(policy, FIRST, GREEDY, 0))
        with adapters_off(policy):
            off = engine.generate([FIRST], GREEDY)[0]
            assert same(off, anew(policy, FIRST, GREEDY, 0)) and off.ids != on.ids
    assert engine.prefilled_tokens == 4 * len(FIRST)


def test_a_borrowing_policy_reads_anew_after_its_owners_step():
    owner = policy_of()
    options = RLOptions(lora_rank=4, target_modules=["all-linear"])
    policy = SharedBasePolicy(owner, options, find_device(), split=False)
    engine = BuiltinEngine(policy, prefix_caching=True)
    engine.generate([FIRST], GREEDY)
    step(owner)
    assert same(engine.generate([FIRST], GREEDY)[0], anew(owner, FIRST, GREEDY, 0))


def test_rollouts_carry_the_version_of_the_weights_and_a_new_one_drops_what_was_read_as_sleep_does():
    engine = BuiltinEngine(policy_of(), prefix_caching=True)
    assert engine.generate([FIRST], GREEDY)[0].versions.tolist() == [0] * 21
    engine.weights_changed(7)
    assert engine.generate([FIRST], GREEDY)[0].versions.tolist() == [7] * 21
    assert engine.prefilled_tokens == 2 * len(FIRST)
    engine.sleep()
    engine.generate([FIRST], GREEDY)
    assert engine.prefilled_tokens == 3 * len(FIRST)
    with engine.session(GREEDY), pytest.raises(UserError, match="at work"):
        engine.weights_changed(8)


def test_what_is_kept_makes_room_the_oldest_first():
    policy = policy_of()
    given = prompts((20, 20, 20, 20))
    engine = BuiltinEngine(policy, kv_tokens=4 * 21, page_size=4, max_num_seqs=1, prefix_caching=True)
    sampling = SamplingParams(max_new_tokens=4, temperature=0)

    def read_for(ids):
        before = engine.prefilled_tokens
        assert same(engine.generate([ids], sampling)[0], anew(policy, ids, sampling, 0))
        return engine.prefilled_tokens - before

    # Of a text 6 pages stay.
    assert [read_for(ids) for ids in given[:3]] == [20, 20, 20]
    assert read_for(given[0]) == 1
    assert read_for(given[3]) == 20
    assert read_for(given[0]) == 1  # used since
    assert read_for(given[1]) > 1


LONG = pytest.mark.long
SMALL_PAGES = {"kv_tokens": 120, "max_num_seqs": 3, "page_size": 4}


@pytest.mark.parametrize("memory", [TIGHT, pytest.param(SMALL_PAGES, marks=LONG), pytest.param({}, marks=LONG)])
def test_turns_of_many_conversations_in_little_memory_equal_the_texts_read_anew(memory):
    policy = policy_of()
    engine = BuiltinEngine(policy, **memory)
    sampling = SamplingParams(max_new_tokens=13, n=2)
    found = []
    with engine.session(sampling) as session:
        for ids in prompts((5, 17, 33, 16, 1)):
            session.add(ids)
        for rollout in session:
            found.append(rollout)
            if rollout.sample == 0 and len(rollout.prompt_ids) < 50:
                session.add(rollout.prompt_ids + rollout.ids + NEWS[:3])
    assert len(found) > 20
    for rollout in found:  # a request without a seed draws by its number
        seed = request_seed(sampling.seed, rollout.prompt)
        alone = BuiltinEngine(policy).generate([rollout.prompt_ids], sampling, seeds=[seed])
        assert same(rollout, alone[rollout.sample])
    assert engine.memory.pool.num_used == 0


def test_requests_added_while_others_run_get_the_answers_they_get_alone():
    policy, given = policy_of(), prompts((5, 17, 33, 60))
    engine = BuiltinEngine(policy, max_num_seqs=3)
    found = {}
    with engine.session(DRAWN) as session:
        assert isinstance(session, Session)
        session.add(given[0], seed=10, limit=60)
        assert session.step() == [] and len(session.output_ids(0)) > 1
        for number in (1, 2, 3):  # the last two need more memory than there is
            assert session.add(given[number], seed=10 + number, limit=20 * number) == number
            found |= {r.prompt: r for r in session.step(2)}
        found |= {r.prompt: r for r in session}
        assert not session.has_unfinished and session.step() == [] and list(session) == []
        late = answer(session, given[1], seed=3, limit=2)
        assert late.prompt == 4 and len(late.ids) == 2
    for number, limit in enumerate((60, 20, 40, 60)):
        (expected,) = BuiltinEngine(policy).generate([given[number]], DRAWN, seeds=[10 + number], limits=[limit])
        assert same(found[number], expected)


def test_memory_for_samples_that_are_expected_is_made_once():
    policy, places = policy_of(), []
    for expected in (1, 6):
        with BuiltinEngine(policy, max_num_seqs=6).session(DRAWN) as session:
            session.expect(expected)
            found = []
            for number in range(6):
                session.add(FIRST, seed=number)
                session.step(1)
                found.append(session.engine.memory.cache(0, 0, session.device).tensors[0].data_ptr())
        places.append(len(set(found)))
    assert places[0] > 1 and places[1] == 1


def test_one_request_of_a_session_is_aborted_and_the_others_go_on():
    policy, given = policy_of(), prompts((5, 17, 33))
    engine = BuiltinEngine(policy, max_num_seqs=2)
    with engine.session(DRAWN) as session:
        numbers = [session.add(ids, seed=9) for ids in given]
        session.step()
        session.abort([numbers[0], numbers[2]])  # one runs, one waits
        found = {r.prompt: r for r in session}
    assert [found[n].finish for n in numbers] == ["abort", "length", "abort"]
    assert found[2].ids == [] and 0 < len(found[0].ids) < 21
    assert same(found[1], anew(policy, given[1], DRAWN, 9))


def test_a_session_that_is_closed_gives_everything_back():
    policy = policy_of().train()
    before = policy.inner.config._attn_implementation
    engine = BuiltinEngine(policy)
    session = engine.session(DRAWN)
    session.add(FIRST)
    session.step()
    with pytest.raises(UserError, match="at work already"):
        engine.session(DRAWN)
    session.close()
    session.close()
    assert policy.training and policy.inner.config._attn_implementation == before
    assert engine.memory.pool.num_used == 0 and len(engine.generate([FIRST], DRAWN)) == 1


@pytest.mark.parametrize("bf16, int8, exact", [(False, False, True), (True, False, False), (False, True, False)])
def test_an_engine_says_whether_its_log_probs_are_the_trainers(bf16, int8, exact):
    policy = policy_of()
    policy.to(torch.bfloat16 if bf16 else torch.float32)
    assert BuiltinEngine(policy, weight_only_int8=int8).exact is exact


@pytest.mark.parametrize("memory", [{}, TIGHT], ids=["ample", "tight"])
def test_what_answers_have_so_far_can_be_read_without_stopping_them(memory):
    policy, asked = policy_of(), prompts((5, 33, 16, 9))
    sampling = SamplingParams(max_new_tokens=40, n=3)
    expected = {(r.prompt, r.sample): r for r in BuiltinEngine(policy).generate(asked, sampling, seeds=range(4))}
    engine = BuiltinEngine(policy, **memory)
    engine.version = 7
    open_ones, read = set(expected), 0
    with engine.session(sampling) as session:
        for number, ids in enumerate(asked):
            session.add(ids, seed=number)
        while session.has_unfinished:
            lengths, drafts = session.output_lengths(), session.partials()
            assert set(lengths) == open_ones == {(number, d.sample) for number in drafts for d in drafts[number]}
            for number in drafts:
                for draft in drafts[number]:
                    whole, count = expected[number, draft.sample], lengths[number, draft.sample]
                    assert draft.finish is None and draft.ids == whole.ids[:count]
                    np.testing.assert_allclose(draft.log_probs, whole.log_probs[:count], atol=1e-5)
                    assert draft.versions.tolist() == [7] * count
                    read += count
            open_ones -= {(rollout.prompt, rollout.sample) for rollout in session.step()}
    assert read > 500 and not open_ones
