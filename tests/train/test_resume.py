"""A run that was killed and resumed is the run that was not: weights, optimizer and metrics, bit for bit."""

import json
import os
import random
import resource
import signal
import time
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from tests import warm
from tests.tiny import tiny_model
from trimtab.embedded.sort_task import make_rows, make_tokenizer
from trimtab.train.metrics import CLOCK_FIELDS, read_rows

STEPS = 12  # 24 samples, 4 a step, two epochs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    tokenizer = make_tokenizer()
    tiny_model("llama", vocab_size=len(tokenizer), attention_dropout=0.1).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_rows(24, seed=1)))
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_rows(5, seed=2)))
    return folder


VARIANTS = {
    "plain": "--micro_train_batch_size 4",
    "accumulated": "--micro_train_batch_size 1",
    "packed_lora_bf16": "--micro_train_batch_size 2 --packing_samples --lora_rank 4 --lora_dropout 0.1 --bf16",
}


def arguments(folder, out, variant, *more):
    fixed = (
        f"sft --pretrain {folder}/model --dataset {folder}/train.jsonl --eval_dataset {folder}/test.jsonl "
        f"--train_batch_size 4 --max_epochs 2 --max_len 40 --save_steps 3 --learning_rate 1e-2 --lr_warmup_ratio 0 "
        f"--save_path {out} --ckpt_path {out}/checkpoints {VARIANTS[variant]}"
    )
    return [*fixed.split(), *more]


def result(out):
    """Everything two equal runs must agree on."""
    rows = [{k: v for k, v in row.items() if k not in CLOCK_FIELDS} for row in read_rows(out / "metrics.jsonl")]
    weights = next(out.glob("*model.safetensors"))
    return rows, load_file(weights), load_file(out / "checkpoints" / f"global_step{STEPS}" / "tensors.safetensors")


def assert_identical(first, second):
    assert [row["step"] for row in first[0]] == list(range(1, STEPS + 1))
    assert first[0] == second[0]
    for mine, theirs in zip(first[1:], second[1:]):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert torch.equal(mine[name], theirs[name]), name


@pytest.fixture(scope="module")
def straight(folder, tmp_path_factory):
    """The uninterrupted run of each variant, made once."""
    results = {}

    def make(variant):
        if variant not in results:
            out = tmp_path_factory.mktemp(f"straight-{variant}")
            assert warm.run(arguments(folder, out, variant)) == 0
            results[variant] = result(out)
        return results[variant]

    return make


def steps_done(out):
    return len(read_rows(out / "metrics.jsonl"))


@pytest.mark.short(1)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("after", [4, 7])  # within an epoch, and after its boundary at step 6
def test_killed_and_resumed_equals_uninterrupted(folder, straight, tmp_path, variant, after):
    process = warm.start(arguments(folder, tmp_path, variant), prepare=slow_steps)
    warm.wait_until(lambda: steps_done(tmp_path) >= after, process)
    process.kill()
    process.join()
    assert steps_done(tmp_path) < STEPS
    assert warm.run(arguments(folder, tmp_path, variant, "--load_checkpoint")) == 0
    assert_identical(result(tmp_path), straight(variant))


