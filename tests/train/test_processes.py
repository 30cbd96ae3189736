"""Two processes learn what one learns, at every --zero_stage, and a run may change between them."""

import json
import os
import time

import pytest
import torch
from safetensors.torch import load_file

from tests import warm
from tests.tiny import tiny_model
from trimtab.embedded.sort_task import make_rows, make_tokenizer, prompt_of, reference_of
from trimtab.train.metrics import read_rows

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
    tokenizer = make_tokenizer()
    for name, family in (("model", "llama"), ("tied", "llama_tied"), ("moe", "mixtral")):
        tiny_model(family, vocab_size=len(tokenizer)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rows = make_rows(23, seed=1)
    pairs = [(prompt_of(row), reference_of(row)) for row in rows]
    write(folder / "sft.jsonl", rows)
    write(folder / "pairs.jsonl", [{"prompt": q, "chosen": a, "rejected": a[::-1] + a[:1]} for q, a in pairs])
    write(folder / "unpaired.jsonl", [{"prompt": q, "completion": a, "label": a[0] < "3"} for q, a in pairs])
    return folder


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def arguments(folder, out, job, *more, model="model"):
    fixed = (
        f"{job} --pretrain {folder}/{model} {JOBS[job].format(folder)} --train_batch_size 8 --micro_train_batch_size 2 "
        f"--max_epochs 2 --max_len 40 --learning_rate 3e-3 --lr_warmup_ratio 0 --eval_split train --save_steps 2 "
        f"--save_path {out} --ckpt_path {out}/ck"
    )
    return [*fixed.split(), *" ".join(more).split()]


def curve(out):
    rows = read_rows(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return torch.tensor([[row["loss"], row["grad_norm"], row["trained_tokens"]] for row in rows])


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    """The one-process run of each setting, made once."""
    results = {}

    def make(job, *more, model="model"):
        key = (job, more, model)
        if key not in results:
            out = tmp_path_factory.mktemp("alone")
            assert warm.run(arguments(folder, out, job, *more, model=model)) == 0
            results[key] = out
        return results[key]

    return make


def same_curve(first, second):
    torch.testing.assert_close(curve(first), curve(second), atol=1e-4, rtol=1e-4)


def same_model(first, second):
    weights, expected = (load_file(out / "model.safetensors") for out in (first, second))
    assert weights.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], atol=1e-3, rtol=1e-3)


QUICK = [("sft", 0), ("sft", 3), ("rm", 2), ("dpo", 3), ("kto", 2), ("kd", 3)]
ALL = [(job, stage) for job in JOBS for stage in (0, 1, 2, 3)]


@pytest.mark.short(3)
@pytest.mark.parametrize(
    ("job", "stage"), [pytest.param(*s, marks=[] if s in QUICK else [pytest.mark.long]) for s in ALL]
)
def test_two_processes_follow_the_curve_of_one(folder, alone, tmp_path, job, stage):
    assert warm.run_world(arguments(folder, tmp_path, job, f"--zero_stage {stage}"), 2) == [0, 0]
    same_curve(tmp_path, alone(job))
    same_model(tmp_path, alone(job))


@pytest.mark.short(3)
@pytest.mark.short(2)
@pytest.mark.parametrize(
    ("more", "model"),
    [
        ("--packing_samples", "model"),
        ("--lora_rank 4", "model"),
        ("--gradient_checkpointing", "tied"),
        ("--adam_offload", "model"),
        pytest.param("--aux_loss_coef 0", "moe", marks=pytest.mark.long),
    ],
)
def test_options_mean_the_same_in_two_processes(folder, alone, tmp_path, more, model):
    assert warm.run_world(arguments(folder, tmp_path, "sft", "--zero_stage 3", more, model=model), 2) == [0, 0]
    same_curve(tmp_path, alone("sft", more, model=model))


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
    torch.testing.assert_close(curve(tmp_path), curve(alone("sft", "--bf16")), atol=2e-2, rtol=2e-2)
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.short(1)
@pytest.mark.parametrize(("first", "second"), [((2, 3), (1, 2)), ((1, 2), (2, 3)), ((2, 0), (2, 3))])
def test_a_run_goes_on_with_other_processes_and_another_stage(folder, alone, tmp_path, first, second):
    (size, stage), (then_size, then_stage) = first, second
    processes = warm.start_world(
        arguments(folder, tmp_path, "sft", f"--zero_stage {stage}"), size, prepare=dict.fromkeys(range(size), slow)
    )
    warm.wait_until(lambda: len(read_rows(tmp_path / "metrics.jsonl")) >= 3, processes[0])
    for process in processes:
        process.kill()
        process.join()
    assert len(read_rows(tmp_path / "metrics.jsonl")) < STEPS
    again = arguments(folder, tmp_path, "sft", f"--zero_stage {then_stage} --load_checkpoint")
    assert set(warm.run_world(again, then_size)) == {0}
    same_curve(tmp_path, alone("sft"))


def test_a_process_that_dies_takes_the_other_with_it_and_the_run_resumes(folder, alone, tmp_path):
    log = tmp_path / "log"
    began = time.monotonic()
    codes = warm.run_world(arguments(folder, tmp_path, "sft"), 2, log=log, prepare={1: die_in_step_four})
    assert time.monotonic() - began < 60 and all(codes)
    assert "the worker's own words" in (tmp_path / "log.1").read_text()
    assert warm.run_world(arguments(folder, tmp_path, "sft", "--load_checkpoint"), 2) == [0, 0]
    same_curve(tmp_path, alone("sft"))


def slow():
    from trimtab.train.supervised import SupervisedRun

    plain = SupervisedRun.train_step
    SupervisedRun.train_step = lambda self, *args: (time.sleep(0.2), plain(self, *args))[1]


def die_in_step_four():
    from trimtab.train.supervised import SupervisedRun

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
