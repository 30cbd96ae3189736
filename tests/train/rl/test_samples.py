"""Which answers are kept for a person, and what metrics keep of all of them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.train.job_run import rows
from trimtab.rollout.trajectory import Trajectory
from trimtab.train.metrics import read_rows
from trimtab.train.rl import rollout_files
from trimtab.train.rl.experience import Experience


def experience(rewards, answers=None, rows_=None) -> Experience:
    count = len(rewards)
    answers = answers or [[i] for i in range(count)]
    result = SimpleNamespace(rewards=list(rewards), scores=list(rewards), logs={}, steps=None)
    rows_ = rows_ or [0] * count
    found = [
        Trajectory(row, i, [1], ids, np.zeros(len(ids), np.float32), "stop")
        for i, (row, ids) in enumerate(zip(rows_, answers))
    ]
    return Experience.of(rows_, found, result)


def test_an_answer_given_often_is_kept_once_and_best_are_better_than_worst():
    rewards = [1.0, 1.0, 1.0, 1.0, 0.5, -0.794, -1.0, -1.0]
    found = rollout_files.best_and_worst(experience(rewards, [[9]] * 4 + [[1], [2], [3], [3]]), 8)
    assert [(rewards[i], kind) for i, kind in found.items()] == [
        (1.0, "best"), (0.5, "best"), (-0.794, "worst"), (-1.0, "worst"),
    ]  # fmt: skip
    assert rollout_files.best_and_worst(experience([1.0]), 8) == {0: "best"}
    assert rollout_files.best_and_worst(experience([1.0]), 0) == {}


def followed(rows_: list[int], iteration=1, total=100) -> set[int]:
    each = [row for row in rows_ for _ in range(3)]
    kept = rollout_files.whole_groups(experience([0.0] * len(each), rows_=each), iteration, total)
    assert all(sum(each[i] == row for i in kept) == 3 for row in {each[i] for i in kept}), "whole groups"
    return {each[i] for i in kept}


def test_the_same_prompts_are_followed_whatever_stands_beside_them():
    chosen = followed(list(range(100)))
    assert len(chosen) == rollout_files.GROUPS and chosen != {0, 1}
    for row in chosen:
        assert row in followed([*range(1, 100, 7), row]) and row in followed([row, *range(30, 60)])
    assert not followed([0, 1, 2], iteration=11, total=1000), "not in every iteration of many"
    assert followed([0, 1, 2], iteration=20, total=1000)


@pytest.mark.parametrize(("values", "filled"), [([0.0, 1.0, 1.0], {0: 1, 11: 2}), ([2.0, 2.0], None)])
def test_histograms_count_every_answer(values, filled):
    found = rollout_files.distributions(experience(values))["reward_histogram"]
    assert found[:2] == [min(values), max(values)] and sum(found[2:]) == len(values)
    if filled is not None:
        assert {i: count for i, count in enumerate(found[2:]) if count} == filled


def test_a_run_keeps_groups_with_label_parts_and_advantage(recorded):
    kept = read_rows(recorded / "rollouts.jsonl")
    groups = [row for row in kept if row["group"] == "train" and row["step"] == 1]
    assert len(groups) == rollout_files.GROUPS * 4 and len({row["row"] for row in groups}) == rollout_files.GROUPS
    assert all(row["label"] and row["parts"].keys() == {"regex", "length"} for row in groups)
    by_row = [
        torch.tensor([row["advantage"] for row in groups if row["row"] == r]) for r in {row["row"] for row in groups}
    ]
    assert all(abs(float(found.mean())) < 0.2 for found in by_row), "seen against the group, less a little KL"
    evaluated = [row for row in kept if row["group"] == "evaluation"]
    assert {row["step"] for row in evaluated} == {0, 2, 4, 5} and {row["row"] for row in evaluated} == {0, 1, 2, 3}
    scores = rows(recorded)[1]["prompt_scores"]
    assert len(scores) == 4 and all(0 <= score <= 1.5 for _, score in scores)
