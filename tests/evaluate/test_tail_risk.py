"""Figures of the tail against brute force, closed forms and exact probabilities."""

import math

import numpy as np
import pytest

from trimtab.evaluate.tail_risk import cvar, mean, probability_below, rare_event, share


def normal(n, seed=0):
    return np.random.default_rng(seed).normal(size=n)


def test_cvar_is_the_mean_of_the_worst_k_and_says_k():
    rewards = np.array([3.0, -7.0, 1.0, -2.0, 0.0, 5.0, -4.0, 2.0, 2.0, 9.0])
    assert (cvar(rewards, 0.3).value, cvar(rewards, 0.3).k) == (pytest.approx(-13 / 3), 3)
    assert (cvar(rewards, 0.001).value, cvar(rewards, 0.001).k) == (-7.0, 1)
    assert cvar(rewards, 1.0).value == pytest.approx(rewards.mean())
    assert cvar(np.arange(100.0), 0.29).k == 29
    assert cvar(np.zeros(50_000), 0.0001).k == 5


def test_the_bootstrap_of_the_worst_k_equals_resampling_everything():
    rewards, draws = normal(300), 20_000
    found = cvar(rewards, 0.05, draws=draws, seed=1)
    resampled = np.random.default_rng(2).choice(rewards, (draws, 300))
    worst = np.sort(resampled, axis=1)[:, :15].mean(axis=1)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(worst, [0.025, 0.975])), abs=0.02)


def test_the_same_seed_gives_the_same_interval_in_whatever_parts_it_is_drawn(monkeypatch):
    first = cvar(normal(500), 0.1, seed=3)
    assert cvar(normal(500), 0.1, seed=3) == first
    assert cvar(normal(500), 0.1, seed=4) != first
    monkeypatch.setattr("trimtab.evaluate.tail_risk.DRAWN_AT_ONCE", 50 * 100)
    in_parts = cvar(normal(500), 0.1, seed=3)
    assert (in_parts.low, in_parts.high) == pytest.approx((first.low, first.high), abs=0.02)


@pytest.mark.parametrize("count, of", [(0, 50), (3, 50), (25, 50), (50, 50), (1, 10_000)])
def test_wilsons_bounds_solve_the_equation_they_come_from(count, of):
    found = share(count, of)
    for bound in (found.low, found.high):
        if 0 < bound < 1:
            assert (count / of - bound) ** 2 == pytest.approx(1.959964**2 * bound * (1 - bound) / of, rel=1e-4)
    assert found.low <= count / of <= found.high
    assert (found.low == 0) == (count == 0) and (found.high == 1) == (count == of)


def test_a_share_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    counts = rng.binomial(200, 0.03, size=2000)
    covered = [share(int(c), 200).low <= 0.03 <= share(int(c), 200).high for c in counts]
    assert 0.92 < np.mean(covered) < 0.99


def test_mean_and_probability_below_count_what_they_say():
    assert probability_below([-1.0, 0.0, 1.0, 2.0], 0.0).value == 0.25
    found = mean([1.0, 2.0, 3.0])
    assert (found.value, found.high - found.value) == pytest.approx((2.0, 1.959964 / math.sqrt(3)))


# A model p = N(0, 1) whose bad event x > 6 has probability 1e-9, and a proposal q = N(6, 1) that sees it half the time.
LOG_TRUTH = math.log(9.8659e-10)


def proposal(n, seed):
    samples = np.random.default_rng(seed).normal(6, 1, n)
    return -(samples**2) / 2 + (samples - 6) ** 2 / 2, samples > 6


def test_importance_sampling_finds_a_probability_that_plain_sampling_cannot():
    found = rare_event(*proposal(4000, 0))
    assert found.log_probability == pytest.approx(LOG_TRUTH, abs=0.1)
    assert probability_below(-normal(4000), -6).value == 0.0
    covered = [r.log_low <= LOG_TRUTH <= r.log_high for r in (rare_event(*proposal(4000, s)) for s in range(200))]
    assert 0.9 < np.mean(covered) <= 1.0


def test_with_equal_weights_importance_sampling_is_the_plain_share():
    bad = np.arange(100) < 7
    found = rare_event(np.zeros(100), bad)
    assert math.exp(found.log_probability) == pytest.approx(0.07)
    assert (found.effective_samples, found.effective_bad_samples) == (pytest.approx(100), pytest.approx(7))
    deviation = math.sqrt(0.07 * 0.93 / 99) / 0.07
    assert found.log_high - found.log_probability == pytest.approx(1.959964 * deviation)


def test_weights_of_any_scale_stay_in_range_and_no_bad_sample_proves_nothing():
    weights, bad = proposal(1000, 0)
    far, near = rare_event(weights - 2000, bad), rare_event(weights, bad)
    assert far.log_probability == pytest.approx(near.log_probability - 2000)
    assert far.effective_samples == pytest.approx(near.effective_samples)
    nothing = rare_event(weights, np.zeros(1000, dtype=bool))
    assert (nothing.log_probability, nothing.log_high) == (-math.inf, 0.0)
