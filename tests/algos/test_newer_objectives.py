"""GSPO, CISPO, SAPO, GMPO, clip-cov, KL-cov and the mismatch corrections: closed forms, their papers' formulas in
plain loops, and their parents where the extra parameter is neutral."""

import math

import numpy as np
import pytest
import torch

from trimtab.algos.policy_losses import (
    adapted_entropy_coefficient,
    chosen_by_covariance,
    cispo_loss,
    covariances,
    gmpo_loss,
    gspo_loss,
    is_corrected,
    kl_cov_loss,
    mismatch_weights,
    ppo_loss,
    sapo_loss,
    surrogate_loss,
)


def batch(lengths=(3, 1, 4), seed=0, spread=0.3):
    generator = torch.Generator().manual_seed(seed)
    owners = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    draw = lambda: torch.randn(len(owners), generator=generator, dtype=torch.float64)  # noqa: E731
    log_probs = (-1 + spread * draw()).requires_grad_()
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)[owners]
    return log_probs, (-1 + spread * draw()), advantages, owners


def gradient(loss_N, log_probs_N):
    return torch.autograd.grad(loss_N.sum(), log_probs_N)[0]


def test_gspo_has_one_ratio_an_answer_worked_out_by_hand():
    log_probs, old, advantages, owners = batch((2, 1))
    loss, clipped = gspo_loss(log_probs, old, advantages, owners, 2, 0.1, 0.2)
    for answer, tokens in ((0, [0, 1]), (1, [2])):
        ratio = math.exp(sum(float(log_probs[t] - old[t]) for t in tokens) / len(tokens))
        a = float(advantages[tokens[0]])
        expected = -min(ratio * a, min(max(ratio, 0.9), 1.2) * a)
        assert loss[tokens].tolist() == pytest.approx([expected] * len(tokens)), answer
        assert clipped[tokens].tolist() == [expected != pytest.approx(-ratio * a)] * len(tokens)


def test_gspo_of_single_tokens_is_ppo():
    log_probs, old, advantages, owners = batch((1,) * 12)
    ours = gspo_loss(log_probs, old, advantages, owners, 12, 0.2, 0.28)
    theirs = ppo_loss(log_probs, old, advantages, 0.2, 0.28)
    torch.testing.assert_close(ours, theirs)


def test_on_policy_every_objective_has_the_gradient_of_reinforce():
    log_probs, _, advantages, owners = batch()
    old, lengths = log_probs.detach(), torch.bincount(owners).double()[owners]
    expected = -advantages
    ppo, _ = ppo_loss(log_probs, old, advantages, 0.2, 0.2)
    other, _ = cispo_loss(log_probs, old, advantages, 0.2)
    torch.testing.assert_close(gradient(ppo, log_probs), expected)
    torch.testing.assert_close(gradient(other, log_probs), expected)
    soft, _ = sapo_loss(log_probs, old, advantages, (1.3, 0.7))
    torch.testing.assert_close(gradient(soft, log_probs), expected)
    pulled, _ = kl_cov_loss(log_probs, old, advantages, torch.ones_like(advantages, dtype=torch.bool), 2.0)
    torch.testing.assert_close(gradient(pulled, log_probs), expected)
    geometric, _ = gmpo_loss(log_probs, old, advantages, owners, 3, 0.2, 0.2)
    torch.testing.assert_close(gradient(geometric / lengths, log_probs), expected / lengths)
    # GSPO's mean over an answer's tokens: each of its tokens carries the answer's loss, divided by its length.
    whole, _ = gspo_loss(log_probs, old, advantages, owners, 3, 0.2, 0.2)
    torch.testing.assert_close(gradient(whole / lengths, log_probs), expected / lengths)


def test_cispo_with_a_wide_clip_has_the_unclipped_gradient_of_ppo_and_clips_only_the_weight():
    log_probs, old, advantages, _ = batch()
    ratio = (log_probs - old).exp().detach()
    wide, cut = cispo_loss(log_probs, old, advantages, 1e9)
    plain, _ = ppo_loss(log_probs, old, advantages, 1.0, 1e9)
    torch.testing.assert_close(gradient(wide, log_probs), gradient(plain, log_probs))
    assert not cut.any()
    tight, cut = cispo_loss(log_probs, old, advantages, 0.0)
    torch.testing.assert_close(gradient(tight, log_probs), -ratio.clamp(max=1.0) * advantages)
    assert torch.equal(cut, ratio > 1) and cut.any()


