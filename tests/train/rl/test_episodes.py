"""Episodes with an environment as experience: records, and branches that count once."""

import json

import pytest
import torch

from tests.train.rl.played import Played, experience_of
from tests.train.rl.test_experience import assert_equal
from trimtab.distributed.serialization import Serializer
from trimtab.rewards.types import RewardResult
from trimtab.rollout.sampling import SamplingParams
from trimtab.train.rl.async_source import fitting, partials_from_disk, partials_on_disk, whole_from_disk, whole_on_disk
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.launch import RECORDS
from trimtab.train.rl.rollout_worker import FinishedGroup, InFlightGroup

FIRST = [
    Played([([1, 2], 0.5), ([3], -0.25), ([4, 5, 6], 1.0)], branches=[1]),
    Played([([7], 0.0)], last_reward=2.0),
]
SECOND = [
    Played([([8, 9], 1.0), ([1], 0.5)], finish="turns"),
    Played([([2], 0.25), ([3, 3], 0.0), ([4], 0.0)], branches=[1, 2], finish="context"),
]


def make() -> Experience:
    return experience_of([FIRST, SECOND])


def test_branches_of_an_episode_are_beside_each_other_and_share_its_record_and_its_reward():
    experience = make()
    assert experience.branches_S.tolist() == [0, 1, 0, 0, 0, 1, 2]
    assert experience.episodes_S.tolist() == [0, 0, 1, 2, 3, 3, 3]
    assert experience.firsts_E.tolist() == [0, 2, 3, 4] and experience.lasts_E.tolist() == [1, 2, 3, 6]
    assert experience.groups_E.tolist() == [0, 0, 1, 1] and experience.lengths_E.tolist() == [6, 1, 3, 4]
    assert experience.episodes[0] is experience.episodes[1]
    assert [record.reward for record in experience.episodes] == experience.rewards_S.tolist()
    # Every drawn token stands in one branch as drawn.
    assert experience.lengths_S.tolist() == [2, 4, 1, 3, 1, 2, 1]


def test_an_episode_is_judged_where_it_ends():
    experience = make()
    scores = [float(i) for i in range(7)]
    experience.reward(RewardResult(scores, [-score for score in scores], {"seen": scores}))
    assert experience.rewards_S.tolist() == [1, 1, 2, 3, 6, 6, 6]
    assert experience.scores_S.tolist() == [-1, -1, -2, -3, -6, -6, -6]
    assert experience.logs["seen"].tolist() == [1, 1, 2, 3, 6, 6, 6]


def test_a_step_is_counted_in_the_branch_that_drew_its_end():
    experience = make()
    # The second branch of the first episode has four tokens of the past, then drew all but what the world said.
    steps = [[(1, 0.5)], [(0, 9.0), (4, 0.25), (9, 0.75)], [(0, 1.0)], [], [], [], []]
    experience.reward(RewardResult([0.0] * 7, steps=steps))
    assert experience.drawn(1).tolist() == [False] * 4 + [True] + [False] * 2 + [True] * 3
    assert experience.step_tokens[:3] == [[1], [0, 3], [0]]
    assert experience.step_scores[:3] == [[0.5], [0.25, 0.75], [1.0]]
    assert experience.answer_rewards_S[:3].tolist() == [0.5, 0.5, 1.0]


def test_records_and_branches_survive_taking_joining_tensors_and_the_wire():
    experience = make()
    parts = [experience.take(experience.samples_of([group])) for group in (0, 1)]
    assert parts[1].branches_S.tolist() == [0, 0, 1, 2] and parts[1].episodes_S.tolist() == [0, 1, 1, 1]
    assert_equal(Experience.joined(parts), experience)
    read = Experience.from_tensors(experience.tensors())
    assert_equal(read, experience)
    assert read.episodes == experience.episodes and read.episodes[4] is read.episodes[6]
    wire = Serializer(*RECORDS)
    sent = wire.unpack(wire.pack(experience))
    assert_equal(sent, experience)
    assert sent.episodes == experience.episodes


def test_parts_with_and_without_branches_are_joined():
    plain = experience_of([[FIRST[1], SECOND[0]]])
    assert plain.branches_S is None and plain.episodes_S.tolist() == [0, 1]
    assert Experience.joined([plain, make()]).branches_S.tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 2]
    assert Experience.joined([plain, plain]).branches_S is None


def test_groups_that_are_whole_keep_their_records_on_disk():
    experience = make()
    groups = {place: experience.take(experience.samples_of([place - 4])) for place in (4, 5)}
    result = RewardResult([0.5] * 4)
    tensors, described = whole_on_disk({4: groups[4]}, {5: FinishedGroup(5, groups[5], [result])})
    judged, written = whole_from_disk(tensors, json.loads(json.dumps(described)))
    assert_equal(judged[4], groups[4])
    assert_equal(written[5].experience, groups[5])
    assert judged[4].episodes == groups[4].episodes and written[5].results == [result]


def test_branches_out_of_order_are_noticed():
    rollouts = SECOND[1].rollouts(0, 0, [5])
    with pytest.raises(AssertionError, match="one after another"):
        Experience.of([0, 0, 0], [rollouts[0], rollouts[2], rollouts[1]])


@pytest.mark.parametrize("with_episodes", [True, False])
def test_drafts_on_disk_keep_what_was_drawn_and_the_record(with_episodes):
    rollouts = SECOND[1].rollouts(0, 1, [5]) + FIRST[0].rollouts(0, 0, [5])
    for rollout in rollouts:
        rollout.finish = "abort"
        if not with_episodes:
            rollout.drawn, rollout.episode = None, None
            rollout.log_probs = rollout.versions = torch.arange(len(rollout.tokens)).numpy()
    groups = [
        InFlightGroup(3, 1, 8, 42, [r.stored() for r in rollouts[:2]]),
        InFlightGroup(4, 1, 9, 43),
        InFlightGroup(5, 2, 1, 4),
    ]
    groups[2].trajectories = [r.stored() for r in rollouts[2:]]
    tensors, described = partials_on_disk(groups)
    read = partials_from_disk(tensors, json.loads(json.dumps(described)))
    assert [(group.place, group.version, group.row, group.seed) for group in read] == [
        *((3, 1, 8, 42), (4, 1, 9, 43), (5, 2, 1, 4))
    ]
    for group, other in zip(groups, read):
        assert len(group.trajectories) == len(other.trajectories)
        for draft, found in zip(group.trajectories, other.trajectories):
            assert (found.sample, found.finish, found.ids) == (draft.sample, None, draft.ids)
            assert found.log_probs.tolist() == draft.log_probs.tolist()
            assert found.versions.tolist() == draft.versions.tolist()
            assert (found.drawn is None) == (draft.drawn is None)
            assert found.drawn is None or found.drawn.tolist() == draft.drawn.tolist()
            assert found.episode == draft.episode
            assert found.branch == (draft.branch if with_episodes else 0)
    # A turn's limit says nothing of an episode, but fewer samples are fewer.
    fit = fitting(read[0], SamplingParams(max_new_tokens=1, n=2))
    assert [draft.finish for draft in fit.trajectories] == [None if with_episodes else "length"] * 2
    assert fitting(read[0], SamplingParams(max_new_tokens=1, n=1)).trajectories == []
