"""Two processes that share every layer learn what one learns."""

import pytest
import torch
from safetensors.torch import load_file

from tests import warm
from tests.train.test_processes import alone, arguments, folder, same_curve  # noqa: F401

CUT = "--ds_tensor_parallel_size 2"


def run_cut(folder, out, job, more="", *, model="model", processes=2):  # noqa: F811
    words = arguments(folder, out, job, CUT, more, model=model)
    assert warm.run_world(words, processes) == [0] * processes


@pytest.mark.short(2)
@pytest.mark.parametrize(
    ("job", "stage"), [("sft", 2), ("dpo", 3), ("rm", 3), ("kd", 3), ("kto", 2), ("sft", 0), ("kd", 0)]
)
def test_every_job_follows_the_curve_of_one_process(folder, alone, tmp_path, job, stage):  # noqa: F811
    run_cut(folder, tmp_path, job, f"--zero_stage {stage}")
    same_curve(tmp_path, alone(job))
    weights, expected = (load_file(out / "model.safetensors") for out in (tmp_path, alone(job)))
    assert weights.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], atol=1e-3, rtol=1e-3)
