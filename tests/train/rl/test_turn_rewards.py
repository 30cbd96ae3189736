"""--turn_reward returns: what a turn is judged by, exactly, and that its mean is the policy gradient."""

import statistics

import numpy as np
import pytest
import torch

from tests.algos.stochastic_game import GAMES, all_groups, mean_gradient, policy_gradient, probabilities
from tests.envs.episodes import make_policy, play, player
from tests.envs.fake_pool import Pool
from tests.envs.test_episode_branches import FORGETFUL
from tests.train.rl.played import Played, experience_of
from trimtab.config.objective_options import ESTIMATORS
from trimtab.config.rl_jobs import PPOOptions
from trimtab.rewards.types import RewardResult
from trimtab.rollout.trajectory import Trajectory
from trimtab.train.rl import token_advantages
from trimtab.train.rl.experience import Experience, TimeOrder, TurnLayout
from trimtab.train.rl.token_advantages import compute_advantages

SAMPLES = 2


def options_of(estimator: str, turn_reward: str = "returns", **more) -> PPOOptions:
    more = {"n_samples_per_prompt": SAMPLES, "gamma": 1.0, "lambd": 1.0, **more}
    return PPOOptions(advantage_estimator=estimator, turn_reward=turn_reward, **more)


def played(index: int, branched: bool = False) -> Played:
    turns = [([token + 1 for _, token in turn], reward) for turn, reward in GAMES[index].turns]
    return Played(turns, branches=list(range(1, len(turns))) if branched else [])


def whole_game(branched: bool = False) -> Experience:
    """Every group of the game once."""
    return experience_of([[played(index, branched) for index in group] for group in all_groups(SAMPLES)])


def shaped(experience: Experience, estimator: str, turn_reward: str = "returns", **more) -> list[float]:
    experience.old_N = experience.sampled_N
    if experience.values_N is None:
        experience.values_N = torch.zeros_like(experience.sampled_N)
    compute_advantages(experience, options_of(estimator, turn_reward, **more), kl_coefficient=0.0)
    return experience.advantages_N.tolist()


@pytest.fixture
def unwhitened(monkeypatch):
    monkeypatch.setattr(token_advantages, "whiten", lambda values_N, scale: values_N)


def share(estimator: str) -> float:
    """Of the policy gradient, since a mean that includes the episode itself takes some of it."""
    return (SAMPLES - 1) / SAMPLES if ESTIMATORS[estimator].group == "minus_mean" else 1.0


@pytest.mark.parametrize("branched", [False, True], ids=["one sequence", "branches"])
@pytest.mark.parametrize("turn_reward", ["sum", "returns"])
@pytest.mark.parametrize("estimator", [name for name in ESTIMATORS if name != "group_norm"])
def test_the_mean_gradient_is_the_policy_gradient(estimator, turn_reward, branched, unwhitened):
    assert probabilities().sum().item() == pytest.approx(1)
    expected = policy_gradient() * share(estimator)
    found = mean_gradient(shaped(whole_game(branched), estimator, turn_reward), SAMPLES)
    assert expected.abs().max() > 0.05, "nothing to compare"
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)


def test_gae_with_any_values_is_the_policy_gradient(unwhitened):
    experience = whole_game(branched=True)
    torch.manual_seed(0)
    of_situation = torch.randn(8)
    places = [place for group in all_groups(SAMPLES) for index in group for place, _ in GAMES[index].tokens]
    experience.values_N = of_situation[torch.tensor(places)]
    found = mean_gradient(shaped(experience, "gae"), SAMPLES)
    torch.testing.assert_close(found, policy_gradient(), atol=2e-6, rtol=0)


def by_turn_index(*, scaled: bool) -> list[float]:
    """What is not offered: a turn's to come against that of the group's turns of the same number."""
    advantages = []
    for group in all_groups(SAMPLES):
        to_come = [[sum(reward for _, reward in GAMES[index].turns[k:]) for k in range(3)] for index in group]
        for place, index in enumerate(group):
            for k, (turn, _) in enumerate(GAMES[index].turns):
                alike = [to_come[other][k] for other, found in enumerate(group) if len(GAMES[found].turns) > k]
                deviation = statistics.stdev(alike) + 1e-9 if scaled and len(alike) > 1 else 1.0
                advantages += [(to_come[place][k] - statistics.fmean(alike)) / deviation] * len(turn)
    return advantages


