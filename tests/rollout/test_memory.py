"""KV memory: planned from what is free, never more than a call can use, kept between calls."""

import os

import pytest
import torch

from tests.rollout.test_builtin_engine import policy_of, prompts
from trimtab.distributed.device import free_memory
from trimtab.errors import UserError
from trimtab.rollout.builtin import memory
from trimtab.rollout.builtin.cache import KVCache, KVShape
from trimtab.rollout.builtin.captured import fingerprint
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.builtin.memory import SHARE_OF_FREE, KVMemory
from trimtab.rollout.types import Sampling

CPU = torch.device("cpu")
SHAPE = KVShape(layers=3, heads=2, width=8, dtype=torch.float32)
PAGE_BYTES = 16 * 3 * 2 * (2 * 8) * 4  # tokens, layers, keys and values, numbers, bytes


@pytest.fixture
def free(monkeypatch):
    """Say how many bytes are free."""
    return lambda size: monkeypatch.setattr(memory, "free_memory", lambda device: size)


def test_plenty_of_memory_gives_what_the_call_can_use(free):
    free(2**40)
    cache = KVMemory(SHAPE, 16, None).cache(10, 40, CPU)
    assert cache.pages == 10 * (3 + 1)
    kept = (cache.keys.nbytes + cache.values.nbytes) / PAGE_BYTES
    assert kept == cache.pages + 1  # and page 0


def test_little_memory_gives_a_share_of_what_is_free(free):
    free(20 * PAGE_BYTES)
    assert KVMemory(SHAPE, 16, None).cache(10, 40, CPU).pages == int(20 * SHARE_OF_FREE)


def test_memory_that_was_asked_for_is_given(free):
    free(0)
    assert KVMemory(SHAPE, 16, 100).cache(10, 40, CPU).pages == 7


def test_memory_is_kept_while_it_is_enough(free):
    free(2**40)
    kept = KVMemory(SHAPE, 16, None)
    first = kept.cache(10, 40, CPU)
    assert kept.cache(4, 40, CPU) is first and kept.cache(10, 48, CPU) is first
    assert kept.cache(11, 40, CPU) is not first
    free(9 * PAGE_BYTES)
    kept.release()
    short = kept.cache(10, 40, CPU)
    assert kept.cache(10, 40, CPU) is short  # as much as there was: asking again would not help


def test_scarce_memory_changes_no_answer(free):
    policy, sampling = policy_of(), Sampling(max_new_tokens=20, n=3)
    expected = BuiltinEngine(policy).generate(prompts(), sampling)
    free(40 * 4 * 2 * 2 * (2 * 8) * 4)  # 40 pages of 4 tokens, and 70 % of that hold one of the longest
    answers = BuiltinEngine(policy, page_size=4).generate(prompts(), sampling)
    assert [a.ids for a in answers] == [a.ids for a in expected]


def test_no_memory_at_all_is_told_in_one_line(free):
    free(0)
    with pytest.raises(UserError, match="KV memory of 0 tokens cannot hold one sequence"):
        BuiltinEngine(policy_of()).generate(prompts(), Sampling())


def test_free_memory_of_this_machine_is_less_than_it_has(monkeypatch):
    everything = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    alone = free_memory(CPU)
    assert 0 < alone < everything
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_memory(CPU) < alone / 2  # four processes share it


def test_a_graph_does_not_outlive_memory_of_another_size_that_lay_in_the_same_place():
    policy, larger, smaller = policy_of(), KVCache(SHAPE, 9, 16, CPU), KVCache(SHAPE, 4, 16, CPU)
    for name in ("keys", "values"):
        there = getattr(smaller, name)
        setattr(smaller, name, getattr(larger, name).flatten()[: there.numel()].view_as(there))
    assert smaller.keys.data_ptr() == larger.keys.data_ptr()
    assert fingerprint(policy, larger) == fingerprint(policy, larger) != fingerprint(policy, smaller)
