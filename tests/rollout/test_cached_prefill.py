"""Reading on from what is in the cache, and reading sizes that come back. Variable-length attention is stood for by its
definition, sequence by sequence, where there is no accelerator for it."""

import numpy as np
import pytest
import torch

from tests.rollout.answers import converse
from tests.rollout.test_builtin_engine import policy_of, prompts
from trimtab.models import attention as packed
from trimtab.rollout.builtin import attention, cuda_graphs
from trimtab.rollout.builtin import prefill as prefill_module
from trimtab.rollout.builtin.cuda_graphs import PrefillGraphs, PrefillSize
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.builtin.kv_cache import KVCache
from trimtab.rollout.builtin.model_runner import ModelRunner
from trimtab.rollout.sampling import SamplingParams

WHOLE, READ = (40, 7, 40, 1, 19, 40, 33), (30, 2, 39, 0, 15, 31, 0)  # tokens, and those that were read before


def by_definition(query, key, value, sequences, scale, window):
    """A query that is the n-th from its sequence's end sees all keys but the last n."""
    if sequences.key_rows is not None:
        key, value = key[sequences.key_rows], value[sequences.key_rows]
    out, groups = torch.zeros_like(query), query.shape[1] // key.shape[1]
    own, whole = (starts.tolist() for starts in (sequences.query_starts, sequences.key_starts))
    for first, end, begin, last in zip(own, own[1:], whole, whole[1:]):
        for token in range(first, end):
            seen = last - (end - 1 - token)
            start = begin if window is None else max(begin, seen - window)
            keys, values = (x[start:seen].repeat_interleave(groups, 1) for x in (key, value))
            weights = (torch.einsum("hd,khd->hk", query[token], keys) * scale).softmax(-1)
            out[token] = torch.einsum("hk,khd->hd", weights, values)
    return out


@pytest.fixture
def calls(monkeypatch):
    """Of variable-length attention."""
    found = []

    def attend(*arguments, sinks=None, fused=False):
        found.append(arguments[3])
        return by_definition(*arguments)

    for module in (attention, packed):
        monkeypatch.setattr(module, "varlen_applies", lambda *_: True)
        monkeypatch.setattr(module, "attend_varlen", attend)
    return found


def reader(policy, size=4):
    """A cache with so many tokens a page, and for each text its pages, which lie among those of others."""
    shape, _ = ModelRunner.measure(policy)
    counts = [-(-length // size) for length in WHOLE]
    cache = KVCache(shape, sum(counts), size, torch.device("cpu"))
    order = np.random.default_rng(1).permutation(sum(counts)) + 1
    pages = [part.tolist() for part in np.split(order, np.cumsum(counts)[:-1])]
    return ModelRunner(policy, cache), pages


def read_before(runner, texts, read, pages):
    if any(read):
        runner.prefill([(text[:done], 0, own) for text, done, own in zip(texts, read, pages) if done])


@torch.no_grad()
def read_on(policy):
    """The last hidden states of texts of which some was read before, all at once, and the cache."""
    runner, pages = reader(policy)
    texts = prompts(WHOLE)
    with runner:
        read_before(runner, texts, READ, pages)
        hidden = runner.prefill([*zip(texts, READ, pages)])
    return hidden, runner.cache


@torch.no_grad()
def read_at_once(policy):
    runner, pages = reader(policy)
    with runner:
        return torch.cat([runner.prefill([(text, 0, own)]) for text, own in zip(prompts(WHOLE), pages)])


@pytest.mark.parametrize("family", ["llama", "mistral"])  # two query heads a key head; and a window of 5
@pytest.mark.parametrize("most, parts", [(2**16, 1), (73, 3), (72, 4), (1, 7)])
def test_going_on_in_one_row_equals_block_by_block_and_reading_at_once(family, most, parts, calls, monkeypatch):
    policy = policy_of(family)
    monkeypatch.setattr(attention, "MOST_TOGETHER", most)
    found, cache = read_on(policy)
    reads = [sequences for sequences in calls if sequences.key_rows is not None]
    assert len(reads) == parts * policy.inner.config.num_hidden_layers
    assert all(len(one.key_rows) <= max(most, max(WHOLE)) for one in reads)
    monkeypatch.undo()
    monkeypatch.setattr(attention, "MOST_TOGETHER", most)
    expected, other = read_on(policy)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found, read_at_once(policy), atol=1e-5, rtol=1e-5)
    for own, theirs in zip(cache.tensors, other.tensors, strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-5, rtol=1e-5)


def test_conversations_that_go_on_in_one_row_draw_what_they_draw_block_by_block(calls, monkeypatch):
    engine, texts = BuiltinEngine(policy_of(), page_size=4), prompts((9, 17, 17, 4))
    found = converse(engine, texts)
    assert any(sequences.key_rows is not None for sequences in calls)
    monkeypatch.undo()
    assert [(r.prompt, r.ids) for r in found] == [(r.prompt, r.ids) for r in converse(engine, texts)]


@pytest.fixture
def made(monkeypatch):
    """What is recorded; replayed by doing it again."""
    made = []

    class Recorded:
        def __init__(self, work, pool):
            made.append(work)
            self.replay, self.pool = work, lambda: None

    monkeypatch.setattr(cuda_graphs, "capture_graph", Recorded)
    return made


@pytest.mark.parametrize("read", [(0,) * len(WHOLE), READ], ids=["whole", "going on"])
def test_a_size_is_recorded_once_it_has_come_back_and_its_numbers_stay(read, calls, made, monkeypatch):
    policy, texts, reads = policy_of(), prompts(WHOLE), PrefillGraphs()
    expected = read_at_once(policy)
    runner, pages = reader(policy)
    with torch.no_grad(), runner:
        read_before(runner, texts, read, pages)
        found = []
        for _ in range(4):
            found.append((reads.prefill(runner, [*zip(texts, read, pages)]), len(made)))
        assert [count for _, count in found] == [0, 0, 1, 1] and len(reads.passes) == 1
        assert all(torch.equal(hidden, found[0][0]) for hidden, _ in found)
        torch.testing.assert_close(found[0][0], expected, atol=1e-5, rtol=1e-5)
        one = [(texts[0], 0, pages[0])]
        assert torch.allclose(reads.prefill(runner, one), expected[:1], atol=1e-5) and len(made) == 1  # another size
        monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 1)
        (first,) = reads.passes
        for _ in range(2):
            reads.prefill(runner, one)
        assert len(made) == 2 and len(reads.passes) == 1 and first not in reads.passes
        for count in (2, 2, 3):  # what made room is recorded once it has come back as often again
            reads.prefill(runner, [*zip(texts, read, pages)])
            assert len(made) == count


