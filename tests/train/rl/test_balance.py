"""Answers of very different lengths over several processes: whole groups in a step, and about as much work for each."""

from types import SimpleNamespace

import numpy as np
import pytest

from trimtab.config.rl_jobs import GRPOOptions
from trimtab.rewards.types import RewardResult
from trimtab.rollout.trajectory import Trajectory
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.micro_batches import MicroBatcher, cost, mini_batches

GROUPS, ANSWERS, PROCESSES = 16, 8, 4


def long_and_short() -> Experience:
    """Prompts whose answers are about equally long, and much longer or shorter than those of others."""
    rng = np.random.default_rng(0)
    found = []
    for prompt in range(GROUPS):
        asked, usual = [1] * int(rng.integers(150, 512)), rng.lognormal(6.5, 0.6)
        for answer in range(ANSWERS):
            length = int(np.clip(rng.lognormal(np.log(usual), 0.5), 32, 4096))
            found.append(Trajectory(prompt, answer, asked, [2] * length, np.zeros(length, np.float32), "stop"))
    return Experience.of([r.prompt for r in found], found, RewardResult([0.0] * len(found)))


def test_steps_hold_whole_groups_and_processes_have_about_as_many_tokens():
    experience = long_and_short()
    passes = MicroBatcher(GRPOOptions(micro_train_batch_size=2))
    steps = mini_batches(experience, GROUPS // 2, (1, 2, 3))
    assert sorted(i for step in steps for i in step) == list(range(len(experience)))
    for step in steps:
        assert set(np.bincount(experience.groups_S[step].numpy(), minlength=GROUPS)) == {0, ANSWERS}
        shares = passes._shares(SimpleNamespace(size=PROCESSES), experience, step, 2, None)
        assert sorted(i for share in shares for samples in share for i in samples) == sorted(step)
        assert len({len(share) for share in shares}) == 1, "as many passes each"
        loads = [sum(cost(experience, samples) for samples in share) for share in shares]
        quarter = len(step) // PROCESSES
        as_they_come = [cost(experience, step[i * quarter : (i + 1) * quarter]) for i in range(PROCESSES)]
        assert max(loads) < 1.1 * np.mean(loads) and max(loads) < max(as_they_come)


@pytest.mark.parametrize(
    "changes, on_cpu, on_accelerator",
    [
        ({"train_max_tokens_per_gpu": 16_192}, 16_192, 32_768),
        ({"train_max_tokens_per_gpu": 4000}, 4000, 16_000),
        ({"train_max_tokens_per_gpu": 65_536}, 65_536, 65_536),
        ({"train_max_tokens_per_gpu": 4000, "rollout_max_tokens_per_gpu": 5000}, 5000, 5000),
        ({"use_dynamic_batch": False}, None, None),
    ],
)
def test_passes_of_scoring_are_larger_on_an_accelerator_unless_somebody_said_how_large(changes, on_cpu, on_accelerator):
    options = GRPOOptions(**{"use_dynamic_batch": True, "given": frozenset(changes)} | changes)
    assert MicroBatcher(options).scoring_budget() == on_cpu
    assert MicroBatcher(options, larger_scoring=True).scoring_budget() == on_accelerator
