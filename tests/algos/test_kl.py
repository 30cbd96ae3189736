"""KL estimates against closed forms, and exactly in the mean over a next token's distribution."""

import math

import pytest
import torch

from trimtab.algos.policy_losses import adapted_kl_coefficient, kl_estimate

D = [-3.0, -0.4, 0.0, 1e-3, 2.0]
FORMS = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}


@pytest.mark.parametrize("kind", FORMS)
def test_estimates_equal_their_closed_forms(kind):
    reference = torch.tensor([-0.7, -5.0, -0.1, -2.0, -9.0], dtype=torch.float64)
    found = kl_estimate(reference + torch.tensor(D, dtype=torch.float64), reference, kind)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx([FORMS[kind](d) for d in D], rel=1e-3, abs=2e-6)


def test_estimates_of_half_precision_log_probs_are_taken_in_fp32():
    log_probs, reference = torch.tensor([-1.0]).bfloat16(), torch.tensor([-1.00390625])  # bf16 would round to -1
    assert kl_estimate(log_probs, reference, "k1").item() == 0.00390625


def test_k3_keeps_its_digits_and_its_sign_near_zero():
    d = torch.linspace(-1e-3, 1e-3, 201)
    found = kl_estimate(d, torch.zeros(201), "k3")
    assert (found >= 0).all()
    torch.testing.assert_close(found, d.square() / 2, atol=3e-10, rtol=0)


def next_token() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    logits, reference = torch.randn(2, 5).unbind()
    return logits.requires_grad_(), reference.log_softmax(0)


def test_k1_and_k3_have_the_kl_as_their_mean():
    logits, reference = next_token()
    log_probs = logits.log_softmax(0)
    kl = (log_probs.exp() * (log_probs - reference)).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close((log_probs.exp() * kl_estimate(log_probs, reference, kind)).sum(), kl)


@pytest.mark.parametrize("kind", FORMS)
def test_as_losses_their_mean_gradients_are_those_of_kl_reverse_kl_and_nothing(kind):
    logits, reference = next_token()
    log_probs = logits.log_softmax(0)
    target = {
        "k1": 0 * log_probs.sum(),
        "k2": (log_probs.exp() * (log_probs - reference)).sum(),
        "k3": (reference.exp() * (reference - log_probs)).sum(),
    }[kind]
    mean_loss = (log_probs.exp().detach() * kl_estimate(log_probs, reference, kind)).sum()
    found, expected = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (mean_loss, target))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "kl, expected",
    [
        (6.0, 0.01),  # on target
        (6.6, 0.01 * (1 + 0.1 * 128 / 10_000)),
        (5.4, 0.01 * (1 - 0.1 * 128 / 10_000)),
        (60.0, 0.01 * (1 + 0.2 * 128 / 10_000)),
        (-3.0, 0.01 * (1 - 0.2 * 128 / 10_000)),
    ],
)
def test_the_coefficient_follows_the_kl_within_a_fifth(kl, expected):
    assert adapted_kl_coefficient(0.01, kl, target=6.0, horizon=10_000, samples=128) == pytest.approx(
        expected, rel=1e-12
    )
