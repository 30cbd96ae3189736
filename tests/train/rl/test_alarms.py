import pytest

from trimtab.train.rl.alarms import alarms

FINE = {
    "reward": 0.4, "reward_std": 0.5, "reward_min": 0.0, "reward_max": 1.0, "equal_groups": 0.3, "kl": 0.01,
    "sampled_entropy": 0.9, "truncated": 0.1, "log_prob_gap": 1e-4, "log_prob_ratio": 1.0,
}  # fmt: skip


def test_a_healthy_iteration_raises_none():
    assert list(alarms(FINE, 1.0)) == []


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
