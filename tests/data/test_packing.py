import numpy as np
import pytest

from trimtab.data.batches import SampleOrder, chunk, pack


@pytest.mark.parametrize("seed", range(5))
def test_bins_hold_every_sample_once_within_the_budget_and_waste_little(seed):
    lengths = np.random.default_rng(seed).integers(1, 200, 300).tolist()
    bins = pack(lengths, 256)
    assert sorted(i for members in bins for i in members) == list(range(300))
    assert all(sum(lengths[i] for i in members) <= 256 for members in bins)
    # First-fit-decreasing is never worse than 11/9 of the best plus one bin.
    assert len(bins) <= 11 / 9 * -(-sum(lengths) // 256) + 1


def test_a_sample_longer_than_the_budget_is_alone():
    assert [2] in pack([5, 4, 30, 6], 10)


def test_chunks_hold_every_sample_once_and_neighbours_in_length():
    cut = chunk([5, 9, 1, 7, 3], 2)
    assert cut == [[1, 3], [0, 4], [2]]


def test_every_epoch_visits_every_sample_once_in_another_order():
    order = SampleOrder(samples=10, batch_size=4, epochs=2, seed=7)
    assert order.steps == 6
    steps = [order.step_samples(k) for k in range(6)]
    assert [len(s) for s in steps] == [4, 4, 2, 4, 4, 2]
    first, second = ([i for step in part for i in step] for part in (steps[:3], steps[3:]))
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    assert [order.ends_epoch(k) for k in range(6)] == [False, False, True, False, False, True]


def test_a_step_can_be_asked_for_in_any_order():
    order = SampleOrder(samples=50, batch_size=8, epochs=3, seed=1)
    forwards = [order.step_samples(k) for k in range(order.steps)]
    again = SampleOrder(samples=50, batch_size=8, epochs=3, seed=1)
    assert [again.step_samples(k) for k in reversed(range(order.steps))] == forwards[::-1]


def test_without_shuffling_every_epoch_is_in_the_order_of_the_data():
    order = SampleOrder(samples=5, batch_size=2, epochs=2, seed=7, shuffled=False)
    assert [order.step_samples(k) for k in range(order.steps)] == [[0, 1], [2, 3], [4]] * 2


def test_an_epoch_leaves_out_what_does_not_fill_a_multiple_and_the_next_one_others():
    order = SampleOrder(samples=10, batch_size=1, epochs=40, seed=7, multiple=4)
    assert order.samples_per_epoch == 8 and order.steps == 320
    epochs = [{order.step_samples(k)[0] for k in range(8 * e, 8 * e + 8)} for e in range(40)]
    assert {len(epoch) for epoch in epochs} == {8} and set.union(*epochs) == set(range(10))
    whole = SampleOrder(samples=10, batch_size=1, epochs=40, seed=7)
    assert [order.step_samples(k) for k in range(8)] == [whole.step_samples(k) for k in range(8)]


def test_another_seed_batch_or_content_is_another_fingerprint():
    base = SampleOrder(10, 4, 2, 7)
    others = [SampleOrder(11, 4, 2, 7), SampleOrder(10, 5, 2, 7), SampleOrder(10, 4, 2, 8)]
    others += [SampleOrder(10, 4, 2, 7, shuffled=False), SampleOrder(10, 4, 2, 7, multiple=4)]
    prints = {o.fingerprint("x") for o in [base, *others]} | {base.fingerprint("y")}
    assert len(prints) == 7 and SampleOrder(10, 4, 3, 7).fingerprint("x") == base.fingerprint("x")
