"""Processes that share every row learn what one learns."""

import pytest

from tests import warm
from tests.train.test_processes import alone, arguments, folder, same_curve, same_model  # noqa: F401

SHARED = "--ring_attn_size 2 --ring_head_stride 2"


def run_shared(folder, out, job, more="", *, model="model", processes=2):  # noqa: F811
    words = arguments(folder, out, job, SHARED, more, model=model)
    assert warm.run_world(words, processes) == [0] * processes


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("job", "stage"), [("sft", 2), ("dpo", 2), ("rm", 3), ("kd", 3), ("kd", 2), ("kto", 2), ("dpo", 3), ("sft", 0)]
)
def test_every_job_follows_the_curve_of_one_process(folder, alone, tmp_path, job, stage):  # noqa: F811
    run_shared(folder, tmp_path, job, f"--zero_stage {stage}")
    same_curve(tmp_path, alone(job))
    same_model(tmp_path, alone(job))


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "model"),
    [
        ("--packing_samples", "model"),
        ("--lora_rank 4", "model"),
        ("--gradient_checkpointing", "tied"),
        ("--aux_loss_coef 0.1 --micro_train_batch_size 8", "moe"),
    ],
)
def test_options_mean_the_same(folder, alone, tmp_path, more, model):  # noqa: F811
    run_shared(folder, tmp_path, "sft", more, model=model)
    same_curve(tmp_path, alone("sft", more, model=model))


@pytest.mark.long
def test_rows_are_shared_beside_processes_that_have_rows_of_their_own(folder, alone, tmp_path):  # noqa: F811
    run_shared(folder, tmp_path, "dpo", "--zero_stage 3", processes=4)
    same_curve(tmp_path, alone("dpo"))
