"""The critic's loss and its explained variance against the formulas written out."""

import statistics

import pytest
import torch

from trimtab.algos.policy_losses import explained_variance, value_loss

VALUES, OLD, RETURNS = [0.0, 0.1, 0.5, 0.5, -0.5, -0.5], [0.0] * 6, [1.0, 1.0, 1.0, 0.3, -1.0, 0.1]


def loss_and_slopes(clip):
    values = torch.tensor(VALUES, requires_grad=True)
    loss, was_clipped = value_loss(values, torch.tensor(OLD), torch.tensor(RETURNS), clip)
    loss.sum().backward()
    return loss.tolist(), values.grad.tolist(), was_clipped.tolist()


def test_without_clip_it_is_half_the_squared_error():
    errors = [value - target for value, target in zip(VALUES, RETURNS, strict=True)]
    loss, slopes, was_clipped = loss_and_slopes(None)
    assert loss == pytest.approx([error**2 / 2 for error in errors])
    assert slopes == pytest.approx(errors)
    assert not any(was_clipped)


def test_the_clip_stops_values_that_moved_far_towards_the_return():
    """Values have moved from 0 with clip 0.2. Where a far one has overshot, the greater error still pulls it back."""
    loss, slopes, was_clipped = loss_and_slopes(0.2)
    errors = [-1.0, -0.9, 0.2 - 1.0, 0.2, -0.2 + 1.0, -0.6]
    assert loss == pytest.approx([error**2 / 2 for error in errors])
    assert slopes == pytest.approx([-1.0, -0.9, 0.0, 0.2, 0.0, -0.6])
    assert was_clipped == [False, False, True, False, True, False]


def test_explained_variance_is_one_for_exact_values_and_zero_for_a_constant():
    returns = torch.tensor([1.0, -2.0, 0.5, 4.0])
    assert explained_variance(returns + 3.0, returns).item() == pytest.approx(1.0)
    assert explained_variance(torch.full((4,), 0.7), returns).item() == pytest.approx(0.0)


def test_explained_variance_equals_its_definition():
    values, returns = [0.3, -1.0, 2.0, 0.0], [1.0, -2.0, 0.5, 4.0]
    left = statistics.pvariance([g - v for v, g in zip(values, returns, strict=True)])
    expected = 1 - left / statistics.pvariance(returns)
    assert explained_variance(torch.tensor(values), torch.tensor(returns)).item() == pytest.approx(expected)


def test_returns_that_do_not_vary_leave_nothing_to_explain():
    assert explained_variance(torch.tensor([0.5, 0.1]), torch.tensor([0.2, 0.2])).item() == 0.0
