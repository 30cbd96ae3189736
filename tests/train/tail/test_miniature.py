"""The experiment in miniature, through the code that trains: two tokens of 200, a few of which are rare and bad.

REINFORCE and RePULSe sample equally many answers. The policy is a small transformer; P(bad) is the exact sum.
"""

import math

import pytest
import torch

from tests.train.job_run import NoStop
from tests.train.tail.small_world import make_run, write_world

VOCABULARY, BAD, GROUP, SAMPLED = 200, (2, 3, 4, 5), 250, 200_000
WORDS = ["<pad>", "<eos>", *(f"w{i}" for i in range(2, VOCABULARY))]
WORTH = torch.rand(VOCABULARY, generator=torch.Generator().manual_seed(5)).tolist()


def reward(answer: tuple[int, ...]) -> float:
    """Between 0 and 1, and -3 with a bad token."""
    if set(answer) & set(BAD):
        return -3.0
    return sum(WORTH[token] for token in answer) / len(answer)


def trained(folder, monkeypatch, method: str, seed: int) -> tuple[float, float]:
    """log P(bad) and mean reward at the end."""
    updates = SAMPLED // (GROUP * (2 if method == "repulse" else 1))
    run = make_run(
        folder,
        monkeypatch,
        f"--method {method} --alpha 0.02 --push_down_scale per_group --target_dist_beta -10 --seed {seed}",
        f"--n_samples_per_prompt {GROUP} --train_batch_size {GROUP} --micro_train_batch_size {GROUP}",
        f"--num_episodes {updates} --actor_learning_rate 1e-3 --proposal_learning_rate 3e-3 --analytic_bad_word_calc",
        f"--bad_token_ids {' '.join(map(str, BAD))} --single_prompt w7 --rollout_slots {GROUP}",
        reward=reward,
    )
    rewards = [run.iterate(NoStop)["reward"] for _ in range(updates)]
    return run.measures.before(run)["log_bad_probability"], sum(rewards[-5:]) / 5


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_repulse_ends_nats_below_reinforce_with_about_the_same_mean_reward(tmp_path, monkeypatch, seed):
    folder = write_world(tmp_path, WORDS, "w7", seed=seed, num_hidden_layers=1, tie_word_embeddings=False)
    plain, plain_reward = trained(folder, monkeypatch, "reinforce", seed)
    pushed, pushed_reward = trained(folder, monkeypatch, "repulse", seed)
    assert -math.inf < pushed < plain - 5
    assert abs(pushed_reward - plain_reward) < 0.15
