"""The documents' commands with the options that split models and rows, in two processes, on rows for two steps."""

import shlex

import pytest

from tests import warm
from tests.cli import test_jobs_documents as others
from tests.cli import test_sft_documents as documents
from tests.cli.sft_job import write_rows
from tests.config.test_documented_commands import COMMANDS
from trimtab.cli.main import main
from trimtab.embedded.sort_task import make_rows, prompt_of, reference_of
from trimtab.train.metrics import read_rows

RING = "--packing_samples --ring_attn_size 2 --ring_head_stride 2"
DPO = COMMANDS["ascend small dpo"][0]
CASES = [
    ("sft", documents.README, RING),
    ("dpo", DPO, RING),
    ("sft", documents.CHINESE, "--ds_tensor_parallel_size 2"),
    ("sft", documents.GUIDE, "--zero_stage 3 --overlap_comm"),
    ("dpo", DPO, f"{RING} --offload_activations"),
]


@pytest.mark.short(1)
@pytest.mark.parametrize(("verb", "command", "more"), CASES)
def test_a_documents_command_passes_a_dry_run_and_trains_in_two_processes(made, place, verb, command, more, capsys):
    if verb == "sft":
        rows = [{"question": prompt_of(row), "response": reference_of(row)} for row in make_rows(16, seed=1)]
    else:
        rows = others.rows_of("dpo", 16, [])
    write_rows(place / "rows.jsonl", rows)
    command = command.replace("--use_wandb {wandb_token}", "").replace("$'User: {}\\nAssistant: '", "'User: {}'")
    words = shlex.split(f"{command} {more} --train_batch_size 8 --micro_train_batch_size 1")
    names = ("rows.jsonl", "owner/data"), ("model", "owner/model")
    there = {word: str(path) for words, path in zip(names, (place / "rows.jsonl", made / "model")) for word in words}
    words = [there.get(word, word) for word in words]
    run = place / "run"
    words += ["--save_path", str(run), "--ckpt_path", str(run / "ck")]
    assert main([verb, *words, "--nproc", "2", "--dry_run"]) == 0, capsys.readouterr().err
    assert warm.run_world([verb, *words], 2) == [0, 0]
    assert [row["samples"] for row in read_rows(run / "metrics.jsonl")] == [8, 8]
    assert (run / "model.safetensors").is_file()
