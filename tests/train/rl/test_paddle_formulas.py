"""Advantages and losses as PaddleNLP's guide writes them, worked out answer by answer; how far ours are from them."""

import math

import numpy as np
import pytest
import torch

from tests.train.rl.test_experience import make
from tests.train.rl.test_objective import batch_of
from trimtab.algos.advantages import NO_MOMENTS, merge_moments
from trimtab.config.rl_jobs import PPOOptions
from trimtab.models.policy import PolicyOutput
from trimtab.train.rl.objective import policy_loss_term
from trimtab.train.rl.token_advantages import compute_advantages, penalties

ANSWERS = 3  # to a prompt


def experience_of(spread: float = 1.0):
    experience = make(ANSWERS)
    rng = np.random.default_rng(8)
    experience.rewards_S = torch.tensor(rng.normal(size=len(experience)) * spread, dtype=torch.float32)
    experience.old_N = experience.sampled_N
    experience.reference_N = experience.sampled_N + torch.tensor(rng.normal(size=len(experience.sampled_N)) * 0.3)
    return experience


def by_answer(experience, values_N):
    return [values_N[experience.tokens_of([i])].double().numpy() for i in range(len(experience))]


def standardised(rewards, epsilon):
    """With the unbiased deviation of the answers to a prompt."""
    groups = rewards.reshape(-1, ANSWERS)
    return ((groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + epsilon)).ravel()


@pytest.mark.parametrize("spread, apart", [(1.0, 1e-5), (1e-3, 1e-2)])
def test_grpo_is_theirs_but_for_the_smaller_epsilon(spread, apart):
    options = PPOOptions(advantage_estimator="group_norm", n_samples_per_prompt=ANSWERS, use_kl_loss=True)
    experience = experience_of(spread)
    compute_advantages(experience, options, kl_coefficient=1e-3)
    rewards = experience.rewards_S.double().numpy()
    ours, theirs = standardised(rewards, 1e-9), standardised(rewards, 1e-6)
    assert ours == pytest.approx(theirs, rel=apart)
    for found, advantage in zip(by_answer(experience, experience.advantages_N), ours):
        assert found == pytest.approx(np.full_like(found, advantage), rel=1e-4, abs=1e-5)


def test_reinforce_plus_plus_is_theirs_but_for_the_unbiased_variance():
    kl, bound = 0.05, 0.8
    options = PPOOptions(advantage_estimator="reinforce", reward_clip_range=(-bound, bound))
    experience = experience_of()
    compute_advantages(experience, options, kl_coefficient=kl)
    returns = []
    columns = (experience.old_N, experience.reference_N)
    for old, reference, reward in zip(*(by_answer(experience, c) for c in columns), experience.rewards_S.tolist()):
        rewards = -kl * (old - reference)
        rewards[-1] += min(max(reward, -bound), bound)
        returns.append([sum(rewards[t:]) for t in range(len(rewards))])
    flat = np.concatenate(returns)
    theirs = (flat - flat.mean()) / math.sqrt(flat.var(ddof=1) + 1e-8)
    ours = experience.advantages_N.double().numpy()
    assert ours == pytest.approx(theirs * math.sqrt(len(flat) / (len(flat) - 1)), rel=1e-4, abs=1e-5)


def test_running_normalisation_comes_after_the_length_penalty_and_before_the_clip():
    options = PPOOptions(
        advantage_estimator="reinforce", reward_clip_range=(-1.0, 1.0), no_advantage_std_norm=True, init_kl_coef=0,
        generate_max_len=6, overlong_buffer_len=4, overlong_penalty_factor=2.0, running_reward_norm=True,
    )  # fmt: skip
    experience = experience_of()
    experience.reference_N = None
    lengths = experience.lengths_S.double().numpy()
    # Their form: a penalty that begins at 0 where the buffer does, and is never a bonus.
    punished = experience.rewards_S.double().numpy() + np.minimum(-(lengths - (6 - 4)) / 4 * 2.0, 0)
    assert experience.rewards_S.double() - penalties(experience, options) == pytest.approx(punished, abs=1e-6)
    before = np.array([5.0, -3.0, 1.0])
    moments = merge_moments(merge_moments(NO_MOMENTS, torch.tensor(before)), torch.tensor(punished))
    figures = compute_advantages(experience, options, 0.0, moments)
    everything = np.concatenate([before, punished])
    assert figures["reward_mean_so_far"] == pytest.approx(everything.mean())
    assert figures["reward_std_so_far"] == pytest.approx(everything.std())
    normal = np.clip((punished - everything.mean()) / everything.std(), -1, 1)
    of_tokens = np.repeat(normal, experience.lengths_S.numpy())
    assert experience.advantages_N.double().numpy() == pytest.approx(of_tokens - of_tokens.mean(), abs=1e-5)


@pytest.mark.parametrize("coefficient, bound", [(1.0, None), (0.3, None), (1.0, 0.2), (0.5, 0.2)])
def test_the_loss_is_their_weighted_sum_with_the_k3_term_kept_within_bounds(coefficient, bound):
    rng = np.random.default_rng(3)
    new, old, reference = (torch.tensor(-rng.random(5) * 2, dtype=torch.float64) for _ in range(3))
    advantages, entropy = torch.tensor(rng.normal(size=5)), torch.tensor(rng.random(5))
    batch = batch_of(advantages_N=advantages, sampled_N=old, old_N=old, reference_N=reference)
    options = PPOOptions(
        use_kl_loss=True, kl_estimator="k3", entropy_loss_coef=0.1, policy_loss_coef=coefficient, kl_clip=bound
    )
    log_probs = new.clone().requires_grad_()
    totals = {"tokens": 5.0, "answers": 2.0, "seen_tokens": 5.0}
    policy = lambda *_, **__: PolicyOutput(log_probs, entropy)  # noqa: E731
    share = policy_loss_term(policy, batch, totals, options, kl_coefficient=0.4)
    k3 = [math.exp(r - n) - (r - n) - 1 for n, r in zip(new.tolist(), reference.tolist())]
    kept = [k if bound is None else min(max(k, -bound), bound) for k in k3]
    ratios = [math.exp(n - o) for n, o in zip(new.tolist(), old.tolist())]
    pulls = [-a * r for a, r in zip(advantages.tolist(), ratios)]
    surrogate = [max(pull, -a * min(max(r, 0.8), 1.2)) for pull, a, r in zip(pulls, advantages.tolist(), ratios)]
    expected = coefficient * np.mean(surrogate) + 0.4 * np.mean(kept) - 0.1 * entropy.mean().item()
    assert share.loss.item() == pytest.approx(expected, rel=1e-6)
    assert float(share.figures["policy_loss"]) == pytest.approx(np.mean(surrogate), rel=1e-6)
    share.loss.backward()
    for place, value in enumerate(k3):
        slope = coefficient * pulls[place] * (pulls[place] == surrogate[place])
        if bound is None or value < bound:
            slope += 0.4 * (1 - math.exp(float(reference[place] - new[place])))
        assert float(log_probs.grad[place]) == pytest.approx(slope / 5, rel=1e-5)
    assert bound is None or any(value > bound for value in k3), "nothing was bounded"
