"""KV memory: planned from what is free, never more than a call can use, kept between calls."""

import os

import numpy as np
import pytest
import torch

from tests.rollout.answers import ids_of
from tests.rollout.test_builtin_engine import policy_of, prompts
from trimtab.distributed.device import free_memory
from trimtab.errors import UserError
from trimtab.rollout.builtin import kv_cache as memory
from trimtab.rollout.builtin.cuda_graphs import fingerprint
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.builtin.kv_cache import SHARE_OF_FREE, KVCache, KVCacheManager, KVShape
from trimtab.rollout.builtin.prefix_cache import BlockPool, PrefixCache
from trimtab.rollout.builtin.scheduler import PromptState, Scheduler, SequenceState
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Trajectory

CPU = torch.device("cpu")
SHAPE = KVShape(((2, 10, 6),) * 3, torch.float32)
PAGE_BYTES = 16 * 3 * 2 * (10 + 6) * 4  # tokens, layers, heads, numbers of keys and of values, bytes


@pytest.fixture
def free(monkeypatch):
    """Say how many bytes are free."""
    return lambda size: monkeypatch.setattr(memory, "free_memory", lambda device: size)


def test_plenty_of_memory_gives_what_the_call_can_use(free):
    free(2**40)
    cache = KVCacheManager(SHAPE, 16, None).cache(10, 40, CPU)
    assert cache.pages == 10 * (3 + 1)
    kept = cache.nbytes / PAGE_BYTES
    assert kept == cache.pages + 1  # and page 0


def test_little_memory_gives_a_share_of_what_is_free(free):
    free(20 * PAGE_BYTES)
    assert KVCacheManager(SHAPE, 16, None).cache(10, 40, CPU).pages == int(20 * SHARE_OF_FREE)


def test_memory_that_was_asked_for_is_given(free):
    free(0)
    assert KVCacheManager(SHAPE, 16, 100).cache(10, 40, CPU).pages == 7


def test_memory_is_kept_while_it_is_enough(free):
    free(2**40)
    kept = KVCacheManager(SHAPE, 16, None)
    first = kept.cache(10, 40, CPU)
    assert kept.cache(4, 40, CPU) is first and kept.cache(10, 48, CPU) is first
    before = first.pages
    assert kept.cache(11, 40, CPU).pages > before
    free(9 * PAGE_BYTES)
    kept.release()
    short = kept.cache(10, 40, CPU)
    assert kept.cache(10, 40, CPU) is short  # as much as there was: asking again would not help


def test_what_is_enough_is_not_made_larger_by_requests_that_each_want_a_little_more(free):
    free(2**40)
    kept = KVCacheManager(SHAPE, 16, None)
    for samples in range(1, 33):
        cache = kept.cache(samples, 40, CPU)
        kept.pool.allocate(1)
    assert 32 * 4 <= cache.pages <= 2 * 32 * 4


def test_memory_that_is_too_little_becomes_larger_where_it_is(free):
    free(10 * PAGE_BYTES)
    memory = KVCacheManager(SHAPE, 16, None)
    cache = memory.cache(10, 40, CPU)
    pool, kept, kept.enabled = memory.pool, memory.prefix_cache, True
    prompt, ids = pool.allocate(1), list(range(16))
    kept.insert(ids, prompt)
    memory.cache(20, 40, CPU)
    assert cache.pages == 7  # there is room only in the place of the old, where the prompt still lies
    pool.free(prompt)
    assert memory.cache(30, 40, CPU) is cache and memory.pool is pool and memory.prefix_cache is kept
    assert cache.pages == pool.total == pool.num_free == int((10 + 8) * SHARE_OF_FREE)
    assert {tensor.shape[1] for tensor in cache.tensors} == {cache.pages + 1} and kept.lookup(ids).tokens == 0
    free(0)
    memory.cache(40, 40, CPU)
    assert cache.pages == pool.total == 12  # never less than there was


@pytest.mark.parametrize("scarce", [False, True])
def test_a_session_whose_requests_are_all_over_takes_a_longer_one(free, scarce):
    policy, sampling, (short, long) = policy_of(), SamplingParams(max_new_tokens=5), prompts((9, 150))
    engine = BuiltinEngine(policy)
    free((10 if scarce else 1000) * engine.memory.page_bytes)
    with engine.session(sampling) as session:
        session.add(short)
        if scarce:
            for _ in range(4):
                session.add(short)  # would have 10 pages, and get 7
            assert len(list(session)) == 5  # what they have read and drawn is kept
        else:
            session.abort()
            assert [r.finish for r in session.step()] == ["abort"]
        before = engine.memory.pool.total
        session.add(long, seed=1)
        (found,) = session
        assert before < engine.memory.pool.total
        session.add(short + found.ids, seed=2)
        (after,) = session
    free(2**40)
    for rollout, seed in ((found, 1), (after, 2)):
        (alone,) = BuiltinEngine(policy).generate([rollout.prompt_ids], sampling, seeds=[seed])
        assert rollout.ids == alone.ids


