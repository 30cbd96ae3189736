"""Rewards of tokens and the punishment of long answers, against values worked out by hand."""

import pytest
import torch

from tests.algos.flat import flat
from trimtab.algos.advantages import overlong_penalty, token_rewards

REMAINING, OWNERS = flat([3, 1, 2])
REWARDS = torch.tensor([2.0, -30.0, 12.0])


def test_the_reward_stands_on_the_last_token_and_kl_on_all():
    kl = torch.tensor([1.0, -2.0, 3.0, 4.0, 5.0, 6.0])
    found = token_rewards(REWARDS, kl, 0.1, REMAINING, OWNERS)
    assert found.tolist() == pytest.approx([-0.1, 0.2, 2.0 - 0.3, -30.0 - 0.4, -0.5, 12.0 - 0.6])


def test_the_clip_holds_the_reward_but_not_the_kl():
    found = token_rewards(REWARDS, torch.full((6,), 100.0), 1.0, REMAINING, OWNERS, clip=(-10.0, 5.0))
    assert found.tolist() == [-100.0, -100.0, -98.0, -110.0, -100.0, -95.0]


def test_without_kl_only_last_tokens_are_rewarded():
    assert token_rewards(REWARDS, None, 0.1, REMAINING, OWNERS).tolist() == [0.0, 0.0, 2.0, -30.0, 0.0, 12.0]


def test_owners_decide_whose_reward_a_token_gets():
    """A micro-batch may hold some sequences of the rewards only."""
    remaining, owners = flat([2, 1])
    assert token_rewards(REWARDS, None, 0.0, remaining, owners + 1).tolist() == [0.0, -30.0, 12.0]


def test_the_overlong_penalty_rises_through_the_buffer_and_stays():
    lengths = torch.tensor([0, 60, 80, 85, 90, 100, 120])
    found = overlong_penalty(lengths, max_new_tokens=100, buffer=20, factor=2.0)
    assert found.tolist() == [0.0, 0.0, 0.0, 0.5, 1.0, 2.0, 2.0]
