import numpy as np
import pytest

from trimtab.rollout.trajectory import Trajectory
from trimtab.train.rl.checks import alarms
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.state import Counters, Iteration, row_of

FINE = {
    "reward": 0.4, "reward_std": 0.5, "reward_min": 0.0, "reward_max": 1.0, "equal_groups": 0.3, "kl": 0.01,
    "sampled_entropy": 0.9, "truncated": 0.1, "log_prob_gap": 1e-4, "log_prob_ratio": 1.0,
}  # fmt: skip


def test_a_healthy_iteration_raises_none():
    assert list(alarms(FINE, 1.0)) == []
    episodes = {
        "failed_episodes": 0.0,
        "empty_samples": 1.0,
        "samples": 16,
        "tool_calls": 4.0,
        "tool_failures": 1.0,
        "finish/turns": 0.2,
    }
    assert list(alarms(FINE | episodes, 1.0)) == []


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"reward_std": 0.0, "equal_groups": 1.0}, "all rewards are equal"),
        ({"equal_groups": 1.0}, "in every group"),
        ({"kl": 3.0}, "KL to the reference is 3.00"),
        ({"sampled_entropy": 0.01}, "entropy has fallen"),
        ({"truncated": 0.8}, "80% of the answers"),
        ({"log_prob_gap": 0.2}, "drift apart"),
        ({"log_prob_ratio": 1.2}, "drift apart"),
        ({"corrected_share": 0.3}, "30% of the tokens are weighed by a tenth or more: what is sampled is not"),
        ({"corrected_share": 0.3, "log_prob_gap": 0.2}, "drift apart"),
        ({"failed_episodes": 3.0}, "3 episodes failed, retries and all"),
        ({"empty_samples": 9.0, "samples": 16}, "9 of 16 samples have no token that the model drew"),
        ({"tool_calls": 2.0, "tool_failures": 1.5}, "75% of the tool calls failed"),
        ({"finish/turns": 0.6, "finish/context": 0.4}, "60% of the episodes end at --max_turns"),
        ({"finish/context": 0.6}, "end at --episode_max_len"),
        ({"truncated": 0.9, "finish/length": 0.0, "finish/turns": 0.9}, "90% of the episodes end at --max_turns"),
        ({"truncated": 0.9, "finish/length": 0.9}, "90% of the answers end at --generate_max_len"),
        ({"log_prob_gap_fresh": 0.2, "age": 1.0}, "log-probs of the same weights drift apart"),
        ({"corrected_share": 0.3, "log_prob_gap": 0.2, "age": 1.0}, "lower --async_staleness or the learning rate"),
    ],
)
def test_what_looks_wrong_is_told_in_words(changes, told):
    found = list(alarms(FINE | changes, 1.0))
    assert len(found) == 1 and told in found[0]


@pytest.mark.parametrize("changes", [{"reward_std": 0.0, "equal_groups": 1.0}, {"equal_groups": 1.0}])
def test_equal_rewards_are_no_harm_where_a_teacher_rewards_every_token(changes):
    assert list(alarms(FINE | changes | {"teacher_kl": 0.3}, 1.0)) == []


def test_a_policy_that_is_sure_and_right_is_no_collapse():
    assert list(alarms(FINE | {"sampled_entropy": 0.01, "reward": 0.97}, 1.0)) == []


@pytest.mark.parametrize("changes", [{"log_prob_gap": 0.2, "log_prob_ratio": 1.2}, {"corrected_share": 0.2}])
def test_answers_that_are_older_than_the_policy_may_be_off_if_few_tokens_are(changes):
    assert list(alarms(FINE | {"age": 1.0, "age_max": 4.0} | changes, 1.0)) == []


def test_the_oldest_answers_are_told_of_the_third_time_they_are_as_old_as_may_be():
    experience = Experience.of([0], [Trajectory(0, 0, [1], [2], -np.ones(1), "stop", versions=np.zeros(1, np.int32))])
    counters, told = Counters(0.0, first_entropy=1.0), []
    for oldest in (4, 4, 4, 4, 3, 4, 4, None, 4, 4, 4):
        figures = {k: v for k, v in FINE.items() if k != "sampled_entropy"}
        figures |= {} if oldest is None else {"age": 1.0, "age_max": float(oldest)}
        row = row_of(Iteration(experience, 1, figures), counters, bound=4)
        told.append([line for line in row["alarms"] if "iterations running" in line])
    assert [bool(lines) for lines in told] == [*[False] * 2, True, True, *[False] * 6, True]
    assert told[3][0].startswith("in 4 iterations running the oldest answers were 4 iterations old")
    synchronous = row_of(Iteration(experience, 1, dict(FINE)), Counters(0.0, at_bound=3))
    assert not [line for line in synchronous["alarms"] if "iterations running" in line]