@pytest.mark.parametrize("scaled", [False, True], ids=["centred", "scaled"])
def test_normalising_by_turn_index_is_no_multiple_of_the_policy_gradient(scaled):
    found, exact = mean_gradient(by_turn_index(scaled=scaled), SAMPLES), policy_gradient()
    scale = (found * exact).sum() / exact.square().sum()
    assert (found - scale * exact).abs().max() > 0.15 * found.abs().max()


# ---- the formula, one group after another

GROUPS = [
    [
        Played([([1, 2], 0.5), ([3], -0.25), ([4, 5, 6], 1.0)], last_reward=0.75, branches=[1]),
        Played([([7], 0.0)], other_reward=2.0),
        Played([([8, 9], 1.0), ([1], 0.5)], branches=[1]),
    ],
    [
        Played([([8, 9], 1.0), ([1], 0.5)], finish="turns"),
        Played([([2], 0.25), ([3, 3], 0.0), ([4], 0.0)], branches=[1, 2], finish="context"),
    ],
]


def worked_out(estimator: str) -> list[float]:
    advantages = []
    for group in GROUPS:
        totals = [episode.reward for episode in group]
        mean = statistics.fmean(totals)
        to_come = [
            [episode.reward - sum(reward for _, reward in episode.turns[:k]) for k in range(len(episode.turns))]
            for episode in group
        ]
        squares = [statistics.fmean((g - mean) ** 2 for g in own) for own in to_come]
        deviation = (sum(squares) / (len(group) - 1)) ** 0.5
        for place, episode in enumerate(group):
            others = statistics.fmean(total for other, total in enumerate(totals) if other != place)
            baseline = {"rloo": others, "gae": 0.0, "reinforce": 0.0}.get(estimator, mean)
            for (tokens, _), g in zip(episode.turns, to_come[place]):
                one = (g - baseline) / (deviation + 1e-9 if estimator == "group_norm" else 1.0)
                advantages += [one] * len(tokens)
    return advantages


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_turn_is_judged_by_what_is_still_to_come(estimator, unwhitened):
    experience = experience_of(GROUPS)
    assert shaped(experience, estimator) == pytest.approx(worked_out(estimator), abs=1e-6)
    if estimator == "gae":
        assert torch.equal(experience.returns_N, experience.advantages_N)  # values are 0


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_rewards_at_the_end_alone_are_judged_as_those_of_whole_episodes(estimator):
    groups = [[Played([([1, 2], 0.0), ([3], reward)], last_reward=0.5) for reward in (1.0, 0.0, 0.25)]]
    found, expected = (shaped(experience_of(groups), estimator, kind) for kind in ("returns", "sum"))
    assert found == pytest.approx(expected, abs=1e-6) and any(expected)


def test_rewards_standardised_by_the_run_stay_the_sum_of_their_turns(unwhitened):
    moments = (10.0, 0.3, 10 * 0.5**2)  # a mean of 0.3, a deviation of 0.5
    experience = experience_of(GROUPS)
    experience.old_N = experience.sampled_N
    compute_advantages(experience, options_of("rloo"), 0.0, moments)
    expected = [advantage / 0.5 for advantage in worked_out("rloo")]
    assert experience.advantages_N.tolist() == pytest.approx(expected, abs=1e-5)


def test_what_is_to_come_is_clipped_turn_by_turn():
    episodes = [Played([([1], 45.0), ([2, 3], 5.0)]), Played([([4], 0.0)])]
    experience = experience_of([episodes])
    assert shaped(experience, "rloo", reward_clip_range=(-10.0, 10.0)) == pytest.approx([10.0, 5.0, 5.0, -10.0])


