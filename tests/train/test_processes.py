"""Processes learn what one learns, at every --zero_stage, and whether they share samples, layers or rows; a run may
change between them."""

import os
import signal
import time
from functools import cache, partial

import pytest
import torch

from tests import warm
from tests.train.every_loop import signal_in_step
from tests.train.job_run import rows, weights, write_model, write_rows
from trimtab.embedded.sort_task import make_rows, prompt_of, reference_of
from trimtab.train.supervised import SupervisedRun

JOBS = {
    "sft": "--dataset {0}/sft.jsonl --eval_dataset {0}/sft.jsonl",
    "rm": "--dataset {0}/pairs.jsonl --eval_dataset {0}/pairs.jsonl",
    "dpo": "--dataset {0}/pairs.jsonl --beta 0.5",
    "kto": "--dataset {0}/unpaired.jsonl --beta 0.5",
    "kd": "--dataset {0}/sft.jsonl --teacher_model {0}/tied",
}
STEPS = 6  # 23 samples, 8 a step, two epochs: the last step of an epoch has 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    for name, family in (("model", "llama"), ("tied", "llama_tied"), ("moe", "mixtral")):
        write_model(folder / name, family)
    write_model(folder / "three", "mixtral", num_local_experts=3)
    rows = make_rows(23, seed=1)
    pairs = [(prompt_of(row), reference_of(row)) for row in rows]
    write_rows(folder / "sft.jsonl", rows)
    write_rows(folder / "pairs.jsonl", [{"prompt": q, "chosen": a, "rejected": a[::-1] + a[:1]} for q, a in pairs])
    write_rows(folder / "unpaired.jsonl", [{"prompt": q, "completion": a, "label": a[0] < "3"} for q, a in pairs])
    return folder


def arguments(folder, out, job, *more, model="model"):
    fixed = (
        f"{job} --pretrain {folder}/{model} {JOBS[job].format(folder)} --train_batch_size 8 --micro_train_batch_size 2 "
        f"--max_epochs 2 --max_len 40 --learning_rate 3e-3 --lr_warmup_ratio 0 --eval_split train --save_steps 2 "
        f"--save_path {out} --ckpt_path {out}/ck"
    )
    return [*fixed.split(), *" ".join(more).split()]


def curve(out):
    found = rows(out)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    return torch.tensor([[row["loss"], row["grad_norm"], row["trained_tokens"]] for row in found])


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    """The one-process run of each setting, made once."""

    @cache
    def make(job, *more, model="model"):
        out = tmp_path_factory.mktemp("alone")
        assert warm.run(arguments(folder, out, job, *more, model=model)) == 0
        return out

    return make


def same_curve(first, second, precision=1e-4):
    torch.testing.assert_close(curve(first), curve(second), atol=precision, rtol=precision)


TENSOR, CONTEXT = "--ds_tensor_parallel_size 2", "--ring_attn_size 2 --ring_head_stride 2"
FIRST = [("sft", 3, ""), ("dpo", 3, TENSOR), ("sft", 2, CONTEXT), ("rm", 2, ""), ("kd", 3, "")]
ALL = [(job, stage, "") for job in JOBS for stage in (0, 1, 2, 3)]
ALL += [(job, stage, TENSOR) for job, stage in (("sft", 2), ("rm", 3), ("kd", 3), ("kto", 2), ("sft", 0), ("kd", 0))]
ALL += [("dpo", 2, CONTEXT), ("rm", 3, CONTEXT), *((job, stage, CONTEXT) for job in ("kd", "dpo") for stage in (2, 3))]
ALL += [("kto", 2, CONTEXT), ("sft", 0, CONTEXT)]


@pytest.mark.short(3)
@pytest.mark.parametrize(("job", "stage", "split"), [*dict.fromkeys(FIRST + ALL)])
def test_two_processes_follow_the_curve_of_one(folder, alone, tmp_path, job, stage, split):
    assert warm.run_world(arguments(folder, tmp_path, job, f"--zero_stage {stage}", split), 2) == [0, 0]
    same_curve(tmp_path, alone(job))
    torch.testing.assert_close(weights(tmp_path), weights(alone(job)), atol=1e-3, rtol=1e-3)


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("split", "more", "model"),
    [
        ("--zero_stage 3", "--lora_rank 4", "model"),
        ("--zero_stage 3", "--gradient_checkpointing", "tied"),
        ("--zero_stage 3", "--packing_samples", "model"),
        ("--zero_stage 3", "--adam_offload", "model"),
        ("--zero_stage 3", "--aux_loss_coef 0", "moe"),
        ("--zero_stage 3", "--gradient_checkpointing", "three"),
        ("--zero_stage 2", "--adam_offload", "three"),
        (CONTEXT, "--packing_samples", "model"),
        (CONTEXT, "--lora_rank 4", "model"),
        (CONTEXT, "--gradient_checkpointing", "tied"),
        (CONTEXT, "--aux_loss_coef 0.1 --micro_train_batch_size 8", "moe"),
    ],
)
def test_options_mean_the_same_in_two_processes(folder, alone, tmp_path, split, more, model):
    assert warm.run_world(arguments(folder, tmp_path, "sft", split, more, model=model), 2) == [0, 0]
    same_curve(tmp_path, alone("sft", more, model=model))


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "model", "precision"),
    [
        ("--lora_rank 4 --bf16", "tied", 2e-2),  # a bf16 product of halves is rounded twice
        ("--packing_samples --gradient_checkpointing", "moe", 1e-3),
        ("--adam_offload --grad_accum_dtype fp32", "tied", 1e-3),
    ],
)
def test_options_mean_the_same_in_two_processes_a_layer_and_two_for_samples(
    folder, alone, tmp_path, more, model, precision
):
    words = arguments(folder, tmp_path, "sft", "--zero_stage 3", TENSOR, more, model=model)
    assert warm.run_world(words, 4) == [0] * 4
    same_curve(tmp_path, alone("sft", more, model=model), precision)


