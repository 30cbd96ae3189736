"""Episodes of an environment where answers were: what is scored, left out, counted and kept of them."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from tests.train.rl.played import Played, experience_of
from trimtab.rewards.requests import PromptBatch
from trimtab.rewards.types import EnvironmentReward, RewardRequest, RewardResult
from trimtab.rollout.episode import EpisodeRecord
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Trajectory
from trimtab.train.rl.rollout_files import episode_figures, turns
from trimtab.train.rl.rollout_worker import FailedGroup, RolloutWorker


class Player:
    """An engine whose episodes are written out: how each of a prompt's samples goes."""

    def __init__(self, *groups):
        self.groups, self.tasks = groups, None

    def stream(self, prompts, sampling, *, seeds, tasks):
        self.tasks = tasks
        for prompt, samples in enumerate(self.groups):
            for sample, played in enumerate(samples):
                if isinstance(played, Played):
                    yield from played.rollouts(prompt, sample, [90, prompt])
                else:
                    empty = np.zeros(0, np.float32)
                    record = EpisodeRecord(problem=played)
                    yield Trajectory(prompt, sample, [90, prompt], [], empty, "failed", episode=record)

    def close(self): ...


class Tokenizer:
    clean_up_tokenization_spaces = True

    def batch_decode(self, ids, skip_special_tokens=False):
        return [" ".join(map(str, own)) for own in ids]


class Transcripts:
    """A reward that notes what it is shown."""

    name, concurrent = "transcripts", True

    def __init__(self):
        self.seen = []

    def __call__(self, request):
        self.seen += zip(request.prompts, request.responses, request.queries)
        return RewardResult([0.5] * len(request))

    def close(self): ...


def sampled(*groups, others=()):
    player = Player(*groups)
    engine = SimpleNamespace(exact=False, trim_memory=lambda: None, close=lambda: None)
    rewards = [*others, (EnvironmentReward("rg:game"), 1.0)]
    role = RolloutWorker(engine, rewards, Tokenizer(), lambda: False, player=player)
    count = range(len(groups))
    rows = {
        "prompts": [f"row {i}" for i in count],
        "labels": [10 + i for i in count],
        "others": [{"x": i} for i in count],
    }
    questions = PromptBatch(
        [7 + i for i in count], [-1 - i for i in count], [[1]] * len(groups), "input", ["t"] * len(groups), **rows
    )
    try:
        return role.sample(questions, sampling=SamplingParams(n=2)), player
    finally:
        role.close()


WON = Played([([1, 2], 0.0), ([3], 1.0)], last_reward=0.25)
LOST = Played([([4], -0.5)], finish="turns")
REWRITTEN = Played([([1], 0.0), ([2, 3], 2.0)], branches=[1])


def test_rewards_are_the_environments_and_others_added_which_see_the_transcript():
    seen = Transcripts()
    replied, player = sampled((WON, LOST), (REWRITTEN, LOST), others=[(seen, 2.0)])
    experience, (others, own) = replied.experience, replied.results
    assert own.rewards == [1.25, -0.5, 2.0, 2.0, -0.5] and others.rewards == [0.5] * 5
    assert experience.rows_S.tolist() == [7, 7, 8, 8, 8] and experience.groups_S.tolist() == [0, 0, 1, 1, 1]
    assert seen.seen[0] == ("90 0", "1 2 30 31 3", "90 01 2 30 31 3")
    task = player.tasks[1]
    assert (task.row, task.sample, task.prompt, task.label, task.columns) == (8, 0, "row 1", 11, {"x": 1})
    assert task.seed == (-2) & (2**31 - 1), "one that every library takes"
    assert replied.failed == []


def test_a_group_with_a_failed_episode_is_left_out_and_says_why():
    replied, _ = sampled((WON, "it broke"), (WON, LOST), (None, "it hung"))
    assert replied.experience.rows_S.tolist() == [8, 8] and replied.results[0].rewards == [1.25, -0.5]
    assert replied.failed == [FailedGroup(0, "it broke"), FailedGroup(2, "it hung")], "none given up"
    replied, _ = sampled(("a", "b"))
    assert replied.experience is None and replied.failed == [FailedGroup(0, "a", episodes=2)]


def test_figures_count_an_episode_once_whatever_its_branches():
    experience = experience_of([[WON, LOST], [REWRITTEN, LOST]])
    logs = [{"tool_calls": 3.0, "seconds_environment": 2.0}, {}, {"tool_calls": 1.0, "score": 5.0}, {}]
    for own, first in zip(logs, experience.firsts_E.tolist()):
        experience.episodes[first].logs = own
    found = episode_figures(experience)
    assert found["turns"] == 1.5 and found["tool_calls"] == 1.0 and found["unknown_tools"] == 0.0
    assert found["branches"] == 5 / 4 and (found["finish/stop"], found["finish/turns"]) == (0.5, 0.5)
    assert found["seconds_environment"] == 0.5 < found["seconds_environment_95"] < 2 and "score" not in found
    prompt, rewritten = 3, 1 + 2 + 2  # all that was said before, the world's words, and the second turn
    assert found["episode_length"] == prompt + (5 + 1 + rewritten + 1) / 4
    assert not any(math.isnan(value) for value in found.values())


def test_own_figures_of_an_environment_are_logged_and_those_of_playing_are_not():
    episodes = [EpisodeRecord(logs={"tool_calls": 2.0, "steps": 4.0}), EpisodeRecord(logs={"close": 1.0})]
    request = RewardRequest(["", ""], ["", ""], ["", ""], [None, None], episodes=episodes)
    logs = EnvironmentReward("x")(request).logs
    assert logs.keys() == {"steps", "close"} and logs["steps"][0] == 4.0 and math.isnan(logs["steps"][1])


def test_the_turns_of_an_episode_are_told_one_by_one():
    told = turns(WON.rollouts(0, 0, [1])[0].episode, 100)
    assert [(turn["role"], turn["tokens"], turn["drawn"], turn["reward"]) for turn in told] == [
        ("assistant", 2, True, 0.0),
        ("user", 2, False, 0.0),
        ("assistant", 1, True, 1.0),
    ]


@pytest.mark.parametrize("exact, invariant, plays, needed", [(1, 0, 0, 1), (1, 0, 1, 0), (1, 1, 1, 1), (0, 0, 1, 0)])
def test_sampled_log_probs_of_episodes_are_used_if_batches_do_not_change_them(exact, invariant, plays, needed):
    """Which turns share a batch depends on the time that an environment takes."""
    engine = SimpleNamespace(exact=bool(exact), batch_invariant=bool(invariant))
    role = RolloutWorker(engine, [], Tokenizer(), lambda: False, player=Player() if plays else None)
    described = role.describe()
    assert (described["engine_exact"], described["exact"]) == (bool(exact), bool(needed))
