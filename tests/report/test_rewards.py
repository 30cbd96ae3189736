"""The pictures of a reward model say what the rewards are."""

import math
import re

import pytest

from trimtab.report.distributions import accuracy_of, calibration, calibration_bins, histogram, reward_section
from trimtab.report.run_data import RunData

ODDS = math.log(0.8 / 0.2)  # a difference of rewards at which the model is 80 % sure


def test_a_tie_is_half_right():
    accuracy = accuracy_of([(1.0, 0.0), (0.0, 1.0), (0.5, 0.5), (2.0, 1.0)])
    assert accuracy.right == 2.5 and accuracy.number == 4 and accuracy_of([]) is None


@pytest.mark.parametrize("right_share", [0.8, 0.3])
def test_calibration_is_about_the_choice_of_the_model_not_the_order_of_the_pair(right_share):
    number = 1000
    right = round(number * right_share)
    pairs = [(ODDS + 1e-9, 0.0)] * right + [(0.0, ODDS + 1e-9)] * (number - right)
    (bin,) = [bin for bin in calibration_bins(pairs) if bin.number]
    assert (bin.low, bin.high) == pytest.approx((0.8, 0.85)) and bin.number == number
    assert bin.confidence / number == pytest.approx(0.8) and bin.right / number == right_share


def test_bins_cover_from_a_coin_toss_to_certainty_and_lose_no_pair():
    pairs = [(difference / 10, 0.0) for difference in range(-150, 150)] + [(1e6, -1e6)]
    bins = calibration_bins(pairs)
    assert bins[0].low == 0.5 and bins[-1].high == 1.0 and sum(bin.number for bin in bins) == 301
    assert len(calibration_bins(pairs[:50])) == 5


def test_the_histogram_holds_every_answer_once():
    pairs = [(0.1 * index, -0.05 * index) for index in range(60)]
    titles = re.findall(r"<title>(\d+) (chosen|rejected) from", histogram(pairs))
    for side in ("chosen", "rejected"):
        assert sum(int(number) for number, which in titles if which == side) == 60


@pytest.mark.parametrize(
    "pairs",
    [
        [(0.0, 0.0)],
        [(1.0, 1.0)] * 30,
        [(1e199, -1e199), (0.0, 0.0)],
        [(1e-300, 0.0)],
    ],
)
def test_odd_rewards_are_drawn_all_the_same(pairs):
    drawn = histogram(pairs) + calibration(pairs)
    assert drawn.count("<figure") == 2 and not re.search(r'="[^"]*\b(nan|inf)\b', drawn)


def test_words_say_whether_pairs_were_held_out_and_how_sure_the_model_is(tmp_path):
    stored = {"source": "evaluation", "chosen_rejected": [[ODDS, 0.0]] * 80 + [[0.0, ODDS]] * 20}
    section = reward_section(RunData(tmp_path, rewards=stored)).replace("\u00a0", " ")
    assert "higher reward in 80 of 100 held-out pairs: 80 % (95 % interval 71.1 % to 86.7 %)" in section
    assert "on average 80 % sure of its choice, which fits" in section and "trained on" not in section
    stored = {"source": "training", "chosen_rejected": [[4.0, 0.0]] * 80 + [[0.0, 4.0]] * 20}
    section = reward_section(RunData(tmp_path, rewards=stored))
    assert "surer than it should be" in section and "These pairs were trained on" in section
    stored["chosen_rejected"] = [[0.1, 0.0]] * 100
    assert "less sure than it could be" in reward_section(RunData(tmp_path, rewards=stored))


def test_rewards_that_cannot_be_read_leave_the_section_out(tmp_path):
    for broken in (
        {},
        {"chosen_rejected": 3},
        {"chosen_rejected": [[1], "x", [None, 1], [float("nan"), 2], [1, 2, 3]]},
    ):
        assert reward_section(RunData(tmp_path, rewards=broken)) == ""