@pytest.mark.parametrize("read", [(0,) * len(WHOLE), READ], ids=["whole", "going on"])
def test_a_larger_size_that_was_prepared_is_read_in_with_the_same_numbers(read, calls, made, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "COMMON_KEY_COUNTS", (4096, 8192))
    policy, texts, reads = policy_of(), prompts(WHOLE), PrefillGraphs()
    expected = read_at_once(policy)
    runner, pages = reader(policy)
    with torch.no_grad(), runner:
        reads.prepare(runner, 256, 64)
        assert [*reads.passes] == [
            (256, 256, 8192, 64), (128, 256, 8192, 64), (256, 256, 4096, 64), (128, 256, 4096, 64),
            (256, 256, 0, 64), (128, 256, 0, 64),
        ]  # fmt: skip
        read_before(runner, texts, read, pages)
        for _ in range(4):
            found = reads.prefill(runner, [*zip(texts, read, pages)])
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        used = [*reads.passes][-1]  # last: the smallest that holds it
        assert used.keys == (4096 if any(read) else 0) and len(made) == 6
        monkeypatch.setattr(cuda_graphs, "RUNS_BEFORE_EXACT_FIT", 4)
        for count in (7, 7):  # which often comes back has its own in the end
            assert torch.allclose(reads.prefill(runner, [*zip(texts, read, pages)]), expected, atol=1e-5)
            assert len(made) == count


def test_sizes_that_are_nearly_the_same_are_one():
    def size(own, whole):
        return PrefillSize.of(np.array(own), np.array(whole))

    said = size([30, 1, 12], [230, 170, 212])
    assert said == size([3] * 21, [190] * 21) == (128, 128, 4096, 256)
    assert size([1] * 300, [200] * 300) == (512, 512, 65536, 256)  # as many places as sequences
    assert size([30, 1], [30, 1]) == (128, 8, 0, 32) and size([1025], [1025]) == (2048, 8, 0, 2048)


def test_kept_prompts_are_read_in_groups_whose_keys_fit(calls, monkeypatch):
    recorded = PrefillGraphs()
    follow = lambda self, cache, fused, state_rows: setattr(self, "prefills", recorded)  # noqa: E731
    monkeypatch.setattr(cuda_graphs.GraphCache, "follow", follow)
    monkeypatch.setattr(prefill_module, "MOST_TOGETHER", 100)
    monkeypatch.setattr(cuda_graphs, "capture_graph", lambda work, pool: pytest.fail("nothing comes back here"))
    policy, asked, sizes = policy_of(), prompts((33, 33, 33, 33)), []
    sampling = SamplingParams(max_new_tokens=1, temperature=0)
    engine = BuiltinEngine(policy, kv_tokens=1000)
    read = PrefillGraphs.prefill

    def noted(reads, runner, texts):
        sizes.append(sum(len(ids) for ids, done, _ in texts if done))
        return read(reads, runner, texts)

    monkeypatch.setattr(PrefillGraphs, "prefill", noted)
    with engine.session(sampling) as session:
        first = {session.add(ids): ids for ids in asked}
        said = {rollout.prompt: rollout.ids for rollout in session}
        further = {session.add(ids + said[number] + [5, 6]): ids for number, ids in first.items()}
        found = {rollout.prompt: rollout.ids for rollout in session}
    assert sorted(sizes) == [0, 72, 72] and len(further) == 4
    again = BuiltinEngine(policy, eager=True)
    expected = again.generate([ids + said[number] + [5, 6] for number, ids in first.items()], sampling)
    assert [found[number] for number in further] == [rollout.ids for rollout in expected]
