from dataclasses import replace

import numpy as np
import pytest
import torch

from trimtab.distributed.serialization import Serializer
from trimtab.models.packed import PaddedRows
from trimtab.rewards.types import RewardResult
from trimtab.rollout.trajectory import Trajectory
from trimtab.train.rl.async_source import partials_from_disk, partials_on_disk
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.micro_batches import AnswerSlice, cost, make_slice, micro_batches, mini_batches
from trimtab.train.rl.rollout_worker import InFlightGroup

PROMPTS = [[5, 6, 7], [8, 9], [5, 6, 7, 8, 9]]


def make(n=3, seed=0, steps=None):
    rng = np.random.default_rng(seed)
    rollouts = []
    for index, prompt in enumerate(PROMPTS):
        for sample in range(n):
            ids = rng.integers(1, 50, rng.integers(1, 7)).tolist()
            log_probs = -rng.random(len(ids)).astype(np.float32)
            finish, versions = "stop" if sample else "length", np.sort(rng.integers(0, 9, len(ids))).astype(np.int32)
            rollouts.append(Trajectory(index, sample, prompt, ids, log_probs, finish, versions=versions))
    rewards = rng.random(len(rollouts)).tolist()
    logs = {"format": rng.random(len(rollouts)).tolist()}
    return Experience.of([r.prompt + 10 for r in rollouts], rollouts, RewardResult(rewards, logs=logs, steps=steps))


def test_tokens_lie_sample_after_sample_and_know_how_many_follow():
    experience = make()
    position = 0
    for sample in range(len(experience)):
        ids = experience.response(sample)
        for place in range(len(ids)):
            assert experience.owners_N[position] == sample
            assert experience.remaining_N[position] == len(ids) - 1 - place
            position += 1
    assert position == len(experience.sampled_N)


def test_a_batch_holds_every_sequence_and_its_columns_and_a_shared_prompt_once():
    experience = make()
    samples = [4, 5, 1, 0, 8]
    (batch,) = make_slice(experience, [samples], "sampled_N").batches()
    for place, i in enumerate(samples):
        assert batch.sequence(place).tolist() == experience.prompt(i) + experience.response(i)
    expected = [t for i in samples for t in experience.response(i)]
    assert batch.targets_N.tolist() == expected
    assert torch.equal(batch.extra["sampled_N"], experience.sampled_N[experience.tokens_of(samples)])
    assert batch.tokens == cost(experience, samples) == len(expected) + 2 + 3 + 5


def test_what_is_put_piece_by_piece_lands_where_it_belongs():
    experience = make()
    pieces = [([3, 0], experience.sampled_N[experience.tokens_of([3, 0])])]
    rest = [i for i in range(len(experience)) if i not in (3, 0)]
    pieces.append((rest, experience.sampled_N[experience.tokens_of(rest)]))
    experience.put("old_N", pieces)
    assert torch.equal(experience.old_N, experience.sampled_N)


def test_taking_and_joining_are_inverse():
    experience = make()
    joined = Experience.joined([experience.take([0, 1, 2]), experience.take([3, 4, 5, 6, 7, 8])])
    assert_equal(joined, experience)
    alone = Experience.joined([experience])
    assert_equal(alone, experience)
    alone.old_N = torch.ones(len(experience.sampled_N))
    assert experience.old_N is None, "somebody may have kept the part"


def test_it_survives_being_written_as_tensors():
    experience = make(steps=[[(0, 0.5)]] + [[] for _ in range(8)])
    experience.advantages_N = torch.randn(len(experience.sampled_N))
    assert_equal(Experience.from_tensors(experience.tensors()), experience)


def test_versions_stay_with_their_tokens():
    experience = make()
    samples = [4, 5, 3, 0]
    expected = experience.versions_N[experience.tokens_of(samples)]
    assert torch.equal(experience.take(samples).versions_N, expected) and len(set(expected.tolist())) > 3


def test_an_earlier_recording_has_one_version_for_a_samples_tokens():
    experience = make()
    tensors = experience.tensors()
    del tensors["versions_N"]
    read = Experience.from_tensors(tensors | {"versions_S": torch.arange(len(experience))})
    assert torch.equal(read.versions_N, read.owners_N.int())
    assert Experience.from_tensors(tensors).versions_N is None  # made by hand


def test_step_rewards_stand_on_their_tokens():
    steps = [[] for _ in range(9)]
    steps[4] = [(0, 0.25)]
    experience = make(steps=steps)
    scores_K, tokens_K = experience.steps()
    assert scores_K.tolist() == [0.25] and tokens_K.tolist() == [experience.starts_S[4]]
    assert torch.equal((experience.answer_rewards_S - experience.rewards_S).nonzero()[:, 0], torch.tensor([4]))


def assert_equal(first, second):
    for name, value in vars(second).items():
        if name in Experience.__dataclass_fields__:
            other = getattr(first, name)
            assert torch.equal(other, value) if isinstance(value, torch.Tensor) else str(other) == str(value), name


@pytest.mark.parametrize("budget", [None, 8, 20, 1000])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_passes_hold_every_sample_once_and_no_more_than_they_may(budget, count):
    experience = make()
    samples = list(range(1, 9))
    passes = micro_batches(experience, samples, count=count, budget=budget)
    assert sorted(i for part in passes for i in part) == samples
    for part in passes:
        if budget is None:
            assert len(part) <= count
        else:
            assert cost(experience, part) <= budget or len(part) == 1


