"""Discounted sums and GAE against plain loops over ragged sequences; whitening against its definition."""

import random
import statistics

import pytest
import torch

from tests.algos.flat import flat
from trimtab.algos import advantages
from trimtab.algos.advantages import discounted_sums, gae, whiten

LENGTHS = [
    [1],
    [1, 1, 1],
    [4, 1, 8],
    [7, 9, 2, 1, 16, 17, 3],
    [random.Random(0).randint(1, 70) for _ in range(12)],
]


def random_tokens(lengths: list[int], seed: int) -> torch.Tensor:
    return torch.randn(sum(lengths), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sequences(values_N: torch.Tensor, lengths: list[int]) -> list[list[float]]:
    return [part.tolist() for part in values_N.split(lengths)]


def loop_sums(values: list[float], discount: float) -> list[float]:
    total, sums = 0.0, []
    for value in reversed(values):
        total = value + discount * total
        sums.insert(0, total)
    return sums


def loop_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    advantages, advantage, value_after = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * value_after - value + gamma * lam * advantage
        value_after = value
        advantages.insert(0, advantage)
    return advantages


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}_sequences")
@pytest.mark.parametrize("discount", [0.0, 0.5, 0.97, 1.0])
def test_discounted_sums_equal_a_loop_over_each_sequence(lengths, discount):
    values = random_tokens(lengths, seed=1)
    found = discounted_sums(values, flat(lengths)[0], discount)
    expected = [x for sequence in sequences(values, lengths) for x in loop_sums(sequence, discount)]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}_sequences")
@pytest.mark.parametrize("gamma", [1.0, 0.95, 0.3])
@pytest.mark.parametrize("lam", [1.0, 0.95, 0.0])
def test_gae_equals_a_loop_over_each_sequence(lengths, gamma, lam):
    rewards, values = random_tokens(lengths, seed=2), random_tokens(lengths, seed=3)
    advantages, returns = gae(rewards, values, flat(lengths)[0], gamma, lam)
    pairs = zip(sequences(rewards, lengths), sequences(values, lengths), strict=True)
    expected = [x for r, v in pairs for x in loop_gae(r, v, gamma, lam)]
    assert advantages.tolist() == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(returns, advantages + values)


def average_of_n_step_advantages(rewards, values, after, gamma, lam) -> list[float]:
    """GAE's definition: all n-step advantages weighed by (1 - lam) lam^(n - 1), the longest by what is left."""
    values, advantages = [*values, after], []
    for t in range(len(rewards)):
        found = []
        for n in range(1, len(rewards) - t + 1):
            rewarded = sum(gamma**i * rewards[t + i] for i in range(n))
            found.append(rewarded + gamma**n * values[t + n] - values[t])
        weights = [(1 - lam) * lam**n for n in range(len(found) - 1)] + [lam ** (len(found) - 1)]
        advantages.append(sum(weight * advantage for weight, advantage in zip(weights, found, strict=True)))
    return advantages


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.95, 0.0), (0.0, 0.7)])
def test_gae_of_a_cut_sequence_is_the_average_of_n_step_advantages_that_end_in_the_value_after_it(gamma, lam):
    lengths = [4, 1, 7, 3]
    rewards, values, after = (random_tokens(lengths, seed=seed) for seed in (2, 3, 4))
    after = torch.where(flat(lengths)[0] == 0, after, torch.inf)  # nothing else is read
    after[-1] = 0.0  # one that has ended
    found, returns = gae(rewards, values, flat(lengths)[0], gamma, lam, after)
    parts = zip(*(sequences(column, lengths) for column in (rewards, values, after)), strict=True)
    expected = [x for r, v, a in parts for x in average_of_n_step_advantages(r, v, a[-1], gamma, lam)]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(returns, found + values)


