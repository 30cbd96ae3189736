"""Groups that outlive an update: written in pieces, judged as they finish, each handed over once and whole."""

import random
import threading

import numpy as np
import pytest

from tests.envs.episodes import make_policy, sampling_of
from tests.envs.episodes import player as make_episode_engine
from tests.envs.fake_pool import Pool
from tests.rollout.test_builtin_engine import policy_of
from tests.rollout.test_builtin_engine import prompts as texts
from tests.train.rl.scripted_engine import ScriptedEngine, length_of
from trimtab.rewards.requests import PromptBatch
from trimtab.rewards.types import RewardFailed, RewardResult
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.sampling import SamplingParams
from trimtab.train.rl.async_worker import AsyncRolloutWorker
from trimtab.train.rl.rollout_worker import Admission, InFlightGroup

DRAWN = SamplingParams(max_new_tokens=30, n=3)


class Words:
    """A tokenizer's half that rewards need."""

    def batch_decode(self, ids, **_):
        return [" ".join(map(str, part)) for part in ids]


class Judge:
    """Tokens of an answer; of some prompts it waits, or fails."""

    name, concurrent = "judge", True

    def __init__(self, slow=(), broken=()):
        self.slow, self.broken = slow, broken
        self.let_go, self.calls = threading.Event(), []

    def __call__(self, request):
        (place,) = {int(prompt) for prompt in request.prompts}
        self.calls.append(place)
        if place in self.slow:
            assert self.let_go.wait(30)
        if place in self.broken:
            raise RewardFailed("row 1 is bad", 1)
        return RewardResult([float(len(ids)) for ids in request.response_ids])

    def close(self):
        self.let_go.set()


def admission(places, version=0, drafts=None):
    places = list(places)
    groups = [InFlightGroup(p, version, 10 * p, p, (drafts or {}).get(p, [])) for p in places]
    asked = [[1 + p, 2, 3] for p in places]
    plain = {"texts": [str(p) for p in places], "prompts": [str(p) for p in places]}
    labels = {"labels": [None for _ in places], "others": [{} for _ in places]}
    return Admission(groups, PromptBatch([10 * p for p in places], places, asked, "prompt", **plain, **labels))


@pytest.fixture
def role_of():
    made = []

    def make(engine=None, judge=None, stopped=lambda: False):
        judges = [] if judge is None else [(judge, 1.0)]
        made.append(AsyncRolloutWorker(engine or ScriptedEngine(), judges, Words(), stopped))
        return made[-1]

    yield make
    for role in made:
        role.close()


def all_of(role):
    """Everything that is under way, by place, as it is handed over."""
    found = {}
    while role.unfinished():
        for written in role.collect().finished:
            assert written.place not in found
            found[written.place] = written
    return found


@pytest.mark.parametrize("seed", range(5))
def test_every_group_is_handed_over_once_and_whole_whatever_pauses_there_are(role_of, seed):
    rng, engine = random.Random(seed), ScriptedEngine(max_num_seqs=4)
    role = role_of(engine, Judge())
    found, admitted, drawn, read_again = {}, 0, 0, 0
    while len(found) < 40:
        if admitted < 40:
            count = min(rng.randint(0, 4), 40 - admitted)
            role.admit(admission(range(admitted, admitted + count), version=engine.version), sampling=DRAWN)
            admitted += count
        done = role.collect(seconds=rng.choice([0.0, None]))
        drawn, read_again = drawn + done.drawn, read_again + done.read_again
        for written in done.finished:
            assert written.place not in found
            found[written.place] = written
        assert {group.place for group in role.unfinished()} == set(range(admitted)) - set(found)
        if rng.random() < 0.5:
            role.pause()
            role.pause()
            role.weights_changed(version=engine.version + 1)
    assert engine.version > 3 and read_again > 0 and engine.rests == engine.sessions - (engine.at_work is not None)
    for place, answers in found.items():
        experience = answers.experience
        assert experience.rows_S.tolist() == [10 * place] * 3
        lengths = [length_of(place, sample, 30) for sample in range(3)]
        assert experience.lengths_S.tolist() == lengths == answers.results[0].rewards
        for sample in range(3):
            assert experience.response(sample) == [100 * sample + k for k in range(lengths[sample])]
        versions = experience.versions_N
        assert versions.tolist() == experience.sampled_N.tolist()  # each token has its own log-prob and version
        for part in versions.split(lengths):
            assert (part.diff() >= 0).all()
    assert drawn == sum(int(answers.experience.lengths_S.sum()) for answers in found.values())
    assert any(len(answers.experience.versions_N.unique()) > 1 for answers in found.values())


