"""Other jobs and memory savers on the stand-in, one after the other: each ends well, and works there."""

import pytest

from tests import standin
from tests.standin import at_work
from tests.standin.test_training import built, rl  # noqa: F401
from tests.train.job_run import labelled_rows, preference_rows, write_model, write_rows
from tests.train.rl import rl_run
from trimtab.embedded.sort_task import make_rows

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(standin.why_not() is not None, reason=str(standin.why_not())),
]

JOBS = {
    "sft": ("sft", make_rows(16, 1), "--bf16 --gradient_checkpointing --offload_activations --packing_samples"),
    "adam_offload": ("sft", make_rows(16, 1), "--adam_offload --bf16"),
    "deterministic": ("sft", make_rows(16, 1), "--full_determinism"),
    "dpo": ("dpo", preference_rows(16), "--packing_samples --ref_offload"),
    "rm": ("rm", preference_rows(16), ""),
    "kto": ("kto", labelled_rows(16), "--micro_train_batch_size 4"),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_job_on_fixed_data(tmp_path, name):
    verb, rows, more = JOBS[name]
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", rows)
    command = (
        f"{verb} --pretrain {tmp_path}/model --dataset {tmp_path}/rows.jsonl --train_batch_size 8 --max_epochs 1 "
        f"--max_len 40 --save_path {tmp_path}/out {more}"
    )
    (device,) = at_work.run(tmp_path, command.split())
    assert device["kernels"] > 1000
    assert any((tmp_path / "out").glob("*model*.safetensors"))


@pytest.mark.parametrize("estimator", ["ppo", "reinforce", "lora"])
def test_a_job_that_makes_its_data(tmp_path, estimator):
    rl_run.write_task(tmp_path)
    (device,) = at_work.run(tmp_path, rl(tmp_path, tmp_path / "out", estimator, "--max_samples 4"))
    assert device["kernels"] > 5000
