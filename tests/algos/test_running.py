"""Moments joined iteration by iteration are those of everything at once."""

import numpy as np
import pytest
import torch

from trimtab.algos.advantages import NO_MOMENTS, merge_moments, moments_std, whiten_with_moments

SIZES = (1, 7, 3, 64)


def test_moments_of_parts_joined_one_by_one_are_those_of_the_whole():
    # Far from 0 and close together: a sum of squares less a square of the sum would have lost all digits.
    parts = [1e4 + np.random.default_rng(i).normal(size=size) for i, size in enumerate(SIZES)]
    moments = NO_MOMENTS
    for seen, part in enumerate(parts, start=1):
        moments = merge_moments(moments, torch.tensor(part))
        whole = np.concatenate(parts[:seen])
        assert moments[:2] == pytest.approx((len(whole), whole.mean()), rel=1e-12)
        assert moments_std(moments) == pytest.approx(whole.std(), rel=1e-9, abs=1e-9)
    expected = (parts[-1] - whole.mean()) / whole.std()
    torch.testing.assert_close(whiten_with_moments(torch.tensor(parts[-1]), moments), torch.tensor(expected))


def test_rewards_that_are_all_alike_become_zero():
    rewards_S = torch.full((9,), 0.1)
    assert whiten_with_moments(rewards_S, merge_moments(NO_MOMENTS, rewards_S)).abs().max() < 1e-6