def test_pauses_under_the_same_weights_change_no_token_of_the_built_in_engine(role_of):
    policy, prompts, cut = policy_of(), texts((5, 17, 9, 12)), 0
    questions = PromptBatch(list(range(4)), [7, 8, 9, 10], prompts, "prompt")
    expected = BuiltinEngine(policy).generate(prompts, DRAWN, seeds=questions.seeds)
    engine = BuiltinEngine(policy, max_num_seqs=4)
    role = role_of(engine)
    role.admit(Admission([InFlightGroup(p, 0, p, 7 + p) for p in range(4)], questions), sampling=DRAWN)
    found = {}
    while len(found) < 4:
        for written in role.collect(seconds=0.01).finished:
            found[written.place] = written.experience
        role.pause()
        cut += sum(0 < len(draft.ids) < 30 for group in role.unfinished() for draft in group.trajectories)
    assert cut > 5
    for rollout in expected:
        experience = found[rollout.prompt]
        assert experience.response(rollout.sample) == rollout.ids
    for place in range(4):
        log_probs = np.concatenate([rollout.log_probs for rollout in expected if rollout.prompt == place])
        np.testing.assert_allclose(found[place].sampled_N.numpy(), log_probs, atol=1e-5)


def test_of_episodes_what_the_model_drew_is_counted_and_not_what_the_world_said():
    player = make_episode_engine(make_policy(), Pool(slow=1))
    role = AsyncRolloutWorker(player.engine, [], player.tokenizer, lambda: False, player=player)
    role.admit(admission(range(3)), sampling=sampling_of(player.tokenizer, n=2))
    found, drawn = [], 0
    while role.unfinished():
        done = role.collect(seconds=0.01)
        role.pause()
        drawn += done.drawn
        found += [written.experience for written in done.finished]
    role.close()
    assert drawn == sum(int(experience.lengths_S.sum()) for experience in found)
    assert drawn < sum(len(experience.response(i)) for experience in found for i in range(len(experience)))


def test_a_reward_that_is_slow_for_some_groups_holds_up_no_other(role_of):
    judge = Judge(slow=(0, 2))
    role = role_of(judge=judge)
    role.admit(admission(range(6)), sampling=DRAWN)
    found = set()
    while len(found) < 4:
        found |= {written.place for written in role.collect().finished}
    assert found == {1, 3, 4, 5}
    waits = role.waits()
    assert {(wait.place, wait.what) for wait in waits} == {(0, "its reward"), (2, "its reward")}
    assert [wait.tokens for wait in waits] == [length_of(place, sample, 30) for place in (0, 2) for sample in range(3)]
    done = role.collect(seconds=0.01)
    assert done.finished == [] and done.drawn == 0
    role.pause()  # which does not wait for rewards
    judge.let_go.set()
    assert set(all_of(role)) == {0, 2}


def test_a_failed_reward_is_handed_back_and_its_group_can_be_judged_again_without_being_written_again(role_of):
    role = role_of(judge=Judge(broken=(1,)))
    role.admit(admission([1]), sampling=DRAWN)
    failure = role.collect()
    assert isinstance(failure, RewardFailed) and failure.row == 10
    role.pause()
    (group,) = role.unfinished()
    assert [draft.finish for draft in group.trajectories] == ["stop"] * 3
    judge, engine = Judge(), ScriptedEngine()
    again = role_of(engine, judge)
    again.admit(admission([1], drafts={1: group.trajectories}), sampling=DRAWN)
    done = again.collect()
    assert [written.place for written in done.finished] == [1] == judge.calls and done.drawn == done.read_again == 0


def test_a_run_that_is_told_to_stop_gives_up_the_wait_and_loses_nothing(role_of):
    told = threading.Event()
    judge = Judge(slow=(0,))
    role = role_of(ScriptedEngine(max_num_seqs=30), judge, told.is_set)
    role.admit(admission([0]), sampling=DRAWN)
    threading.Timer(0.2, told.set).start()
    assert role.collect() is None
    role.admit(admission([5]), sampling=DRAWN)
    assert role.collect() is None
    role.pause()
    first, second = role.unfinished()
    assert [draft.finish for draft in first.trajectories] == ["stop"] * 3 and second.trajectories == []


def test_without_rewards_near_the_engine_groups_are_handed_over_as_they_end(role_of):
    role = role_of(ScriptedEngine(max_num_seqs=100))
    role.admit(admission(range(5)), sampling=DRAWN)
    found = all_of(role)
    assert list(found) == sorted(found, key=lambda place: max(length_of(place, k, 30) for k in range(3)))
    assert all(answers.results == [] for answers in found.values())
    assert role.collect().finished == []  # at once, where there is nothing to write