@pytest.mark.long
def test_rows_are_shared_beside_processes_that_have_rows_of_their_own(folder, alone, tmp_path):
    assert warm.run_world(arguments(folder, tmp_path, "dpo", CONTEXT, "--zero_stage 3"), 4) == [0] * 4
    same_curve(tmp_path, alone("dpo"))


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("job", "more"),
    [("dpo", "--lora_rank 4"), ("dpo", "--lora_rank 4 --precompute_ref_log_probs"), ("kto", "--lora_rank 4")],
)
def test_a_reference_that_is_the_policy_without_adapters_works_in_two_processes(folder, alone, tmp_path, job, more):
    assert warm.run_world(arguments(folder, tmp_path, job, "--zero_stage 2", more), 2) == [0, 0]
    same_curve(tmp_path, alone(job, "--lora_rank 4"))


def test_bf16_stays_close_and_is_saved_as_bf16(folder, alone, tmp_path):
    assert warm.run_world(arguments(folder, tmp_path, "sft", "--bf16"), 2) == [0, 0]
    same_curve(tmp_path, alone("sft", "--bf16"), 2e-2)
    assert {t.dtype for t in weights(tmp_path).values()} == {torch.bfloat16}


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("first", "second", "model"),
    [((2, 3), (1, 2), "model"), ((1, 2), (2, 3), "model"), ((2, 0), (2, 3), "model"), ((2, 3), (1, 2), "three")],
)
def test_a_run_goes_on_with_other_processes_and_another_stage(folder, alone, tmp_path, first, second, model):
    (size, stage), (then_size, then_stage) = first, second
    killed = dict.fromkeys(range(size), partial(signal_in_step, "sft", 3, signal.SIGKILL))
    command = arguments(folder, tmp_path, "sft", f"--zero_stage {stage}", model=model)
    assert set(warm.run_world(command, size, prepare=killed)) == {-signal.SIGKILL}
    again = arguments(folder, tmp_path, "sft", f"--zero_stage {then_stage} --load_checkpoint", model=model)
    assert set(warm.run_world(again, then_size)) == {0}
    same_curve(tmp_path, alone("sft", model=model))


def test_a_process_that_dies_takes_the_other_with_it_and_the_run_resumes(folder, alone, tmp_path):
    log, began = tmp_path / "log", time.monotonic()
    codes = warm.run_world(arguments(folder, tmp_path, "sft"), 2, log=log, prepare={1: die_in_step_four})
    assert time.monotonic() - began < 60 and all(codes)
    assert "the worker's own words" in (tmp_path / "log.1").read_text()
    assert warm.run_world(arguments(folder, tmp_path, "sft", "--load_checkpoint"), 2) == [0, 0]
    same_curve(tmp_path, alone("sft"))


def die_in_step_four():
    plain = SupervisedRun.train_step

    def step(self, *args):
        if self.counters.step == 3:
            raise ValueError(f"the worker's own words, rank {os.environ['RANK']}")
        return plain(self, *args)

    SupervisedRun.train_step = step


def split_all_sums():
    """No model is small enough to keep whole sums; a pass that is told to would fail."""
    from torch.distributed.fsdp import FSDPModule

    from trimtab.distributed import fsdp as sharding

    def always(module, sync, **settings):
        assert sync
        set_sync(module, sync, **settings)

    set_sync, FSDPModule.set_requires_gradient_sync = FSDPModule.set_requires_gradient_sync, always
    sharding.WHOLE_SUMS = 0


def test_sums_too_large_to_be_whole_in_every_process_are_split_after_every_pass(folder, alone, tmp_path):
    split = arguments(folder, tmp_path, "sft", "--zero_stage 3")
    assert warm.run_world(split, 2, prepare={0: split_all_sums, 1: split_all_sums}) == [0, 0]
    same_curve(tmp_path, alone("sft"))