def differences(log_probs, old):
    return [float(new - before) for new, before in zip(log_probs.detach(), old)]


def test_sapo_is_the_papers_gate_and_fades_on_both_sides():
    log_probs, old, advantages, _ = batch((3, 1, 4, 5), spread=0.8)
    loss, clipped = sapo_loss(log_probs, old, advantages, (1.0, 1.7))
    found = []
    for d, a in zip(differences(log_probs, old), advantages.tolist()):
        tau = 1.0 if a > 0 else 1.7
        found.append(-a * 4 / tau / (1 + math.exp(-tau * (math.exp(d) - 1))))
    assert loss.tolist() == pytest.approx(found) and not clipped.any()
    # The paper's weight of a token's gradient: 4 p (1 - p) rho, p the gate's sigmoid; at rho = 1 it is 1.
    tau = torch.where(advantages > 0, 1.0, 1.7)
    rho = (log_probs - old).exp().detach()
    p = torch.sigmoid(tau * (rho - 1))
    torch.testing.assert_close(gradient(loss, log_probs), -4 * p * (1 - p) * rho * advantages)


def test_gmpo_is_the_papers_geometric_mean_of_clipped_ratios():
    log_probs, old, advantages, owners = batch((3, 1, 4, 5), spread=0.8)
    loss, clipped = gmpo_loss(log_probs, old, advantages, owners, 4, 0.3, 0.4)
    d = differences(log_probs, old)
    for answer in range(4):
        tokens = [t for t, owner in enumerate(owners.tolist()) if owner == answer]
        a = float(advantages[tokens[0]])
        sign = math.copysign(1, a)
        # verl and the authors' code: sgn min(sgn d, sgn clamp(d))
        bounded = [sign * min(sign * d[t], sign * min(max(d[t], -0.3), 0.4)) for t in tokens]
        expected = -a * math.prod(math.exp(b) for b in bounded) ** (1 / len(tokens))
        assert loss[tokens].tolist() == pytest.approx([expected] * len(tokens))
        assert clipped[tokens].tolist() == [b != pytest.approx(d[t]) for b, t in zip(bounded, tokens)]
    per_token = gradient(loss, log_probs)
    assert clipped.any() and not clipped.all() and (per_token[clipped] == 0).all() and (per_token[~clipped] != 0).all()


def test_gmpo_of_single_tokens_is_ppo_with_exponential_bounds():
    log_probs, old, advantages, owners = batch((1,) * 12, spread=0.5)
    ours = gmpo_loss(log_probs, old, advantages, owners, 12, 0.2, 0.3)
    theirs = ppo_loss(log_probs, old, advantages, 1 - math.exp(-0.2), math.exp(0.3) - 1)
    torch.testing.assert_close(ours, theirs)


def test_covariances_are_those_of_numpy():
    log_probs, _, advantages, _ = batch((3, 1, 4))
    found = covariances(log_probs.detach(), advantages)
    expected = np.cov(log_probs.detach().numpy(), advantages.numpy(), bias=True)[0, 1]
    assert float(found.mean()) == pytest.approx(expected)
    x, a = log_probs.detach().numpy(), advantages.numpy()
    assert found.tolist() == pytest.approx([(x[t] - x.mean()) * (a[t] - a.mean()) for t in range(8)])


def test_kl_cov_chooses_the_largest_and_clip_cov_some_within_its_range():
    found = torch.tensor([0.5, 3.0, -1.0, 2.0, 9.0, 1.5, 4.9, 0.0])
    order = torch.tensor([4, 6, 0, 3, 1, 5, 2, 7])
    chosen = lambda kind, ratio: chosen_by_covariance(kind, found, ratio, (1.0, 5.0), order).nonzero()[:, 0].tolist()  # noqa: E731
    assert chosen("kl_cov", 0.25) == [4, 6]
    assert chosen("kl_cov", 1e-9) == [4], "at least one"
    assert chosen("clip_cov", 0.25) == [3, 6], "of 6, 3, 1, 5 the first two"
    assert chosen("clip_cov", 1.0) == [1, 3, 5, 6], "all within the range, and no others"
    none = chosen_by_covariance("clip_cov", torch.zeros(8), 0.5, (1.0, 5.0), order)
    assert not none.any()


