"""Who gets planned passes, and what a run then leaves behind."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from tests.train.job_run import assert_same_tensors, weights
from tests.train.rl import rl_run
from trimtab.cli.main import main
from trimtab.config.jobs import TRAINED, SFTOptions
from trimtab.config.parser import parse
from trimtab.config.rl_jobs import GRPOOptions, RLOptions, TailOptions
from trimtab.distributed.device import Device
from trimtab.distributed.process_group import World
from trimtab.train.checkpoint import PARTS, seal_state, unseal_state
from trimtab.train.launch import is_wanted, with_default_tokens, with_planned_micro_batches
from trimtab.train.metrics import read_rows
from trimtab.train.rl.trainer import PolicyTrainer

CPU, ACCELERATOR = Device(torch.device("cpu"), "CPU"), Device(torch.device("meta"), "an accelerator")


@pytest.mark.parametrize(
    ("words", "device", "planned"),
    [
        ([], ACCELERATOR, True),
        ([], CPU, False),
        (["--packing_samples"], ACCELERATOR, True),
        (["--micro_train_batch_size", "8"], ACCELERATOR, False),  # the default, but somebody said so
        (["--train_max_tokens_per_gpu", "4096", "--packing_samples"], ACCELERATOR, False),
        (["--fit_memory"], CPU, True),
        (["--fit_memory", "--micro_train_batch_size", "4"], ACCELERATOR, True),
        (["--fit_memory", "False"], ACCELERATOR, False),
    ],
)
def test_passes_are_planned_where_nobody_said_how_large_they_are(words, device, planned):
    assert is_wanted(parse(SFTOptions, words), device, World()) is planned


def test_neither_several_processes_nor_a_tail_run_are_planned():
    assert not is_wanted(SFTOptions(), ACCELERATOR, World(0, 2))
    assert not is_wanted(TailOptions(), ACCELERATOR, World())
    assert not is_wanted(GRPOOptions(use_dynamic_batch=True), ACCELERATOR, World())
    assert is_wanted(GRPOOptions(), ACCELERATOR, World())


def test_asking_for_planned_passes_over_several_processes_is_answered(capsys):
    options = SFTOptions(fit_memory=True)
    planned = with_planned_micro_batches(options, ACCELERATOR, World(0, 2), lambda: pytest.fail("nothing is planned"))
    assert planned == (options, None)
    assert "--fit_memory has no effect over several processes" in capsys.readouterr().out


@pytest.mark.parametrize("job", TRAINED.values(), ids=TRAINED)
def test_on_a_cpu_every_job_cuts_passes_by_tokens_unless_told_otherwise(job):
    def cut(*words: str, device: Device = CPU):
        options = parse(job, list(words))
        return with_default_tokens(options, device)

    rl = issubclass(job, RLOptions)
    options = cut()
    assert options.train_max_tokens_per_gpu == 2048 and (options.use_dynamic_batch if rl else options.packing_samples)
    assert cut(device=ACCELERATOR).train_max_tokens_per_gpu is None
    for words in (
        "--micro_train_batch_size 4",
        "--gradient_accumulation_steps 2",
        "--fit_memory",
        "--fit_memory False",
    ):
        assert cut(*words.split()).train_max_tokens_per_gpu is None
    if rl:
        assert cut("--micro_rollout_batch_size", "4").train_max_tokens_per_gpu is None
        assert not cut("--use_dynamic_batch", "False").use_dynamic_batch
        assert cut("--prompt_max_len", "4000", "--generate_max_len", "96").train_max_tokens_per_gpu == 4096
        assert not cut("--ray").use_dynamic_batch
    else:
        assert cut("--packing_samples").train_max_tokens_per_gpu is None
        assert cut("--max_len", "9000").train_max_tokens_per_gpu in (9000, 18000), "a sample, or a pair of two"


def options_and_manifest(out: Path) -> tuple[dict, dict]:
    return yaml.safe_load((out / "options.yaml").read_text()), json.loads((out / "manifest.json").read_text())


def test_passes_by_tokens_are_said_written_down_and_learn_the_same(place, train, capsys):
    train("default", "--dry_run")
    assert "passes of up to 2,048 tokens" in capsys.readouterr().out
    by_tokens = train("default", "--report_samples 0")
    assert "passes of up to 2,048 tokens" in capsys.readouterr().out
    options, manifest = options_and_manifest(place / "default")
    assert options["packing_samples"] and options["train_max_tokens_per_gpu"] == 2048
    assert manifest["passes"] == {"tokens": 2048}
    assert "train_max_tokens_per_gpu" in (place / "default/report.html").read_text()
    assert main(["sft", "--config", "default/options.yaml", "--save_path", "again"]) == 0
    again = read_rows(place / "again/metrics.jsonl")
    rows = [by_tokens, again, train("plain", "--micro_train_batch_size 2")]
    assert [row[0]["micro_batches"] for row in rows] == [1, 1, 4]
    losses = [[row["loss"] for row in own] for own in rows]
    assert losses[0] == losses[1] and losses[0] == pytest.approx(losses[2], rel=1e-5)


def test_a_run_that_was_begun_by_samples_goes_on_by_samples(place, train, capsys):
    fixed = "--save_steps 1 --train_batch_size 16 --max_epochs 2"
    train("run", f"{fixed} --micro_train_batch_size 8")
    whole = weights(place / "run")
    checkpoints = place / "run/checkpoints"
    shutil.rmtree(checkpoints / "global_step2")
    (checkpoints / "latest").write_text("global_step1")
    # As versions before passes by tokens have left it.
    state = unseal_state((checkpoints / "global_step1/state.json").read_text(), 1)
    assert state["manifest"].pop("passes") == {"samples": 8}
    (checkpoints / "global_step1/state.json").write_text(seal_state(state, 1, state[PARTS]))
    capsys.readouterr()
    rows = train("run", f"{fixed} --load_checkpoint")
    assert "resumed from" in (told := capsys.readouterr().out) and "passes of up to" not in told
    assert [row["micro_batches"] for row in rows] == [2, 2]
    assert_same_tensors(weights(place / "run"), whole)
    assert not options_and_manifest(place / "run")[0]["packing_samples"]


def test_a_model_that_takes_padded_rows_keeps_passes_of_samples(place, train, capsys):
    words = "--attn_implementation eager --train_batch_size 16"
    train("padded", f"{words} --dry_run")
    assert "passes of up to" not in capsys.readouterr().out
    rows = train("padded", words)
    assert "samples are padded" in (told := capsys.readouterr().out) and "passes of up to" not in told
    options, manifest = options_and_manifest(place / "padded")
    assert rows[0]["micro_batches"] == 2 and manifest["passes"] == {"samples": 8} and not options["packing_samples"]


def test_an_rl_run_cuts_by_tokens_and_one_of_padded_rows_by_samples(tmp_path, monkeypatch, capsys):
    rl_run.write_task(tmp_path)
    words = rl_run.arguments(tmp_path, tmp_path / "out", "grpo", "--max_steps 1")
    words = rl_run.without(words, "--micro_train_batch_size")
    assert main(words) == 0
    assert "passes of up to 2,048 tokens" in capsys.readouterr().out
    assert options_and_manifest(tmp_path / "out")[1]["passes"] == {"tokens": 2048}
    described = PolicyTrainer.describe  # the built-in engine takes no such model, but vLLM does
    monkeypatch.setattr(PolicyTrainer, "describe", lambda actor: described(actor) | {"path": "padded"})
    assert main([*words, "--overwrite"]) == 0
    assert "passes of up to" not in capsys.readouterr().out
    assert options_and_manifest(tmp_path / "out")[1]["passes"] == {"samples": 4}


def test_a_planned_run_says_what_it_planned_and_what_it_took_and_learns_the_same(place, train, capsys):
    planned = train("planned", "--fit_memory")
    told = capsys.readouterr().out
    assert "by plan" in told and "GiB planned" in told and "GiB measured at the peak" in told
    options, manifest = options_and_manifest(place / "planned")
    assert options["packing_samples"] and options["train_max_tokens_per_gpu"] and options["fit_memory"] is False
    assert 0.01 < manifest["planned_memory_gib"] < 10
    plain = train("plain", "--micro_train_batch_size 2")
    assert "by plan" not in capsys.readouterr().out
    assert options["train_max_tokens_per_gpu"] == max(row["tokens"] for row in planned), "the largest step of the run"
    assert planned[0]["micro_batches"] == 1 and plain[0]["micro_batches"] == 4
    assert [row["loss"] for row in planned] == pytest.approx([row["loss"] for row in plain], rel=1e-5)


def test_a_model_that_cannot_be_planned_is_refused_only_where_a_plan_was_asked_for(train, monkeypatch, capsys):
    def broken(*_, **__):
        raise NotImplementedError("it looks at contents\nand more")

    monkeypatch.setattr("trimtab.plan.memory.ProcessMemory.at", broken)
    train("refused", "--fit_memory", code=2)
    assert "--pretrain model cannot be planned: it looks at contents\n" in capsys.readouterr().err
    monkeypatch.setattr("trimtab.train.launch.is_wanted", lambda *_: True)
    monkeypatch.setattr("trimtab.train.launch.uses_default_tokens", lambda *_: False)
    train("plain")
    assert "it looks at contents); passes of 8 samples" in capsys.readouterr().out
