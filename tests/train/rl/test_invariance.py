"""How an RL update is cut, packed or dealt out to processes changes nothing but rounding."""

import os
import signal
from functools import cache

import pytest
import torch

from tests import warm
from tests.train.rl.rl_run import ITERATIONS, arguments, rows

# So that rounding is not amplified into other samples; and dropout is each process's own.
QUIET = "--actor_learning_rate 1e-5 --critic_learning_rate 1e-5 --lora_dropout 0"


@pytest.fixture(scope="module")
def usual(folder, tmp_path_factory):
    @cache
    def make(estimator):
        out = tmp_path_factory.mktemp("usual")
        assert warm.run(arguments(folder, out, estimator, QUIET)) == 0
        return out

    return make


COMPARED = ["reward", "length", "loss", "grad_norm", "policy_kl", "tokens", "kl", "critic_loss", "critic_grad_norm"]
COMPARED += ["eval_pass_1", "entropy", "clip_fraction"]


def curves(out):
    found = [row for row in rows(out) if row["step"]]
    assert [row["step"] for row in found] == list(range(1, ITERATIONS + 1))
    return {name: torch.tensor([row[name] for row in found if name in row]) for name in COMPARED}


def assert_same(first, second):
    mine, theirs = curves(first), curves(second)
    for name in COMPARED:
        assert mine[name].tolist() == pytest.approx(theirs[name].tolist(), abs=1e-5, rel=1e-4), name


CUTS = ["--micro_train_batch_size 1", "--micro_train_batch_size 8 --micro_rollout_batch_size 1"]
CUTS += ["--use_dynamic_batch --train_max_tokens_per_gpu 70", "--use_dynamic_batch --rollout_max_tokens_per_gpu 70"]


@pytest.mark.short(1)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("estimator", ["ppo", "grpo"])
def test_cutting_and_packing_change_nothing(folder, usual, tmp_path, estimator, cut):
    assert warm.run(arguments(folder, tmp_path, estimator, QUIET, cut)) == 0
    assert_same(tmp_path, usual(estimator))


COVARIANCE = "--cov_ratio 0.1 --clip_cov_range 0.05 5 --init_kl_coef 0.1 --temperature 1.1"
LOSSES = [f"kl_cov {COVARIANCE} --entropy_target 9 --entropy_coef_step 0.01", "gmpo", "sapo", f"clip_cov {COVARIANCE}"]


@pytest.mark.short(1)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda words: words.split()[0])
def test_cutting_packing_and_processes_leave_the_newer_losses_as_they_are(folder, tmp_path, loss):
    """One micro-batch, two, four, packed ones, and two processes."""
    shared = f"{QUIET} --policy_loss_type {loss} --max_steps 2 --eval_steps -1"
    cuts = [f"--micro_train_batch_size {size}" for size in (8, 4, 2)] + [CUTS[2]]
    found = []
    for number, cut in enumerate(cuts):
        out = tmp_path / str(number)
        assert warm.run(arguments(folder, out, "grpo", shared, cut)) == 0
        found.append(rows(out)[1:])
    assert warm.run_world(arguments(folder, tmp_path / "two", "grpo", shared, "--zero_stage 2"), 2) == [0, 0]
    found.append(rows(tmp_path / "two")[1:])
    names = ["loss", "grad_norm", "policy_kl", "clip_fraction", "entropy_coefficient", "entropy"]
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            mine, theirs = ([row[name] for name in names if name in row] for row in (one, two))
            assert theirs == pytest.approx(mine, abs=1e-6, rel=1e-4)
    if "cov" in loss:
        assert found[0][0]["clip_fraction"] >= 0.09, "tokens are chosen"
    if "entropy" in loss:
        assert found[0][1]["entropy_coefficient"] > 0


@pytest.mark.short(1)
@pytest.mark.parametrize(
    "estimator, stage",
    [("ppo", 2), ("grpo", 3), *(pytest.param(e, s, marks=pytest.mark.long) for e in ("rloo", "lora") for s in (0, 3))],
)
def test_two_processes_learn_what_one_learns(folder, usual, tmp_path, estimator, stage):
    words = arguments(folder, tmp_path, estimator, QUIET, f"--zero_stage {stage}")
    assert warm.run_world(words, 2) == [0, 0]
    assert_same(tmp_path, usual(estimator))


def test_memory_and_slots_of_the_engine_change_nothing(folder, usual, tmp_path):
    tight = "--rollout_slots 3 --rollout_kv_tokens 100"
    assert warm.run(arguments(folder, tmp_path, "grpo", QUIET, tight)) == 0
    assert_same(tmp_path, usual("grpo"))


def test_a_dead_process_ends_the_run_with_its_own_words(folder, tmp_path):
    log = tmp_path / "log"
    processes = warm.start_world(arguments(folder, tmp_path, "grpo"), 2, log=log, prepare={1: fail_in_update})
    for process in processes:
        process.join(60)
    assert all(process.exitcode not in (0, None) for process in processes)
    assert "the second process has had enough" in (tmp_path / "log.0").read_text()


def fail_in_update():
    from trimtab.train.rl.trainer import PolicyTrainer

    def update(*_, **__):
        raise ValueError("the second process has had enough")

    PolicyTrainer.update = update


def test_a_signal_that_only_the_second_process_gets_stops_both_and_nothing_is_lost(folder, usual, tmp_path):
    words = arguments(folder, tmp_path, "grpo", QUIET)
    log = tmp_path / "log"
    stopped = 128 + signal.SIGTERM
    assert warm.run_world(words, 2, log=log, prepare={1: terminate_while_sampling})[0] == stopped
    assert "checkpoint saved in" in (tmp_path / "log.0").read_text()
    assert warm.run_world([*words, "--load_checkpoint"], 2) == [0, 0]
    assert_same(tmp_path, usual("grpo"))


def terminate_while_sampling():
    from trimtab.train.rl.rollout_worker import RolloutWorker

    sample, calls = RolloutWorker.sample, 0

    def interrupted(self, *given, **named):
        nonlocal calls
        calls += 1
        if calls == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return sample(self, *given, **named)

    RolloutWorker.sample = interrupted
