"""Runs on the stand-in: they give the CPU's numbers, and the work is done on the device."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import standin, warm
from tests.standin import at_work
from tests.train.job_run import write_model, write_rows
from tests.train.rl import rl_run
from trimtab.embedded.sort_task import make_rows
from trimtab.train.metrics import CLOCK_FIELDS, read_rows

pytestmark = pytest.mark.skipif(standin.why_not() is not None, reason=str(standin.why_not()))
STEPS = 4
PACKED = "--micro_train_batch_size 2 --packing_samples"


@pytest.fixture(scope="module", autouse=True)
def built():
    """Once, and not in the first process that needs it."""
    if standin.why_not() is None:
        standin.library()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    write_model(folder / "model")
    write_rows(folder / "train.jsonl", make_rows(16, seed=1))
    return folder


@pytest.fixture(scope="module")
def on_cpu(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("cpu")
    assert warm.run(sft(folder, out, PACKED)) == 0
    return out


def sft(folder: Path, out: Path, more: str) -> list[str]:
    return (
        f"sft --pretrain {folder}/model --dataset {folder}/train.jsonl --train_batch_size 4 --max_epochs 1 "
        f"--max_len 40 --learning_rate 1e-2 --lr_warmup_ratio 0 --save_steps 2 --save_path {out} "
        f"--ckpt_path {out}/checkpoints {more}"
    ).split()


def rl(folder: Path, out: Path, estimator: str, more: str) -> list[str]:
    words = rl_run.arguments(folder, out, estimator, f"--num_episodes 1 --max_epochs 1 {more}")
    return rl_run.without(words, "--eval_dataset", "--eval_split", "--eval_steps", "--eval_n_samples_per_prompt")


def figures(out: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in CLOCK_FIELDS} for row in read_rows(out / "metrics.jsonl")]


def assert_same_losses(out: Path, other: Path) -> None:
    mine, theirs = (read_rows(one / "metrics.jsonl") for one in (out, other))
    assert len(mine) == len(theirs) == STEPS
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in mine] == pytest.approx([row[name] for row in theirs], rel=1e-4)


def test_packed_training_gives_the_cpus_numbers_and_is_done_on_the_device(folder, on_cpu, tmp_path):
    (device,) = at_work.run(tmp_path, sft(folder, tmp_path, PACKED))
    assert_same_losses(tmp_path, on_cpu)
    mine, theirs = (load_file(out / "model.safetensors") for out in (tmp_path, on_cpu))
    for name, tensor in theirs.items():
        assert torch.allclose(mine[name], tensor, atol=1e-4), name
    # Two layers forward, again and back for every pass, and the optimiser.
    assert device["kernels"] > 500 * STEPS
    # The device's own memory is counted, not the process's.
    assert 0 < read_rows(tmp_path / "metrics.jsonl")[-1]["memory_gib"] < 0.01
    about = json.loads((tmp_path / "manifest.json").read_text())
    assert "npu" in json.dumps(about) and "Stand-in" in json.dumps(about)


def test_a_run_resumed_from_its_checkpoint_is_the_run_that_was_not_stopped(folder, tmp_path):
    """With dropout, which draws from the device's own generator: its state is in the checkpoint."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    more = f"{PACKED} --lora_rank 4 --lora_dropout 0.3 --bf16"
    at_work.run(tmp_path, sft(folder, whole, more))
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / f"global_step{STEPS}")
    (resumed / "checkpoints" / "latest").write_text("global_step2")
    for left in resumed.glob("*.safetensors"):
        left.unlink()
    at_work.run(tmp_path, sft(folder, resumed, f"{more} --load_checkpoint"))
    assert figures(resumed) == figures(whole)
    mine, theirs = (load_file(next(out.glob("*.safetensors"))) for out in (resumed, whole))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_answers_are_drawn_and_learnt_from_as_on_the_cpu(tmp_path):
    rl_run.write_task(tmp_path)
    outs = tmp_path / "cpu", tmp_path / "standin"
    commands = [rl(tmp_path, out, "grpo", "--max_samples 8") for out in outs]
    assert warm.run(commands[0]) == 0
    (device,) = at_work.run(tmp_path, commands[1])
    assert device["kernels"] > 5_000
    theirs, mine = (read_rows(out / "rollouts.jsonl") for out in outs)
    assert mine[0] == theirs[0]  # written before the first update
    theirs, mine = ([row for row in rl_run.rows(out) if "reward" in row] for out in outs)
    assert len(mine) == len(theirs) == 2
    for name in ("reward", "policy_loss", "kl"):
        assert [row[name] for row in mine] == pytest.approx([row[name] for row in theirs], rel=1e-3, abs=1e-5), name


def test_two_processes_with_a_device_each_split_a_model_and_give_the_same_numbers(folder, on_cpu, tmp_path):
    devices = at_work.run(tmp_path, sft(folder, tmp_path, f"{PACKED} --zero_stage 3"), size=2)
    assert_same_losses(tmp_path, on_cpu)
    assert all(device["collectives"] > 20 and device["kernels"] > 500 for device in devices)


def test_rl_in_two_processes_with_a_device_each(tmp_path):
    """Its processes speak over a group of gloo alone, too."""
    rl_run.write_task(tmp_path)
    command = rl(tmp_path, tmp_path / "out", "ppo", "--max_samples 4 --zero_stage 3")
    devices = at_work.run(tmp_path, command, size=2)
    assert all(device["kernels"] > 3000 and device["collectives"] > 20 for device in devices)
    assert [row["step"] for row in read_rows(tmp_path / "out" / "metrics.jsonl")] == [1]