def test_killed_inside_a_checkpoint_write_resumes_from_the_one_before(folder, straight, tmp_path):
    process = warm.start(arguments(folder, tmp_path, "plain"), prepare=hang_in_second_write)
    warm.wait_until(lambda: any((tmp_path / "checkpoints").glob(".writing-global_step6*/tensors.safetensors")), process)
    process.kill()
    process.join()
    assert (tmp_path / "checkpoints" / "latest").read_text() == "global_step3"
    log = tmp_path / "log"
    assert warm.run(arguments(folder, tmp_path, "plain", "--load_checkpoint"), log=log) == 0
    assert "at step 3" in log.read_text()
    assert_identical(result(tmp_path), straight("plain"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_saves_leaves_cleanly_and_resumes(folder, straight, tmp_path, number):
    log = tmp_path / "log"
    process = warm.start(arguments(folder, tmp_path, "accumulated"), prepare=slow_steps, log=log)
    warm.wait_until(lambda: steps_done(tmp_path) >= 4, process)
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == 128 + number
    assert "add --load_checkpoint to go on" in log.read_text() and "Traceback" not in log.read_text()
    assert warm.run(arguments(folder, tmp_path, "accumulated", "--load_checkpoint")) == 0
    assert_identical(result(tmp_path), straight("accumulated"))


def test_a_signal_during_the_last_save_waits_for_it(folder, straight, tmp_path):
    process = warm.start(arguments(folder, tmp_path, "plain"), prepare=slow_last_save)
    warm.wait_until(lambda: (tmp_path / "saving").exists(), process)
    os.kill(process.pid, signal.SIGTERM)
    process.join()
    assert process.exitcode == 0
    assert_identical(result(tmp_path), straight("plain"))


def test_another_lora_alpha_is_refused_and_another_rate_is_mentioned(folder, tmp_path):
    first = arguments(folder, tmp_path, "packed_lora_bf16")
    assert warm.run(first) == 0
    log = tmp_path / "log"
    assert warm.run([*first, "--load_checkpoint", "--lora_alpha", "64"], log=log) == 2
    assert "--lora_alpha was 16" in log.read_text()
    assert warm.run([*first, "--load_checkpoint", "--learning_rate", "1e-4"], log=log) == 0
    assert "resumed with another --learning_rate (0.01 -> 0.0001)" in log.read_text()


def test_a_full_disk_is_told_in_one_line_and_leaves_the_previous_checkpoint(folder, straight, tmp_path):
    process = warm.start(arguments(folder, tmp_path, "plain"), prepare=slow_steps)
    warm.wait_until(lambda: steps_done(tmp_path) >= 4, process)
    process.kill()
    process.join()
    log = tmp_path / "log"
    limited = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
    code = warm.run(arguments(folder, tmp_path, "plain", "--load_checkpoint"), prepare=limited, log=log)
    assert code == 2
    assert "error: --ckpt_path" in log.read_text() and "global_step3) is intact" in log.read_text()
    assert not list((tmp_path / "checkpoints").glob(".writing*"))
    assert warm.run(arguments(folder, tmp_path, "plain", "--load_checkpoint")) == 0
    assert_identical(result(tmp_path), straight("plain"))


@pytest.mark.long
@pytest.mark.parametrize("moment", range(20))
def test_killed_at_random_moments_equals_uninterrupted(folder, straight, tmp_path, moment):
    expected = straight("packed_lora_bf16")
    chance = random.Random(moment)
    resumed = []
    for _ in range(3):
        process = warm.start(arguments(folder, tmp_path, "packed_lora_bf16", *resumed), prepare=slow_steps)
        time.sleep(chance.uniform(0.5, 4.0))
        process.kill()
        process.join()
        resumed = ["--load_checkpoint"]
    assert warm.run(arguments(folder, tmp_path, "packed_lora_bf16", "--load_checkpoint")) == 0
    assert_identical(result(tmp_path), expected)


def slow_last_save():
    from trimtab.train.supervised import SupervisedRun

    plain = SupervisedRun.save_model

    def slow(self, folder):
        (self.folder / "saving").touch()
        time.sleep(1.0)
        plain(self, folder)

    SupervisedRun.save_model = slow


def slow_steps():
    """So that a signal finds the run in the middle."""
    from trimtab.train.supervised import SupervisedRun

    plain = SupervisedRun.train_step

    def slow(self, *args):
        time.sleep(0.1)
        return plain(self, *args)

    SupervisedRun.train_step = slow


def hang_in_second_write():
    from trimtab.train import checkpoint

    plain = checkpoint.flush

    def hang(path):
        if "global_step6" in str(path):
            time.sleep(60)
        plain(path)

    checkpoint.flush = hang