def test_a_sequence_that_is_cut_anywhere_has_the_advantages_of_the_whole_one_if_the_critic_is_right():
    """Closed form: a reward of 1 for ever is worth 1 / (1 - gamma) in every state, and no token is better than another;
    taken for an end, the cut costs gamma^(T - t) / (1 - gamma)."""
    gamma, length = 0.9, 5
    rewards, remaining = torch.ones(length, dtype=torch.float64), flat([length])[0]
    values = torch.full_like(rewards, 1 / (1 - gamma))
    for lam in (0.0, 0.5, 1.0):
        cut, returns = gae(rewards, values, remaining, gamma, lam, values)
        assert cut.tolist() == pytest.approx([0.0] * length, abs=1e-12)
        torch.testing.assert_close(returns, values)
    ended, _ = gae(rewards, values, remaining, gamma, 1.0)
    assert ended.tolist() == pytest.approx([-(gamma ** (length - t)) / (1 - gamma) for t in range(length)])


def test_gae_with_lambda_one_returns_the_rewards_to_go_whatever_the_values():
    lengths = [5, 1, 11]
    rewards = random_tokens(lengths, seed=4)
    _, returns = gae(rewards, random_tokens(lengths, seed=5), flat(lengths)[0], 0.9, 1.0)
    torch.testing.assert_close(returns, discounted_sums(rewards, flat(lengths)[0], 0.9))


def test_another_sequence_does_not_leak_in_even_if_it_is_infinite():
    values = torch.tensor([1.0, 2.0, torch.inf, torch.inf])
    remaining, _ = flat([2, 2])
    assert discounted_sums(values, remaining, 1.0)[:2].tolist() == [3.0, 2.0]
    assert gae(torch.zeros(4), values, remaining, 1.0, 1.0)[0][:2].tolist() == [-1.0, -2.0]


def test_no_tokens_have_no_sums():
    assert discounted_sums(torch.zeros(0), torch.zeros(0, dtype=torch.int64), 1.0).shape == (0,)


def test_fp32_sums_over_thousands_of_tokens_keep_their_digits():
    lengths = [4096]
    values = random_tokens(lengths, seed=6)
    found = discounted_sums(values.float(), flat(lengths)[0], 1.0)
    torch.testing.assert_close(found.double(), values.flip(0).cumsum(0).flip(0), atol=1e-4, rtol=1e-5)


def test_whitening_divides_by_the_deviation_over_all_tokens():
    values = [1.0, 2.0, 4.0, -3.0, 0.5]
    mean, deviation = statistics.fmean(values), statistics.pstdev(values)
    assert whiten(torch.tensor(values)).tolist() == pytest.approx([(v - mean) / deviation for v in values], abs=1e-6)


def test_whitening_without_scale_centres_only():
    assert whiten(torch.tensor([1.0, 2.0, 6.0]), scale=False).tolist() == [-2.0, -1.0, 3.0]


def test_whitening_does_not_blow_up_equal_or_nearly_equal_values():
    for value in 3.0, 0.1, 1 / 3, -7.7:  # most means of which round to another float
        assert whiten(torch.full((7,), value)).tolist() == [0.0] * 7
        assert whiten(torch.full((7,), value), scale=False).tolist() == [0.0] * 7
    assert whiten(torch.tensor([0.1, 0.1 + 1e-8, 0.1 - 1e-8])).tolist() == [0.0] * 3, "one unit in the last place"
    assert whiten(torch.tensor([1e-6, -1e-6])).tolist() == pytest.approx([1e-2, -1e-2])  # the floor: 1e-4


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_how_many_tokens_are_summed_up_at_once_changes_no_bit(discount, monkeypatch):
    lengths = [random.Random(1).randint(1, 70) for _ in range(40)]
    values = random_tokens(lengths, 2).float()
    values[::3] = -0.0
    remaining = flat(lengths)[0]
    whole = discounted_sums(values, remaining, discount)
    for tokens in (1, 64, 200):
        monkeypatch.setattr(advantages, "TOKENS_AT_ONCE", tokens)
        found = discounted_sums(values, remaining, discount)
        assert torch.equal(found.view(torch.int32), whole.view(torch.int32))
