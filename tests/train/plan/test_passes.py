"""Who gets planned passes, and what a run then leaves behind."""

import json

import pytest
import torch
import yaml

from tests.cli.sft_job import write_model, write_rows
from trimtab.cli.main import main
from trimtab.config.jobs import GRPOOptions, SFTOptions, TailOptions
from trimtab.config.parse import parse
from trimtab.distributed.device import Device
from trimtab.distributed.world import World
from trimtab.train.plan.passes import is_wanted, with_planned_passes

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
    planned = with_planned_passes(options, ACCELERATOR, World(0, 2), lambda: pytest.fail("nothing is planned"))
    assert planned == (options, None)
    assert "--fit_memory has no effect over several processes" in capsys.readouterr().out


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", [{"input": f"{i}?", "output": "yes " * (1 + i % 5)} for i in range(16)])
    return tmp_path


def run(*words: str) -> int:
    common = {"pretrain": "model", "dataset": "rows.jsonl", "output_key": "output", "max_len": 64, "max_epochs": 1}
    common |= {"train_batch_size": 8, "learning_rate": 1e-2}
    return main(["sft", *(f"--{name}={value}" for name, value in common.items()), *words])


def test_a_planned_run_says_what_it_planned_and_what_it_took_and_learns_the_same(place, capsys):
    assert run("--fit_memory", "--save_path", "planned") == 0
    told = capsys.readouterr().out
    assert "by plan" in told and "GiB planned" in told and "GiB measured at the peak" in told
    options = yaml.safe_load((place / "planned/options.yaml").read_text())
    assert options["packing_samples"] and options["train_max_tokens_per_gpu"] and options["fit_memory"] is False
    planned = json.loads((place / "planned/manifest.json").read_text())["planned_memory_gib"]
    assert 0.01 < planned < 10
    assert run("--micro_train_batch_size", "2", "--save_path", "plain") == 0
    assert "by plan" not in capsys.readouterr().out
    rows = [[json.loads(line) for line in (place / name / "metrics.jsonl").open()] for name in ("planned", "plain")]
    assert options["train_max_tokens_per_gpu"] == max(row["tokens"] for row in rows[0]), "the largest step of the run"
    assert rows[0][0]["micro_batches"] == 1 and rows[1][0]["micro_batches"] == 4
    assert [row["loss"] for row in rows[0]] == pytest.approx([row["loss"] for row in rows[1]], rel=1e-5)


def test_a_model_that_cannot_be_planned_is_refused_only_where_a_plan_was_asked_for(place, monkeypatch, capsys):
    def broken(*_, **__):
        raise NotImplementedError("it looks at contents\nand more")

    monkeypatch.setattr("trimtab.train.plan.memory.MemoryModel.at", broken)
    assert run("--fit_memory") == 2
    assert "--pretrain model cannot be planned: it looks at contents\n" in capsys.readouterr().err
    monkeypatch.setattr("trimtab.train.plan.passes.is_wanted", lambda *_: True)
    assert run("--save_path", "plain") == 0
    assert "it looks at contents); passes of 8 samples" in capsys.readouterr().out