def test_clip_cov_is_ppo_without_the_chosen_tokens_and_kl_cov_adds_their_kl():
    """As verl's loops: max(-A rho, -A clip(rho)) times 0 or 1; -A rho + beta |log rho| for the chosen."""
    log_probs, old, advantages, owners = batch((3, 1, 4), spread=0.8)
    chosen_N = torch.tensor([True, False, False, True, False, True, False, False])
    shared = {"low": 0.2, "high": 0.28, "chosen_N": chosen_N, "kl_cov_coefficient": 0.7}
    clip, clipped = surrogate_loss("clip_cov", log_probs, old, advantages, owners, 3, **shared)
    kl, _ = surrogate_loss("kl_cov", log_probs, old, advantages, owners, 3, **shared)
    for t, (d, a) in enumerate(zip(differences(log_probs, old), advantages.tolist())):
        rho, picked = math.exp(d), bool(chosen_N[t])
        assert float(clip[t]) == pytest.approx(max(-a * rho, -a * min(max(rho, 0.8), 1.28)) * (not picked))
        assert float(kl[t]) == pytest.approx(-a * rho + 0.7 * abs(d) * picked)
    assert clipped[chosen_N].all() and (gradient(clip, log_probs)[chosen_N] == 0).all()


def test_the_entropy_coefficient_moves_by_steps_between_0_and_the_most():
    """The controller of TRL's GRPOTrainer, over a run of entropies."""
    ours = theirs = 0.01
    for entropy in (0.5, 0.2, 0.1, 0.1, 0.1, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3):
        ours = adapted_entropy_coefficient(ours, entropy, 0.2, 0.005, 0.022)
        theirs = min(theirs + 0.005, 0.022) if entropy <= 0.2 else max(theirs - 0.005, 0.0)
        assert ours == theirs
    assert ours == 0.0


@pytest.mark.parametrize("kind", ["tis", "icepop", "sequence"])
def test_equal_log_probs_need_no_correction(kind):
    log_probs, _, _, owners = batch()
    assert (mismatch_weights(kind, log_probs, log_probs.detach(), owners, 3, 0.5, 2.0) == 1).all()


def test_corrections_by_hand():
    old = torch.tensor([0.0, 1.0, -1.0, 0.1, -0.1])
    sampled, owners = torch.zeros(5), torch.tensor([0, 0, 0, 1, 1])
    w = old.exp()
    tis = mismatch_weights("tis", old, sampled, owners, 2, 0.5, 2.0)
    torch.testing.assert_close(tis, torch.tensor([1.0, 2.0, w[2], w[3], w[4]]))
    icepop = mismatch_weights("icepop", old, sampled, owners, 2, 0.5, 2.0)
    torch.testing.assert_close(icepop, torch.tensor([1.0, 0.0, 0.0, w[3], w[4]]))
    sequence = mismatch_weights("sequence", old + torch.tensor([0, 2.0, 1, 0, 0]), sampled, owners, 2, 0.5, 2.0)
    assert sequence.tolist() == [0, 0, 0, 1, 1]


def test_a_correction_carries_no_gradient():
    log_probs, sampled, _, owners = batch()
    assert not mismatch_weights("tis", log_probs, sampled, owners, 3, 0.5, 2.0).requires_grad


def test_corrected_are_the_tokens_whose_weight_is_off_by_more_than_a_tenth():
    weights = torch.tensor([1.0, 1.09, 0.91, 1.11, 0.89, 2.0, 0.0])
    assert is_corrected(weights).tolist() == [False, False, False, True, True, True, True]


@pytest.mark.parametrize("spread", [0.02, 0.1, 0.5])
def test_the_share_of_corrected_tokens_is_that_of_the_gaps_distribution(spread):
    """Gaps z from N(0, spread): of exp(z), truncated at 2, all outside 0.9 to 1.1 are corrected; of what icepop leaves
    out too."""
    sampled = spread * torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    normal = torch.distributions.Normal(0.0, spread)
    low, high = normal.cdf(torch.tensor([0.9, 1.1]).log())
    owners = torch.zeros(len(sampled), dtype=torch.int64)
    for kind in ("tis", "icepop"):
        weights = mismatch_weights(kind, torch.zeros_like(sampled), sampled, owners, 1, 0.5, 2.0)
        assert is_corrected(weights).float().mean() == pytest.approx(1 - float(high - low), abs=4e-3)
