"""Figures of the tail against brute force, closed forms and exact probabilities."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from trimtab.evaluate.tail_risk import Estimate, cvar, mean, probability_below, rare_event, rate, share


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
    assert (found.value, found.high - found.value) == pytest.approx((2.0, 4.302653 / math.sqrt(3)), rel=1e-4)


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
    assert found.log_high - found.log_probability == pytest.approx(1.984217 * deviation, rel=1e-4)


def test_weights_of_any_scale_stay_in_range_and_no_bad_sample_proves_nothing():
    weights, bad = proposal(1000, 0)
    far, near = rare_event(weights - 2000, bad), rare_event(weights, bad)
    assert far.log_probability == pytest.approx(near.log_probability - 2000)
    assert far.effective_samples == pytest.approx(near.effective_samples)
    nothing = rare_event(weights, np.zeros(1000, dtype=bool))
    assert (nothing.log_probability, nothing.log_high) == (-math.inf, 0.0)


# Rewards of an answer: N(0, 1) of its prompt, and N(0, 1) of its own on top; together N(0, 2).
THRESHOLD, LEVEL = -1.5, 0.2
BELOW = NormalDist(0, math.sqrt(2)).cdf(THRESHOLD)
WORST = -math.sqrt(2) * NormalDist().pdf(NormalDist().inv_cdf(LEVEL)) / LEVEL


def answers_to_new_prompts(seed, prompts=60, answers=20):
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=(prompts, 1)) + rng.normal(size=(prompts, answers))
    return rewards.ravel(), np.repeat(np.arange(prompts), answers)


@pytest.mark.parametrize(
    ("figure", "truth"),
    [
        (mean, 0.0),
        (lambda rewards, *prompts: probability_below(rewards, THRESHOLD, *prompts), BELOW),
        (lambda rewards, *prompts: cvar(rewards, LEVEL, *prompts, draws=150), WORST),
    ],
    ids=["mean", "probability", "cvar"],
)
def test_intervals_for_new_prompts_cover_them_and_those_of_pooled_answers_do_not(figure, truth):
    covered, pooled = [], []
    for seed in range(300):
        rewards, prompts = answers_to_new_prompts(seed)
        new, same = figure(rewards, prompts), figure(rewards)
        covered.append(new.low <= truth <= new.high)
        pooled.append(same.low <= truth <= same.high)
    assert 0.9 <= np.mean(covered) <= 0.98
    assert np.mean(pooled) < 0.75


def test_a_rare_event_found_by_a_proposal_covers_new_prompts():
    # Of a prompt with rate e^c the proposal finds the event in half of its samples; weights put it right.
    covered = []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        weights = np.repeat(rng.normal(-12, 0.8, 60), 20)
        bad = rng.random(1200) < 0.5
        found = rare_event(weights, bad, np.repeat(np.arange(60), 20))
        covered.append(found.log_low <= math.log(0.5) - 12 + 0.8**2 / 2 <= found.log_high)
    assert 0.9 <= np.mean(covered) <= 0.98


def test_a_prompt_with_one_answer_each_is_an_answer():
    rewards = normal(80)
    own = np.arange(80)
    assert mean(rewards, own) == mean(rewards)
    bad = rewards < 0
    assert rare_event(rewards, bad, own) == rare_event(rewards, bad)
    found, plain = rate(bad, own), rate(bad)
    assert (found.low, found.high) == pytest.approx((plain.low, plain.high), rel=0.03)


def test_where_nothing_was_seen_prompts_are_counted_and_not_answers():
    prompts = np.repeat(np.arange(50), 20)
    assert rate(np.zeros(1000), prompts) == share(0, 50)
    assert rate(np.ones(1000), prompts) == share(50, 50)
    one = rate(np.arange(1000) < 20, prompts)  # all answers to one prompt
    assert one.value == 0.02 and one.high > 0.08 and rate(np.arange(1000) < 20).high < 0.035


def test_one_prompt_tells_nothing_of_new_ones():
    same = np.zeros(30, dtype=int)
    assert mean(normal(30), same).high == math.inf and cvar(normal(30), 0.1, same).low == -math.inf
    assert rate(normal(30) < 0, same) == Estimate((normal(30) < 0).mean(), 0.0, 1.0)


@pytest.mark.parametrize(
    ("right", "number", "low", "high"),
    # By hand: (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n), z = 1.96
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_interval_has_the_published_values(right, number, low, high):
    found = share(right, number)
    assert (found.low, found.high) == pytest.approx((low, high), abs=2e-4)
