"""A run that was stopped in any way and resumed is the run that was not: weights, optimizer and metrics, bit for bit.

Kills of every job: test_jobs_resume.py; at random moments: test_chaos.py."""

import os
import resource
import signal
import time
from functools import partial

import pytest
from safetensors.torch import load_file

from tests import warm
from tests.train.every_loop import STEPS, signal_in_step, words
from tests.train.job_run import assert_same_model, assert_same_tensors, rows
from trimtab.train import checkpoint
from trimtab.train.supervised import SupervisedRun


@pytest.fixture
def assert_undisturbed(finished):
    def check(out):
        assert [row["step"] for row in rows(out)] == list(range(1, STEPS + 1))
        assert rows(out) == rows(finished("sft"))
        assert_same_model(out, finished("sft"))
        last = f"checkpoints/global_step{STEPS}/tensors.safetensors"
        assert_same_tensors(load_file(out / last), load_file(finished("sft") / last))

    return check


def resume(tasks, out) -> str:
    return warm.output(words(tasks, "sft", out, "--load_checkpoint"))


def test_killed_inside_a_checkpoint_write_resumes_from_the_one_before(tasks, assert_undisturbed, tmp_path):
    process = warm.start(words(tasks, "sft", tmp_path), prepare=hang_in_second_write)
    warm.wait_until(lambda: any((tmp_path / "checkpoints").glob(".writing-global_step6*/tensors.safetensors")), process)
    warm.kill(process)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "global_step3"
    assert "at step 3" in resume(tasks, tmp_path)
    assert_undisturbed(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_saves_leaves_cleanly_and_resumes(tasks, assert_undisturbed, tmp_path, number):
    asked = partial(signal_in_step, "sft", 4, number)
    printed = warm.output(words(tasks, "sft", tmp_path), 128 + number, prepare=asked)
    assert "add --load_checkpoint to go on" in printed and "Traceback" not in printed
    resume(tasks, tmp_path)
    assert_undisturbed(tmp_path)


def test_a_signal_during_the_last_save_waits_for_it(tasks, assert_undisturbed, tmp_path):
    process = warm.start(words(tasks, "sft", tmp_path), prepare=slow_last_save)
    warm.wait_until((tmp_path / "saving").exists, process)
    os.kill(process.pid, signal.SIGTERM)
    process.join()
    assert process.exitcode == 0
    assert_undisturbed(tmp_path)


def test_another_lora_alpha_is_refused_and_another_rate_is_mentioned(tasks, tmp_path):
    first = words(tasks, "sft", tmp_path, "--lora_rank 4 --bf16")
    assert warm.run([*first, "--max_steps", "3"]) == 0
    assert "--lora_alpha was 16" in warm.output([*first, "--load_checkpoint", "--lora_alpha", "64"], 2)
    printed = warm.output([*first, "--load_checkpoint", "--learning_rate", "1e-4"])
    assert "resumed with another --learning_rate (0.01 -> 0.0001)" in printed


def test_a_full_disk_is_told_in_one_line_and_leaves_the_previous_checkpoint(tasks, assert_undisturbed, tmp_path):
    killed = partial(signal_in_step, "sft", 4, signal.SIGKILL)
    assert warm.run(words(tasks, "sft", tmp_path), prepare=killed) == -signal.SIGKILL
    limited = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
    printed = warm.output(words(tasks, "sft", tmp_path, "--load_checkpoint"), 2, prepare=limited)
    assert "error: --ckpt_path" in printed and "global_step3) is intact" in printed
    assert not list((tmp_path / "checkpoints").glob(".writing*"))
    resume(tasks, tmp_path)
    assert_undisturbed(tmp_path)


def slow_last_save():
    plain = SupervisedRun.save_model

    def slow(self, folder):
        (self.folder / "saving").touch()
        time.sleep(1.0)
        plain(self, folder)

    SupervisedRun.save_model = slow


def hang_in_second_write():
    plain = checkpoint.flush

    def hang(path):
        if "global_step6" in str(path):
            time.sleep(60)
        plain(path)

    checkpoint.flush = hang
