"""The clipped surrogate: values and slopes against the formula written out for one token."""

import math

import pytest
import torch

from trimtab.algos.policy_losses import ppo_loss

RATIOS = [0.3, 0.79, 0.81, 1.0, 1.27, 1.29, 2.9, 3.1, 8.0]
ADVANTAGES = [-2.0, -0.5, 0.0, 0.5, 2.0]
LOW, HIGH = 0.2, 0.28


def token(ratio: float, advantage: float, dual_clip: float | None) -> tuple[float, float, bool]:
    """Loss, slope of the loss in the log-prob, and whether it was clipped, by cases."""
    if advantage > 0:
        stopped, at = ratio > 1 + HIGH, 1 + HIGH
    elif advantage < 0:
        stopped, at = ratio < 1 - LOW, 1 - LOW
        if dual_clip is not None and ratio > dual_clip:
            stopped, at = True, dual_clip
    else:
        stopped, at = False, ratio
    return (-at * advantage, 0.0, True) if stopped else (-ratio * advantage, -ratio * advantage, False)


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_loss_slope_and_clipped_tokens_equal_the_definition_by_cases(dual_clip):
    cases = [(ratio, advantage) for ratio in RATIOS for advantage in ADVANTAGES]
    old = torch.linspace(-4, -1, len(cases))
    log_probs = (old + torch.tensor([math.log(ratio) for ratio, _ in cases])).requires_grad_()
    loss, was_clipped = ppo_loss(log_probs, old, torch.tensor([a for _, a in cases]), LOW, HIGH, dual_clip)
    loss.sum().backward()
    losses, slopes, stopped = zip(*(token(*case, dual_clip) for case in cases), strict=True)
    assert loss.tolist() == pytest.approx(list(losses), abs=1e-5)
    assert log_probs.grad.tolist() == pytest.approx(list(slopes), abs=1e-5)
    assert was_clipped.tolist() == list(stopped)