def scheduler_of(pages):
    """With pages of four tokens for so many, one sequence at once, and what is kept."""
    kept = PrefixCache(BlockPool(pages, 4), 0)
    kept.enabled = True
    return Scheduler(kept, max_num_seqs=1), kept, kept.pool


def sequence(text, limit):
    prompt = PromptState(0, text, 1)
    return SequenceState.of(prompt, Trajectory.empty(0), seed=0, limit=limit, sampling=SamplingParams())


def test_to_ask_for_room_costs_nothing_of_what_is_kept():
    scheduler, kept, pool = scheduler_of(8)
    shared = [5] * 4
    for ids in ([7] * 8, shared):
        pages = pool.allocate(pool.needed(len(ids)))
        kept.insert(ids, pages)
        pool.free(pages)
    scheduler.add([sequence([*shared, 1], 100)])
    (admission,) = scheduler.schedule()
    admission.sample.ids.extend(np.array([1]), 1)
    scheduler.prefill_done()
    scheduler.free_finished()
    # It has 2 pages, one of them kept too; it may have all 8, of which 3 are free and 3 are only kept.
    most = 8 * 4 - 5
    assert pool.num_free == kept.num_evictable == 3
    short = scheduler.short(most)
    assert scheduler.can_allocate(short) and not scheduler.can_allocate(scheduler.short(most + 1))
    assert kept.num_evictable == 3
    assert scheduler.allocate(short) == [] and kept.num_evictable == pool.num_free == 0


def test_what_has_finished_is_kept_when_it_is_put_away_and_at_the_latest_when_pages_are_short():
    scheduler, kept, pool = scheduler_of(4)
    text = [3] * 9

    def finish_one() -> None:
        sample = sequence(text, 4)
        scheduler.add([sample])
        assert len(scheduler.schedule()) == 1  # which needs three pages, and copies one
        sample.ids.extend(np.array([8, 8, 8, 8]), 4)
        scheduler.prefill_done()
        scheduler.finish([sample])

    finish_one()
    assert not scheduler.has_unfinished and kept.lookup([*text, 8, 8, 8, 0]).tokens == 0
    scheduler.free_finished()
    assert kept.lookup([*text, 8, 8, 8, 0]).tokens == len(text) + 3
    finish_one()
    finish_one()
    scheduler.close()
    assert pool.num_used == kept.num_evictable
    kept.clear()
    assert pool.num_free == 4


def test_who_waits_already_need_not_wait_for_what_has_finished_to_be_put_away():
    scheduler, kept, _ = scheduler_of(8)
    one = sequence([0] * 5, 4)
    scheduler.add([one, sequence([1] * 5, 4)])
    assert len(scheduler.schedule()) == 1
    one.ids.extend(np.array([8, 8]), 2)
    scheduler.prefill_done()
    scheduler.finish([one])
    assert len(scheduler.schedule()) == 1 and kept.lookup([0] * 5).tokens == 0
    scheduler.free_finished()
    assert kept.lookup([0] * 5).tokens == 4


def test_scarce_memory_changes_no_answer(free):
    policy, sampling = policy_of(), SamplingParams(max_new_tokens=20, n=3)
    expected = BuiltinEngine(policy).generate(prompts(), sampling)
    free(40 * 4 * 2 * 2 * (2 * 8) * 4)  # 40 pages of 4 tokens, and 70 % of that hold one of the longest
    answers = BuiltinEngine(policy, page_size=4).generate(prompts(), sampling)
    assert ids_of(answers) == ids_of(expected)


def test_no_memory_at_all_is_told_in_one_line(free):
    free(0)
    with pytest.raises(UserError, match="KV memory of 0 tokens cannot hold one sequence"):
        BuiltinEngine(policy_of()).generate(prompts(), SamplingParams())


def test_free_memory_of_this_machine_is_less_than_it_has(monkeypatch):
    everything = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    alone = free_memory(CPU)
    assert 0 < alone < everything
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_memory(CPU) < alone / 2  # four processes share it


def test_a_graph_does_not_outlive_memory_of_another_size_that_lay_in_the_same_place():
    policy, larger, smaller = policy_of(), KVCache(SHAPE, 9, 16, CPU), KVCache(SHAPE, 4, 16, CPU)
    smaller.tensors = [
        there.flatten()[: own.numel()].view_as(own) for own, there in zip(smaller.tensors, larger.tensors)
    ]
    assert smaller.tensors[0].data_ptr() == larger.tensors[0].data_ptr()
    assert fingerprint(policy, larger) == fingerprint(policy, larger) != fingerprint(policy, smaller)