def test_answers_to_one_prompt_are_read_together_where_they_fit():
    experience = make()
    passes = micro_batches(experience, range(9), count=1, budget=1000)
    assert len(passes) == 1
    assert cost(experience, passes[0]) == sum(map(len, PROMPTS)) + len(experience.sampled_N)


@pytest.mark.parametrize("size", [1, 4, 8, 12, 100])
def test_optimiser_steps_hold_whole_groups_and_every_sample_once(size):
    experience = Experience.joined([make(n=4)] * 2)
    steps = mini_batches(experience, size // 4 or 1, (0, 1, 2))
    assert sorted(i for step in steps for i in step) == list(range(24))
    for step in steps:
        assert len(step) <= max(4, size)
        assert [i - i % 4 for i in step[::4]] == step[::4], "whole groups, in order"
    assert steps == mini_batches(experience, size // 4 or 1, (0, 1, 2))
    if size < 24:
        assert steps != mini_batches(experience, size // 4 or 1, (0, 2, 2))


# ---- routes: here, of every token its own number, so that a wrong place shows


def with_routes(experience):
    ids_T = experience.ids_T[:, None, None]
    experience.routes_TLK = torch.cat(
        [torch.cat([ids_T + 100 * n for n in (layer, layer + 1)], 2) for layer in (0, 1)], 1
    )
    experience.routes_TLK = experience.routes_TLK.to(torch.int16)
    return experience


def are_in_place(routes_TLK, ids_T):
    return torch.equal(routes_TLK[:, 0, 0].long(), ids_T.long()) and torch.equal(
        routes_TLK[:, 1, 1].long(), ids_T.long() + 200
    )


def test_routes_stay_with_their_tokens_through_cuts_packing_storage_and_messages():
    experience = with_routes(make())
    assert are_in_place(experience.take([4, 5, 1, 0, 8]).routes_TLK, experience.take([4, 5, 1, 0, 8]).ids_T)
    back = Experience.from_tensors(experience.tensors())
    assert torch.equal(back.routes_TLK, experience.routes_TLK) and back.routes_TLK.dtype == torch.int16
    for limits in ({"count": 2, "budget": None}, {"count": 1, "budget": 20}):
        passes = micro_batches(experience, range(len(experience)), **limits)
        part = make_slice(experience, [*passes, None], "sampled_N", routes_TLK=experience.routes_TLK)
        part = Serializer(AnswerSlice).unpack(Serializer(AnswerSlice).pack(part))
        for batch in part.batches():
            assert are_in_place(batch.routes_TLK, batch.ids_T)
            apart = batch.separate()
            assert are_in_place(apart.routes_TLK, apart.ids_T)
            rows = PaddedRows.of(batch)
            slots = rows.inputs["attention_mask"].flatten() == 1
            assert are_in_place(rows.routes_TLK[slots], rows.inputs["input_ids"].flatten()[slots])
    assert all(batch.routes_TLK is None for batch in make_slice(experience, passes).batches())


def test_where_some_parts_have_no_routes_their_tokens_have_unknown_ones():
    one, other = with_routes(make(seed=1)), make(seed=2)
    for parts in ((one, other), (other, one)):
        whole = Experience.joined(parts)
        known = (whole.routes_TLK != torch.iinfo(torch.int16).max).all(2).all(1)
        assert are_in_place(whole.routes_TLK[known], one.ids_T) and int(known.sum()) == len(one.ids_T)
    assert Experience.joined((other, other)).routes_TLK is None


def routes_of(ids, known=None):
    """Routes whose only layer is the token itself."""
    routes = np.array(ids, dtype=np.uint8)[:, None, None]
    return routes if known is None else np.where(np.array(known)[:, None, None], routes, np.uint8(255))


def test_turns_and_partial_rollouts_keep_the_first_routes_of_every_token():
    """What an engine reads again is routed anew; tokens that were sampled keep what they were sampled with."""
    first = Trajectory(
        0, 0, [5, 6], [7, 8], np.zeros(2, np.float32), "stop", routes=routes_of([5, 6, 7, 8], [1, 1, 1, 0])
    )
    whole = first.with_observation([9, 10])
    read_again = routes_of([105, 106, 107, 8, 9, 10, 11, 12], [1] * 7 + [0])
    turn = Trajectory(0, 0, whole.whole_ids, [11, 12], np.zeros(2, np.float32), "stop", routes=read_again)
    whole = whole.with_turn(turn)
    assert whole.routes[:, 0, 0].tolist() == [5, 6, 7, 8, 9, 10, 11, 255]
    late = Trajectory.empty(0, [5, 6]).with_observation([7, 8, 9, 10]).with_turn(turn)
    assert late.routes[:, 0, 0].tolist() == [105, 106, 107, 8, 9, 10, 11, 255]
    flat = Experience.of([0, 0], [replace(whole, sample=1), replace(first, routes=None)])
    assert flat.routes_TLK[:, 0, 0].tolist() == [5, 6, 7, 8, 9, 10, 11, 255, *[255] * 4]
    group = InFlightGroup(3, 1, 0, 17, [one.stored() for one in (whole, replace(first, routes=None), first)])
    group.trajectories = [replace(one, versions=np.zeros(len(one.log_probs), np.int32)) for one in group.trajectories]
    (back,) = partials_from_disk(*partials_on_disk([group]))
    assert np.array_equal(back.trajectories[0].routes, whole.routes) and back.trajectories[1].routes is None
    assert np.array_equal(back.trajectories[2].routes, first.routes)
