"""GSPO, CISPO and the mismatch corrections: closed forms, and their parents where the extra parameter is neutral."""

import math

import pytest
import torch

from trimtab.algos.policy_losses import cispo_loss, gspo_loss, is_corrected, mismatch_weights, ppo_loss


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
