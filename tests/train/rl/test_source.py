"""Which answers an iteration is made of, where groups that teach nothing are left out."""

import numpy as np
import pytest

from trimtab.config.rl_jobs import GRPOOptions
from trimtab.interrupts import StopRequest
from trimtab.rewards.types import RewardFailed, RewardResult
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Trajectory
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.rollout_client import EnvironmentFailed
from trimtab.train.rl.rollout_worker import FailedGroup, SampledGroups
from trimtab.train.rl.source import SyncSource, prompt_order

PROMPTS = 10


class Answered:
    """Two answers to every prompt; those to even ones are scored 0.5 each, to odd ones 0 and 1."""

    def __init__(self, useful=lambda row: row % 2 == 1, broken=()):
        """`broken`: rows whose environment fails."""
        self.useful, self.broken, self.asked = useful, broken, []

    def ask(self, requests, store, sampling):
        rows = [row for row, _ in requests]
        self.asked.append(rows)
        failed = [FailedGroup(row, f"row {row} broke") for row in rows if row in self.broken]
        rows = [row for row in rows if row not in self.broken]
        if not rows:
            return SampledGroups(None, [], failed)
        drawn = [Trajectory(p, k, [1], [2], np.zeros(1, np.float32), "stop") for p in range(len(rows)) for k in (0, 1)]
        scores = [score for row in rows for score in ((0.0, 1.0) if self.useful(row) else (0.5, 0.5))]
        return SampledGroups(
            Experience.of([row for row in rows for _ in (0, 1)], drawn, RewardResult(scores)), [], failed
        )


def iterations(client, **changes):
    """The rows of every iteration until the supply ends."""
    fixed = {"rollout_batch_size": 3, "n_samples_per_prompt": 2, "dynamic_filtering": True, "no_shuffle": True}
    options = GRPOOptions(**fixed | changes)
    order = prompt_order(PROMPTS, options, 1)
    source, used, found = SyncSource(options, order, SamplingParams(), client), 0, []
    while used < order.steps:
        experience, taken, figures = source.next(len(found), used, StopRequest())
        if experience is None:
            return found
        used += taken
        found.append(experience.rows_S[::2].tolist())
        left_out = figures.get("filtered_groups", 0) + figures.get("failed_episodes", 0)
        assert left_out == taken - len(found[-1]) or len(found[-1]) == 3
    return found


class OneEmpty(Answered):
    """The same with a third sample, scored 0.25, in which the model drew nothing; of row 9 all are such."""

    def ask(self, requests, store, sampling):
        rows = [row for row, _ in requests]
        drawn, scores = [], []
        for place, row in enumerate(rows):
            for sample, score in enumerate((0.25, *((0.0, 1.0) if self.useful(row) else (0.5, 0.5)))):
                drew = np.array([sample > 0 and row != 9])
                drawn.append(Trajectory(place, sample, [1], [2], np.zeros(drew.sum(), np.float32), "stop", drawn=drew))
                scores.append(score)
        return SampledGroups(Experience.of([row for row in rows for _ in range(3)], drawn, RewardResult(scores)), [])


@pytest.mark.parametrize(("rule", "kept"), [("differing", [1, 3, 5, 7]), ("mean", [0, 1, 2, 3, 4, 5, 6, 7, 8])])
def test_filtering_looks_at_samples_with_drawn_tokens_alone(rule, kept):
    """With the empty sample every group would differ; its mean would be under 0.5."""
    options = GRPOOptions(
        rollout_batch_size=PROMPTS, n_samples_per_prompt=3, dynamic_filtering=True, no_shuffle=True,
        dynamic_filtering_rule=rule, dynamic_filtering_reward_range=(0.49, 1.0),
    )  # fmt: skip
    source = SyncSource(options, prompt_order(PROMPTS, options, 1), SamplingParams(), OneEmpty())
    experience, _, figures = source.next(0, 0, StopRequest())
    assert experience.rows_S[::3].tolist() == kept and figures["filtered_groups"] == PROMPTS - len(kept)


def test_differing_keeps_groups_whose_scores_are_not_all_alike_whatever_their_mean():
    assert iterations(Answered(), dynamic_filtering_rule="differing") == [[1, 3, 5], [7, 9]]
    # All means are 0.5, so by the mean all groups are alike.
    assert iterations(Answered()) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_after_so_many_rounds_an_iteration_is_made_of_what_there_is():
    client = Answered()
    assert iterations(client, dynamic_filtering_rule="differing", dynamic_filtering_batches=1) == [
        [1],
        [3, 5],
        [7],
        [9],
    ]
    assert client.asked == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    client = Answered()
    two = iterations(
        client, dynamic_filtering_rule="differing", dynamic_filtering_batches=2, vllm_generate_batch_size=2
    )
    assert two == [[1, 3], [5, 7], [9]] and client.asked == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_where_no_group_is_of_use_after_so_many_rounds_the_run_is_told():
    client = Answered(useful=lambda row: False)
    with pytest.raises(RewardFailed, match=r"no group of answers was of use in 2 rounds of sampling \(--dynamic_filt"):
        iterations(client, dynamic_filtering_rule="differing", dynamic_filtering_batches=2)
    assert len(client.asked) == 2
    assert iterations(client, dynamic_filtering_rule="differing") == [], "without a limit the prompts run out"


@pytest.mark.parametrize("changes", [{"dynamic_filtering": False}, {"dynamic_filtering_rule": "differing"}])
def test_with_drop_last_no_iteration_is_smaller(changes):
    found = iterations(Answered(), drop_last=True, **changes)
    assert found == ([[0, 1, 2], [3, 4, 5], [6, 7, 8]] if "dynamic_filtering" in changes else [[1, 3, 5]])


def test_groups_whose_environment_failed_are_left_out_and_the_next_prompts_taken():
    client = Answered(broken=(1, 3, 9))
    played = {"environment": "rg:game", "env_max_failed": 0.7, "dynamic_filtering": False}
    assert iterations(client, **played) == [[0, 2, 4], [5, 6, 7], [8]]
    assert client.asked == [[0, 1, 2], [3], [4], [5, 6, 7], [8, 9]], "as many as are missing"
    client = Answered(broken=(1, 3))
    differing = played | {"dynamic_filtering": True, "dynamic_filtering_rule": "differing"}
    assert iterations(client, **differing) == [[5, 7, 9]], "some failed, some taught nothing"


def test_too_many_failures_in_an_iteration_end_the_run_in_the_environments_words():
    played = {"environment": "rg:game", "env_max_failed": 0.2, "dynamic_filtering": False}
    words = r"rg:game: it failed for 2 of .*'s 3 groups, .* 0.2 .*\(--env_max_f.*row 1 broke"
    with pytest.raises(EnvironmentFailed, match=words):
        iterations(Answered(broken=(0, 1)), **played)
    assert iterations(Answered(broken=(0, 4)), **played) == [[1, 2, 3], [5, 6, 7], [8, 9]], "one in each is not"
