"""What a token counts in the step's loss, of the policy and of the critic."""

import math

import numpy as np
import pytest
import torch

from trimtab.algos.policy_losses import kl_estimate
from trimtab.config.rl_jobs import GRPOOptions, PPOOptions
from trimtab.data.batches import TokenBatch
from trimtab.models.policy import PolicyOutput
from trimtab.train.rl.objective import policy_loss_term, token_weights, value_loss_term

LENGTHS = (1, 4)  # answers to prompts of two tokens


def batch_of(**extra) -> TokenBatch:
    examples = [(np.arange(2 + length), np.arange(2 + length) >= 2) for length in LENGTHS]
    batch = TokenBatch.of(examples)
    batch.extra.update(extra)
    return batch


TOTALS = {"tokens": 5.0, "answers": 2.0}


@pytest.mark.parametrize(
    "reduction, weights",
    [("token", [0.2] * 5), ("answer", [0.5, *[0.125] * 4]), ("constant", [1 / 20] * 5)],
)
def test_a_reduction_weighs_tokens_of_short_and_long_answers(reduction, weights):
    options = PPOOptions(loss_reduction=reduction, generate_max_len=10)
    torch.testing.assert_close(token_weights(batch_of(), TOTALS, options), torch.tensor(weights))
    # The critic's losses are 1/2 (value - return)^2 where nothing is clipped.
    values_N, returns_N = torch.arange(5.0), torch.tensor([2.0, 0.0, 0.0, 5.0, 4.0])
    batch = batch_of(values_N=values_N, returns_N=returns_N)
    share = value_loss_term(lambda _: values_N, batch, TOTALS, options)
    expected = sum(w * 0.5 * (v - r) ** 2 for w, v, r in zip(weights, values_N.tolist(), returns_N.tolist()))
    assert float(share.loss) == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_kl_that_the_update_measures_changes_advantages_as_one_in_the_rewards(estimator):
    """Each token answers for the KL from it to the end of its answer."""
    options = GRPOOptions(kl_estimator=estimator, init_kl_coef=0.3, use_kl_loss=False)
    log_probs_N, reference_N = torch.tensor([-1.0, -2, -3, -0.5, -1.5]), torch.tensor([-1.2, -2.5, -2, -0.5, -3.0])
    kl = kl_estimate(log_probs_N, reference_N, estimator).tolist()
    advantages_N = torch.tensor([1.0, -2, -2, -2, -2])
    expected_N = advantages_N - 0.3 * torch.tensor([kl[0], sum(kl[1:]), sum(kl[2:]), sum(kl[3:]), kl[4]])

    def share(**columns):
        own_N = log_probs_N.clone().requires_grad_()
        found = policy_loss_term(
            lambda _, **settings: PolicyOutput(own_N),
            batch_of(sampled_N=log_probs_N, **columns),
            TOTALS | {"seen_tokens": 5.0},
            options,
            kl_coefficient=0.3,
        )
        return found, torch.autograd.grad(found.loss, own_N)[0]

    remaining_N = torch.tensor([0, 3, 2, 1, 0])
    left, gradient = share(advantages_N=advantages_N, reference_N=reference_N, remaining_N=remaining_N)
    known, expected = share(advantages_N=expected_N)
    torch.testing.assert_close((left.loss, gradient), (known.loss, expected))
    assert float(left.figures["kl"]) == pytest.approx(sum(kl) / 5)
    assert float(left.figures["kl_answer"]) == pytest.approx(sum(kl) / 2)
    assert float(left.figures["advantage_size"]) == pytest.approx(float(expected_N.abs().mean()))


def figures_of(options, ratios, totals=None, **columns):
    """What is measured of a policy whose probabilities are so many times those that the tokens were drawn with."""
    log_probs_N = torch.full((5,), -1.0)
    columns |= {"advantages_N": torch.ones(5), "sampled_N": log_probs_N - torch.tensor(ratios).log()}
    return policy_loss_term(
        lambda _, **settings: PolicyOutput(log_probs_N),
        batch_of(**columns),
        TOTALS | {"seen_tokens": 5.0} | (totals or {}),
        options,
        kl_coefficient=0.0,
    ).figures


@pytest.mark.parametrize("kind, share", [("tis", 0.6), ("icepop", 0.6), ("sequence", 0.2), (None, None)])
def test_corrected_tokens_are_counted_among_those_that_are_seen(kind, share):
    """Weights of 3, and of 1, 1.05, 0.8 and 0.5; the first answer as a whole is outside the range of 0.4 to 2."""
    options = PPOOptions(mismatch_correction=kind, mismatch_range=(0.4, 2.0), init_kl_coef=0.0)
    found = figures_of(options, [3.0, 1.0, 1.05, 0.8, 0.5])
    assert found.get("corrected_share") == (None if share is None else pytest.approx(share))


def test_the_gap_of_fresh_tokens_leaves_out_those_that_older_weights_drew():
    ratios, options = [3.0, 1.0, 1.25, 0.8, 0.5], PPOOptions(init_kl_coef=0.0)
    assert "log_prob_gap_fresh" not in figures_of(options, ratios)
    fresh_N = torch.tensor([0.0, 1, 1, 0, 0])
    found = figures_of(options, ratios, {"fresh_tokens": 2.0}, fresh_N=fresh_N)
    assert float(found["log_prob_gap_fresh"]) == pytest.approx(math.log(1.25) / 2)
    none = figures_of(options, ratios, {"fresh_tokens": 0.0}, fresh_N=torch.zeros(5))
    assert none["log_prob_gap_fresh"] == 0 and found["log_prob_gap"] == none["log_prob_gap"]