def test_equal_totals_of_rewarded_turns_are_no_equal_group():
    episodes = [Played([([1], 0.5), ([2], 0.5)]), Played([([1], 1.0), ([2], 0.0)])]
    for turn_reward, equal in (("sum", 1.0), ("returns", 0.0)):
        experience = experience_of([episodes])
        assert compute_advantages(experience, options_of("rloo", turn_reward), 0.0)["equal_groups"] == equal


# ---- episodes in which the model drew nothing

EMPTY = Played([], last_reward=-3.0)
AMONG_EMPTY = [[EMPTY, *GROUPS[0]], [EMPTY, EMPTY], [GROUPS[1][0], EMPTY, GROUPS[1][1]]]


@pytest.mark.parametrize("turn_reward", ["sum", "returns"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_episodes_without_a_drawn_token_change_no_advantage(estimator, turn_reward):
    found = shaped(experience_of(AMONG_EMPTY), estimator, turn_reward)
    assert found == shaped(experience_of(GROUPS), estimator, turn_reward)
    assert any(found)


@pytest.mark.parametrize("estimator", ["rloo", "group_norm", "dr_grpo", "reinforce_baseline"])
def test_equal_rewards_beside_an_empty_episode_are_an_equal_group(estimator):
    """The empty one's lower reward says nothing of the others, which are all alike."""
    for turn_reward in ("sum", "returns"):
        experience = experience_of([[Played([]), *[Played([([1, 2, 3, 4, 5, 6], 1.5)])] * 3]])
        figures = compute_advantages(experience, options_of(estimator, turn_reward), 0.0)
        assert experience.advantages_N.tolist() == [0.0] * 18
        assert figures["equal_groups"] == 1 and figures["empty_samples"] == 1
        assert figures["reward"] == pytest.approx(1.125), "rewards are told of all"


@pytest.mark.parametrize("estimator", ["rloo", "group_norm", "dr_grpo"])
def test_an_episode_whose_group_is_empty_besides_is_compared_with_nothing(estimator):
    for turn_reward in ("sum", "returns"):
        experience = experience_of([[Played([([1], 0.5), ([2], 1.0)]), EMPTY]])
        figures = compute_advantages(experience, options_of(estimator, turn_reward), 0.0)
        assert experience.advantages_N.tolist() == [0.0, 0.0] and figures["equal_groups"] == 1


def test_steps_that_a_process_reward_sees_in_an_empty_episode_are_no_ones():
    def rollout(sample: int, drawn: list[bool]) -> Trajectory:
        drew = np.array(drawn)
        return Trajectory(0, sample, [5], [7] * len(drawn), np.zeros(drew.sum(), np.float32), "stop", drawn=drew)

    def advantages(samples: list[tuple[list[bool], float]], estimator: str) -> list[float]:
        rollouts = [rollout(number, drawn) for number, (drawn, _) in enumerate(samples)]
        steps = [[(0, score)] for _, score in samples]
        result = RewardResult([0.0] * len(samples), steps=steps)
        return shaped(Experience.of([0] * len(samples), rollouts, result), estimator)

    drew = [([True, True], 0.25), ([True], 1.0), ([True, True, True], 0.5)]
    for estimator in ESTIMATORS:
        assert advantages([([False, False], 9.0), *drew], estimator) == advantages(drew, estimator)


# ---- branches


def alike(groups: list[list[Played]], branched: bool) -> Experience:
    return experience_of(
        [[Played(e.turns, e.last_reward, e.other_reward, e.branches if branched else []) for e in g] for g in groups]
    )


@pytest.mark.parametrize("turn_reward", ["sum", "returns"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_episode_counts_once_however_many_branches_it_has(estimator, turn_reward):
    found = []
    for branched in (False, True):
        experience = alike(GROUPS, branched)
        torch.manual_seed(1)
        experience.old_N = experience.sampled_N
        experience.reference_N = experience.sampled_N - torch.rand(len(experience.sampled_N))
        experience.values_N = torch.randn(len(experience.sampled_N))
        options = options_of(estimator, turn_reward, lambd=0.7, gamma=0.9)
        figures = compute_advantages(experience, options, kl_coefficient=0.3)
        found.append((figures, experience))
    (plain, one), (figures, several) = found
    assert one.branches_S is None and len(several) == len(one) + 4
    assert figures == pytest.approx(plain, abs=1e-6)
    torch.testing.assert_close(several.advantages_N, one.advantages_N, atol=1e-6, rtol=0)
    if estimator == "gae":
        torch.testing.assert_close(several.returns_N, one.returns_N, atol=1e-6, rtol=0)


def test_tokens_of_a_branch_that_was_gone_on_with_later_come_later():
    """Turns 0 and 2 in the first branch, turn 1 in the second."""
    first, second = Played([([1, 2], 1.0), ([5], 4.0)]), Played([([3, 4], 2.0)])
    (a,), (b,) = first.rollouts(0, 0, [9]), second.rollouts(0, 0, [9])
    record = a.episode
    middle = b.episode.said[0]
    middle.branch, b.branch, b.episode = 1, 1, record
    record.said.insert(1, middle)
    other = Played([([7], 0.0)]).rollouts(0, 1, [9])
    experience = Experience.of([0, 0, 0], [a, b, *other])
    experience.rewards_S = torch.tensor([7.0, 7.0, 0.0])
    time = TimeOrder(experience)
    # Its tokens are 1 2 5, 3 4, and the other episode's 7.
    assert time.order_N.tolist() == [0, 1, 3, 4, 2, 5] and time.owners_N.tolist() == [0, 0, 0, 0, 0, 1]
    assert time.remaining_N.tolist() == [4, 3, 2, 1, 0, 0]
    assert TurnLayout.of(experience).rewards_K.tolist() == [1.0, 2.0, 4.0, 0.0]
    experience.old_N, experience.reference_N = experience.sampled_N, experience.sampled_N - 0.5
    compute_advantages(experience, options_of("rloo"), kl_coefficient=0.2)
    kl = 0.1  # of each token
    expected = [7 - 5 * kl, 7 - 4 * kl, 4 - kl, 6 - 3 * kl, 6 - 2 * kl]
    assert experience.advantages_N[:5].tolist() == pytest.approx(expected, abs=1e-6)


def test_turns_of_played_episodes_are_found_where_they_were_drawn(unwhitened):
    """An engine that plays, and a template that rewrites: every token's advantage from the records alone."""
    rollouts = play(player(make_policy(), Pool(), FORGETFUL, history="template"), n=3)
    for rollout in rollouts:
        if not rollout.branch:
            rollout.episode.turns[0].reward += rollout.sample  # the world rewards all of them alike
    experience = Experience.of([r.prompt for r in rollouts], rollouts)
    experience.reward(RewardResult([r.episode.reward for r in rollouts]))
    assert len(experience) > len(experience.firsts_E) == 6 and any(len(r.episode.turns) > 2 for r in rollouts)
    advantages = iter(shaped(experience, "rloo", n_samples_per_prompt=3))
    group_of, totals = experience.groups_E.tolist(), experience.rewards_S[experience.firsts_E].tolist()
    for episode, first in enumerate(experience.firsts_E.tolist()):
        record, group = rollouts[first].episode, group_of[episode]
        others = [total for e, total in enumerate(totals) if group_of[e] == group and e != episode]
        assert [turn.branch for turn in record.turns] == sorted(turn.branch for turn in record.turns)
        for k, turn in enumerate(record.turns):
            to_come = sum(later.reward for later in record.turns[k:]) + record.last_reward
            expected = [to_come - statistics.fmean(others)] * (turn.end - turn.start)
            assert [next(advantages) for _ in expected] == pytest.approx(expected, abs=1e-5)
    assert next(advantages, None) is None and len(set(totals)) > 1


def test_plain_answers_have_no_turns():
    rollouts = [Trajectory(0, sample, [1], [2, 3], torch.zeros(2).numpy(), "stop") for sample in range(2)]
    experience = Experience.of([0, 0], rollouts)
    experience.rewards_S = torch.tensor([1.0, 0.0])
    compute_advantages(experience, options_of("rloo"), kl_coefficient=0.0)
    assert experience.advantages_N.tolist() == [1, 1, -1, -1]
