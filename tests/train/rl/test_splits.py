"""RL with layers or rows that are split over processes: the answers, the rewards and what is learnt are one process's."""

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import warm
from tests.train.rl.rl_run import REWARD, arguments, rows, weights, without
from tests.train.rl.test_groups import folder, keep_gradients  # noqa: F401
from trimtab.train.metrics import read_rows

SMALL = "--max_steps 1 --actor_learning_rate 1e-5"
TENSOR, CONTEXT = "--ds_tensor_parallel_size 2", "--ring_attn_size 2"
CASES = {
    "ppo": "--critic_learning_rate 1e-5 --reward_pretrain {folder}/judge",
    "lora": "--lora_dropout 0 --enable_ema",
}


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):  # noqa: F811
    """The run of one process, made once for each estimator."""
    made: dict[str, Path] = {}

    def make(estimator: str) -> Path:
        if estimator not in made:
            out = made[estimator] = tmp_path_factory.mktemp("alone")
            prepare = partial(keep_gradients, out / "gradients")
            assert warm.run(words(folder, out, estimator), prepare=prepare) == 0
        return made[estimator]

    return make


def words(folder: Path, out: Path, estimator: str, *more: str) -> list[str]:  # noqa: F811
    return arguments(folder, out, estimator, SMALL, CASES[estimator].format(folder=folder), *more)


@pytest.mark.parametrize(
    "estimator, split, processes",
    [
        ("ppo", TENSOR, 2),
        pytest.param("ppo", CONTEXT, 2, marks=pytest.mark.long),
        pytest.param("lora", TENSOR, 2, marks=pytest.mark.long),
        pytest.param("lora", CONTEXT, 2, marks=pytest.mark.long),
        pytest.param("ppo", f"{TENSOR} --zero_stage 3", 4, marks=pytest.mark.long),
        pytest.param("ppo", f"{TENSOR} {CONTEXT}", 4, marks=pytest.mark.long),
        pytest.param("ppo", f"{TENSOR} --ref_reward_offload --critic_num_gpus_per_node 2 --colocate_all_models", 4, marks=pytest.mark.long),
        pytest.param("ppo", f"{TENSOR} --controller_apart --bf16 False", 3, marks=pytest.mark.long),
    ],
)
def test_answers_rewards_and_gradients_are_those_of_one_process(
    folder,  # noqa: F811
    alone,
    tmp_path,
    estimator,
    split,
    processes,
):
    expected = alone(estimator)
    last = processes - 1
    prepared = {rank: partial(keep_gradients, tmp_path / f"of{rank}") for rank in range(processes)}
    more = words(folder, tmp_path / "out", estimator, split)
    assert warm.run_world(more, processes, prepare=prepared, log=tmp_path / "log") == [0] * processes, (
        tmp_path / "log.0"
    ).read_text()
    answers = [answered(out) for out in (expected, tmp_path / "out")]
    assert len(answers[0]) > 4 and answers[0] == answers[1]
    for role in ("actor", "critic") if estimator == "ppo" else ("actor",):
        plain, found = (
            load_file(f"{expected}/gradients-{role}.safetensors"),
            load_file(tmp_path / f"of{last}-{role}.safetensors"),
        )
        assert plain.keys() == found.keys()
        for name, gradient in plain.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-5, msg=lambda text: f"{name}: {text}")
    for row, other in zip(rows(expected), rows(tmp_path / "out"), strict=True):
        for name in ("reward", "loss", "grad_norm", "kl", "critic_loss", "eval_reward"):
            if name in row:
                assert other[name] == pytest.approx(row[name], rel=1e-4, abs=1e-5), name


def answered(out: Path) -> list[tuple]:
    kept = read_rows(out / "rollouts.jsonl")
    return [(row["step"], row["row"], row["response"], round(row["reward"], 3)) for row in kept]
