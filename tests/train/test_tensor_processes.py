"""Two processes that share every layer learn what one learns."""

import pytest
import torch

from tests import warm
from tests.train.test_processes import alone, arguments, curve, folder, same_curve, same_model  # noqa: F401


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("job", "stage"), [("dpo", 3), ("sft", 2), ("rm", 3), ("kd", 3), ("kto", 2), ("sft", 0), ("kd", 0)]
)
def test_every_job_follows_the_curve_of_one_process(folder, alone, tmp_path, job, stage):  # noqa: F811
    words = arguments(folder, tmp_path, job, f"--zero_stage {stage} --ds_tensor_parallel_size 2")
    assert warm.run_world(words, 2) == [0, 0]
    same_curve(tmp_path, alone(job))
    same_model(tmp_path, alone(job))


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "model"),
    [
        ("--lora_rank 4 --bf16", "tied"),
        ("--packing_samples --gradient_checkpointing", "moe"),
        ("--adam_offload --grad_accum_dtype fp32", "tied"),
    ],
)
def test_options_mean_the_same_where_layers_are_cut(folder, alone, tmp_path, more, model):  # noqa: F811
    """On four processes: two for every layer, and two for samples."""
    words = arguments(folder, tmp_path, "sft", "--zero_stage 3 --ds_tensor_parallel_size 2", more, model=model)
    assert warm.run_world(words, 4) == [0] * 4
    found, expected = curve(tmp_path), curve(alone("sft", more, model=model))
    precision = 2e-2 if "bf16" in more else 1e-3  # a bf16 product of halves is rounded twice
    torch.testing.assert_close(found, expected, atol=precision, rtol=precision)
