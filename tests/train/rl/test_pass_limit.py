"""RL where memory is short: smaller passes and the same numbers, or one line and a checkpoint to go on from."""

from functools import partial

import pytest
import torch

from tests import warm
from tests.train.rl.rl_run import EVALUATION, arguments, assert_identical, result, rows, without, write_task
from tests.train.test_micro_batch_limit import short_of_room, with_room_for
from trimtab.cli.main import main
from trimtab.distributed.process_group import Peers
from trimtab.rollout.builtin.kv_cache import KVCacheManager

ROOM = 45  # tokens: two answers with their prompts, not four
NUMBERS = ("reward", "length", "policy_loss", "grad_norm", "critic_loss", "kl", "eval_reward")


@pytest.fixture
def task(tmp_path):
    return write_task(tmp_path)


def of(task, name: str, estimator: str, *more: str) -> list[str]:
    words = without(arguments(task, task / name, estimator), "--micro_train_batch_size")
    return [*words, "--micro_train_batch_size", "8", "--micro_rollout_batch_size", "8", *" ".join(more).split()]


def assert_same_numbers(whole: list[dict], cut: list[dict]) -> None:
    for before, after in zip(whole, cut, strict=True):
        assert before["step"] == after["step"]
        for name in before.keys() & set(NUMBERS):
            assert after[name] == pytest.approx(before[name], rel=1e-3, abs=1e-5), (name, before["step"])


@pytest.mark.short(1)
@pytest.mark.parametrize("estimator", ["grpo", "ppo"])
@pytest.mark.parametrize("budget", ["", "--use_dynamic_batch --train_max_tokens_per_gpu 200"])
def test_smaller_passes_change_nothing_but_rounding(task, monkeypatch, capsys, estimator, budget):
    assert main(of(task, "whole", estimator, budget)) == 0
    with_room_for(ROOM, monkeypatch)
    assert main(of(task, "cut", estimator, budget)) == 0
    assert "out of memory: begun anew in passes of at most" in capsys.readouterr().out
    whole, cut = rows(task / "whole"), rows(task / "cut")
    assert any(name.startswith("pass_") for name in cut[-1]) and not any(name.startswith("pass_") for name in whole[-1])
    assert_same_numbers(whole, cut)


@pytest.mark.long
def test_a_resumed_run_cuts_as_the_run_before_it(task, monkeypatch):
    with_room_for(ROOM, monkeypatch)
    assert main(of(task, "whole", "grpo")) == 0
    stopped = of(task, "stopped", "grpo")
    from trimtab.train.rl.loop import RLRun

    finish = RLRun.finish

    def dying(self, *args):
        if self.counters.iteration == 2:
            raise KeyboardInterrupt
        return finish(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(RLRun, "finish", dying)
        assert main(stopped) == 130
    monkeypatch.undo()  # gone on where there is room for everything
    assert main([*stopped, "--load_checkpoint"]) == 0
    assert_identical(result(task / "whole"), result(task / "stopped"))


def test_an_answer_that_does_not_fit_alone_ends_the_run_with_a_checkpoint(task, monkeypatch, capsys):
    with_room_for(16, monkeypatch)
    words = without(of(task, "out", "grpo", "--max_steps 2"), *EVALUATION)
    assert main(words) == 1
    said = capsys.readouterr().err
    assert "does not fit into memory" in said and "--generate_max_len" in said and "checkpoint saved in" in said
    assert "Traceback" not in said
    monkeypatch.undo()
    assert main([*words, "--load_checkpoint"]) == 0


def test_a_step_is_taken_back_even_if_memory_is_short_in_its_last_sum(task, monkeypatch, capsys):
    add_up, calls = Peers.add_up, []

    def short(self, values):
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("tried to allocate figures")
        return add_up(self, values)

    monkeypatch.setattr(Peers, "add_up", short)
    assert main(of(task, "out", "grpo", "--max_steps 1 --skip_checks all")) == 0
    assert "out of memory: begun anew in passes of at most" in capsys.readouterr().out


def test_a_rollout_without_room_ends_the_run_with_a_checkpoint_to_go_on_from(task, monkeypatch, capsys):
    assert main(of(task, "whole", "grpo")) == 0
    cache, calls = KVCacheManager.cache, []

    def short(self, *args):
        calls.append(1)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("tried to allocate keys and values")
        return cache(self, *args)

    monkeypatch.setattr(KVCacheManager, "cache", short)
    assert main(of(task, "out", "grpo")) == 1
    said = capsys.readouterr().err
    assert "the rollout does not fit into memory" in said and "--rollout_slots" in said and "checkpoint saved" in said
    assert main([*of(task, "out", "grpo"), "--load_checkpoint"]) == 0
    assert_identical(result(task / "whole"), result(task / "out"))


@pytest.mark.long
@pytest.mark.parametrize("estimator", ["grpo", "ppo"])
def test_one_process_without_room_and_all_begin_anew_where_they_were(task, estimator):
    warm.world_outputs(of(task, "whole", estimator), 2)
    printed = warm.world_outputs(of(task, "cut", estimator), 2, prepare={1: partial(short_of_room, ROOM)})
    assert "begun anew in passes of at most" in "".join(printed)
    whole, cut = rows(task / "whole"), rows(task / "cut")
    assert "pass_samples" in cut[-1]
    assert_same_numbers(whole, cut)


@pytest.mark.short(1)
@pytest.mark.parametrize("rank", [1, 0])
def test_a_rollout_without_room_in_one_of_two_processes_ends_both_with_a_checkpoint(task, rank):
    words = of(task, "out", "grpo", "--save_hf_ckpt")
    said = "".join(warm.world_outputs(words, 2, [1, 0], prepare={rank: short_of_cache}))
    assert "Traceback" not in said, said[-3000:]
    assert "the rollout does not fit into memory (tried to allocate" in said and "checkpoint saved in" in said


def short_of_cache() -> None:
    def short(*_):
        raise torch.OutOfMemoryError("tried to allocate keys and values")

    KVCacheManager.cache = short
