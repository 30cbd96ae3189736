"""RL with layers or rows that are split over processes: answers, rewards and what is learnt are those of one."""

import os
import signal
from functools import cache, partial
from pathlib import Path

import pytest

from tests import warm
from tests.train.rl.rl_run import EVALUATION, arguments, assert_identical, result, rows, without
from tests.train.rl.test_groups import assert_same_gradients, keep_gradients
from trimtab.train.metrics import read_rows

SMALL = "--max_steps 1 --actor_learning_rate 1e-5"
TENSOR, CONTEXT = "--ds_tensor_parallel_size 2", "--ring_attn_size 2"
CASES = {
    "ppo": "--critic_learning_rate 1e-5 --reward_pretrain {folder}/judge",
    "lora": "--lora_dropout 0 --enable_ema",
}


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    """The run of one process, made once for each estimator."""

    @cache
    def make(estimator: str) -> Path:
        out = tmp_path_factory.mktemp("alone")
        assert warm.run(words(folder, out, estimator), prepare=partial(keep_gradients, out / "gradients")) == 0
        return out

    return make


def words(folder: Path, out: Path, estimator: str, *more: str) -> list[str]:
    return arguments(folder, out, estimator, SMALL, CASES[estimator].format(folder=folder), *more)


@pytest.mark.short(1)
@pytest.mark.parametrize(
    "estimator, split, processes",
    [
        ("ppo", TENSOR, 2),
        ("ppo", CONTEXT, 2),
        ("lora", TENSOR, 2),
        ("lora", CONTEXT, 2),
        ("ppo", f"{TENSOR} --zero_stage 3", 4),
        ("ppo", f"{TENSOR} {CONTEXT}", 4),
        ("ppo", f"{TENSOR} --controller_apart", 3),
    ],
)
def test_answers_rewards_and_gradients_are_those_of_one_process(folder, alone, tmp_path, estimator, split, processes):
    expected = alone(estimator)
    prepared = {rank: partial(keep_gradients, tmp_path / f"of{rank}") for rank in range(processes)}
    warm.world_outputs(words(folder, tmp_path / "out", estimator, split), processes, prepare=prepared)
    answers = [answered(out) for out in (expected, tmp_path / "out")]
    assert len(answers[0]) > 4 and answers[0] == answers[1]
    for role in ("actor", "critic") if estimator == "ppo" else ("actor",):
        found = tmp_path / f"of{processes - 1}-{role}.safetensors"
        assert_same_gradients(found, expected / f"gradients-{role}.safetensors")
    for row, other in zip(rows(expected), rows(tmp_path / "out"), strict=True):
        for name in ("reward", "loss", "grad_norm", "kl", "critic_loss", "eval_reward"):
            if name in row:
                assert other[name] == pytest.approx(row[name], rel=1e-4, abs=1e-5), name


def answered(out: Path) -> list[tuple]:
    kept = read_rows(out / "rollouts.jsonl")
    return [(row["step"], row["row"], row["response"], round(row["reward"], 3)) for row in kept]


FUNCTION = """
import os

def reward_func(queries, prompts, labels, **kwargs):
    with open({asked!r}, "a") as file:
        file.writelines("asked\\n" for _ in queries)
    if os.path.exists({broken!r}):
        raise ValueError("no reward today")
    return [float(len(query) % 3) for query in queries]
"""


def rewarded_by_function(folder: Path, out: Path) -> list[str]:
    out.mkdir()
    text = FUNCTION.format(asked=str(out / "asked"), broken=str(out / "broken"))
    (out / "reward.py").write_text(text)
    given = without(arguments(folder, out / "run", "grpo", SMALL, TENSOR), "--reward_verifier", *EVALUATION)
    return [*given, "--reward_func", str(out / "reward.py")]


@pytest.mark.long
def test_a_reward_is_asked_once_for_an_answer_that_two_processes_write(folder, tmp_path):
    more = rewarded_by_function(folder, tmp_path / "out")
    warm.world_outputs(more, 2)
    samples = sum(row["samples"] for row in rows(tmp_path / "out" / "run"))
    assert samples == 16 and len((tmp_path / "out" / "asked").read_text().splitlines()) == samples


@pytest.mark.long
def test_a_reward_that_fails_in_one_process_stops_those_that_write_with_it(folder, tmp_path):
    more = rewarded_by_function(folder, tmp_path / "out")
    (tmp_path / "out" / "broken").touch()
    codes = warm.run_world([*more, "--rollout_slots", "2"], 2, prepare=dict.fromkeys(range(2), score_at_once))
    assert codes[0] == 1 and codes[1] in (0, 1)
    assert (tmp_path / "out" / "run" / "checkpoints").exists(), "both were there to write it"


def score_at_once() -> None:
    """Rewards are asked as soon as an answer is there, while others are still being written."""
    from trimtab.train.rl import rollout_worker

    rollout_worker.SCORED_AT_ONCE = 1


def stop_while_writing(calls: int) -> None:
    """A signal that this process alone gets, in the middle of a rollout."""
    from trimtab.rollout.builtin.engine import BuiltinSession

    plain = BuiltinSession.step
    count = 0

    def step(self, steps=None):
        nonlocal count
        count += 1
        if count == calls:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, steps)

    BuiltinSession.step = step


@pytest.mark.long
@pytest.mark.parametrize("split", [TENSOR, CONTEXT])
def test_a_run_that_one_process_was_told_to_stop_goes_on_as_if_it_had_not_been(folder, tmp_path, split):
    given = {out: arguments(folder, tmp_path / out, "lora", split) for out in ("straight", "stopped")}
    assert warm.run_world(given["straight"], 2) == [0, 0]
    stopped = {1: partial(stop_while_writing, 5)}
    first, _ = warm.world_outputs(given["stopped"], 2, [128 + signal.SIGTERM, 0], prepare=stopped)
    assert "checkpoint saved in" in first
    assert warm.run_world([*given["stopped"], "--load_checkpoint"], 2) == [0, 0]
    assert_identical(*(result(tmp_path / out) for out in ("stopped", "straight")))
