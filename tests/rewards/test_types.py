import math

import numpy as np
import pytest
import torch

from tests.rewards.samples import Lengths, make_reward_request
from trimtab.errors import RunFailed
from trimtab.rewards.types import RewardFailed, RewardRequest, RewardResult, WeightedReward, checked


class Fixed:
    concurrent = True

    def __init__(self, name, rewards, **more):
        self.name, self.result = name, RewardResult(rewards, **more)

    def __call__(self, request):
        return self.result

    def close(self):
        pass


def test_a_failed_reward_stops_a_run_and_knows_its_row():
    error = RewardFailed("no", 3)
    assert isinstance(error, RunFailed) and error.row == 3


def test_a_request_takes_rows_of_every_list():
    request = RewardRequest(["a", "b", "c"], [*"xyz"], [*"uvw"], [1, 2, 3], {"k": [7, 8, 9]}, [[1], [2], [3]], [])
    part = request.take([2, 0])
    assert part == RewardRequest(["c", "a"], ["z", "x"], ["w", "u"], [3, 1], {"k": [9, 7]}, [[3], [1]], [])
    assert len(part) == 2


def test_a_request_with_lists_of_different_lengths_is_a_mistake_of_ours():
    with pytest.raises(AssertionError):
        RewardRequest(["a"], ["b", "c"], ["d"], [None])


def test_parts_joined_are_the_whole_and_what_a_part_lacks_is_nan():
    first = RewardResult([1.0, 2.0], logs={"both": [1.0, 1.0], "one": [5.0, 6.0]})
    second = RewardResult([3.0], [30.0], {"both": [2.0]}, [[(0, 0.5)]])
    whole = RewardResult.joined([first, second])
    assert whole.rewards == [1.0, 2.0, 3.0] and whole.scores == [1.0, 2.0, 30.0]
    assert whole.logs["both"] == [1.0, 1.0, 2.0]
    assert whole.logs["one"][:2] == [5.0, 6.0] and math.isnan(whole.logs["one"][2])
    assert whole.steps == [[], [], [(0, 0.5)]]


@pytest.mark.parametrize(
    "numbers",
    [[1, 2.5], (1.0, 2.5), torch.tensor([1.0, 2.5]), np.array([1.0, 2.5]), [np.float32(1), torch.tensor(2.5)]],
)
def test_anything_that_is_a_list_of_finite_numbers_will_do(numbers):
    assert checked(numbers, 2, "reward") == [1.0, 2.5]


@pytest.mark.parametrize(
    "numbers, row, words",
    [
        ([1.0], None, "1 for 2 samples"),
        ([1.0, math.nan], 1, "row 1 is nan"),
        ([-math.inf, 1.0], 0, "row 0 is -inf"),
        ([1.0, "2"], 1, "row 1 is str '2', not a number"),
        ([1.0, None], 1, "row 1 is NoneType"),
        ([[1.0], [2.0]], 0, "row 0 is list"),
        ([1.0, 10**400], 1, "row 1 is too large"),
        ("ab", None, "is str, not a list"),
        (None, None, "is NoneType, not a list"),
    ],
)
def test_anything_else_is_refused_by_name(numbers, row, words):
    with pytest.raises(RewardFailed, match=f"^reward.*{words}") as caught:
        checked(numbers, 2, "reward")
    assert caught.value.row == row


def test_weighted_rewards_are_summed_and_each_part_is_logged():
    first = Fixed("a", [1.0, 2.0], scores=[0.0, 1.0], logs={"figure": [8.0, 9.0]})
    second = Fixed("b", [10.0, 20.0], steps=[[(3, 1.0)], []])
    result = WeightedReward([(first, 2.0), (second, 0.5)])(make_reward_request(["x", "y"]))
    assert result.rewards == [7.0, 14.0] and result.scores == [5.0, 12.0]
    assert result.logs == {"a": [1.0, 2.0], "a/figure": [8.0, 9.0], "b": [10.0, 20.0]}
    assert result.steps == [[(3, 0.5)], []]


def test_two_parts_of_one_name_are_logged_apart():
    result = WeightedReward([(Fixed("a", [1.0]), 1.0), (Fixed("a", [2.0]), 1.0)])(make_reward_request(["x"]))
    assert result.logs == {"a_1": [1.0], "a_2": [2.0]}


def test_a_part_that_does_not_apply_counts_for_nothing_and_a_sample_without_any_is_refused():
    first, second = Fixed("a", [math.nan, 2.0]), Fixed("b", [3.0, math.nan])
    assert WeightedReward([(first, 1.0), (second, 2.0)])(make_reward_request(["x", "y"])).rewards == [6.0, 2.0]
    with pytest.raises(RewardFailed, match="row 0: none of a"):
        WeightedReward([(first, 1.0)])(make_reward_request(["x", "y"]))


def test_without_parts_every_reward_is_nothing():
    result = WeightedReward([])(make_reward_request(["x", "y"]))
    assert result.rewards == result.scores == [0.0, 0.0] and not result.logs and result.steps is None


def test_closing_the_sum_closes_its_parts():
    parts = [Lengths(), Lengths()]
    WeightedReward([(part, 1.0) for part in parts]).close()
    assert all(part.closed for part in parts)
