"""A run of any job that was killed and resumed is the run that was not: weights, optimizer and metrics, bit for bit."""

import os
import signal
from functools import cache, partial

import pytest
from safetensors.torch import load_file

from tests import warm
from tests.train.job_run import assert_same_tensors, rows, weights, write_rows
from tests.train.jobs import JOBS, job_words, write_job
from trimtab.train.metrics import read_rows
from trimtab.train.supervised import SupervisedRun

STEPS = 6  # 12 samples, 4 a step, two epochs
EVERY = 2  # steps between checkpoints

PACKED = "--packing_samples --micro_train_batch_size 1"  # still more than one row a step
PACKED_BF16 = f"{PACKED} --bf16"
LORA = "--lora_rank 4 --lora_dropout 0.1"
VARIANTS = {
    "sft": ("sft", f"{LORA} {PACKED_BF16}"),
    "sft plain": ("sft", ""),
    "rm": ("rm margin", ""),
    "rm lora": ("rm", f"{LORA} {PACKED_BF16}"),
    "prm hard": ("prm hard", ""),
    "prm soft": ("prm soft", PACKED_BF16),
    "dpo": ("dpo", PACKED_BF16),
    "dpo lora": ("dpo", f"{LORA} --ref_pretrain None"),
    "dpo precomputed": ("dpo precomputed", PACKED),
    "orpo": ("orpo", ""),
    "kto": ("kto", ""),
    "kto lora": ("kto", f"{LORA} {PACKED_BF16} --ref_pretrain None"),
    "kd": ("kd", PACKED),
    "muon": ("sft", "--optimizer muon --l2 0.1"),
    "muon lora": ("rm", f"--optimizer muon {LORA} {PACKED_BF16}"),
}
SHORT = ("sft", "muon", "rm", "prm hard", "dpo", "kto", "kd")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with models, training and evaluation rows of a job, made once."""

    @cache
    def make(name):
        folder = tmp_path_factory.mktemp("task")
        write_job(folder, name, rows=12, attention_dropout=0.1)
        write_rows(folder / "test.jsonl", JOBS[name].make_rows(5, 2))
        return folder

    return make


def arguments(folder, out, variant, *more):
    name, words = VARIANTS[variant]
    fixed = (
        f"{JOBS[name].verb} --pretrain {folder}/model --dataset {folder}/train.jsonl "
        f"--eval_dataset {folder}/test.jsonl --eval_split train --max_len 40 --train_batch_size 4 "
        f"--micro_train_batch_size 2 --max_epochs 2 --save_steps {EVERY} --learning_rate 1e-2 --lr_warmup_ratio 0 "
        f"--save_path {out} --ckpt_path {out}/checkpoints"
    )
    if JOBS[name].verb in ("dpo", "kto"):
        fixed += " --keep_dropout"
    return [*fixed.split(), *job_words(folder, name, words).split(), *more]


def result(out):
    """Everything two equal runs must agree on."""
    found = rows(out)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    assert [row["step"] for row in found if "eval_loss" in row] == [STEPS // 2, STEPS]
    described = [p.read_text() for p in (out / "rewards.json", out / "config.json") if p.exists()]
    saved = load_file(out / "checkpoints" / f"global_step{STEPS}" / "tensors.safetensors")
    return found, described, weights(out), saved


def assert_identical(first, second):
    assert first[:2] == second[:2]
    for mine, theirs in zip(first[2:], second[2:]):
        assert_same_tensors(mine, theirs)


@pytest.fixture(scope="module")
def straight(prepared, tmp_path_factory):
    """The uninterrupted run of each variant, made once."""

    @cache
    def make(variant):
        out = tmp_path_factory.mktemp("straight")
        assert warm.run(arguments(prepared(VARIANTS[variant][0]), out, variant)) == 0
        return result(out)

    return make


# Where the run dies, of its own hand and without a word: (step, micro-batches into it, or "write": in a checkpoint).
USUAL = (3, 1)  # in the middle of step 4, after the checkpoint of step 2 and after the epoch's evaluation
LATER = [(1, 0), (2, 0), (3, 0), (4, 0), (5, 1), (1, "write"), (3, "write"), (5, "write")]


@pytest.mark.short(2)
@pytest.mark.parametrize("moment", [USUAL, *(pytest.param(m, marks=pytest.mark.long) for m in LATER)])
@pytest.mark.parametrize("variant", [v if v in SHORT else pytest.param(v, marks=pytest.mark.long) for v in VARIANTS])
def test_killed_and_resumed_equals_uninterrupted(prepared, straight, tmp_path, variant, moment):
    folder = prepared(VARIANTS[variant][0])
    assert warm.run(arguments(folder, tmp_path, variant), prepare=partial(die_at, *moment)) == -signal.SIGKILL
    done = len(read_rows(tmp_path / "metrics.jsonl"))
    assert done == moment[0] + (moment[1] == "write")
    printed = warm.output(arguments(folder, tmp_path, variant, "--load_checkpoint"))
    kept = moment[0] // EVERY * EVERY
    assert f"at step {kept}" in printed or not kept
    assert_identical(result(tmp_path), straight(variant))


def test_reference_log_probs_that_were_lost_are_made_again_the_same(prepared, straight, tmp_path, monkeypatch):
    variant = "dpo precomputed"
    folder = prepared(VARIANTS[variant][0])
    expected = straight(variant)
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    assert warm.run(arguments(folder, tmp_path, variant), prepare=partial(die_at, *USUAL)) == -signal.SIGKILL
    assert len(list((tmp_path / "cache" / "tokens").glob("reference-*"))) == 2  # training and evaluation
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "empty"))
    assert warm.run(arguments(folder, tmp_path, variant, "--load_checkpoint")) == 0
    assert_identical(result(tmp_path), expected)


def test_a_checkpoint_of_another_job_is_refused(prepared, tmp_path):
    folder = prepared("rm")
    assert warm.run(arguments(folder, tmp_path, "rm"), prepare=partial(die_at, *USUAL)) == -signal.SIGKILL
    printed = warm.output(arguments(folder, tmp_path, "orpo", "--load_checkpoint"), 2)
    assert "this checkpoint was written by another job" in printed


def die_at(step, where):
    """Die as by kill -9, `where` micro-batches into the step of this number, or in a checkpoint after it."""
    if where == "write":
        from trimtab.train import checkpoint

        flush = checkpoint.flush

        def stop_flushing(path):
            if f".writing-global_step{step + 1}" in path.parts:
                os.kill(os.getpid(), signal.SIGKILL)
            flush(path)

        checkpoint.flush = stop_flushing
        return
    plain = SupervisedRun.train_step

    def train_step(run, stop):
        if run.counters.step == step:
            learn, done = run.task.loss, 0

            def loss(model, batch, totals):
                nonlocal done
                if done == where:
                    os.kill(os.getpid(), signal.SIGKILL)
                done += 1
                return learn(model, batch, totals)

            run.task.loss = loss
        return plain(run, stop)

    SupervisedRun.train_step = train_step
