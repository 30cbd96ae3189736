"""Runs do not destroy each other: not their models, and not their checkpoints."""

import json

import pytest

from tests.cli.sft_job import write_model, write_rows
from trimtab.cli.main import main
from trimtab.config.jobs import JOBS
from trimtab.config.parser import parse
from trimtab.config.resolved_config import settle, to_yaml
from trimtab.embedded.sort_task import make_rows
from trimtab.train.metrics import read_rows


@pytest.fixture
def sft(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    write_rows(tmp_path / "train.jsonl", make_rows(8, seed=1))
    fixed = "sft --pretrain model --dataset train.jsonl --max_len 60 --train_batch_size 4 --micro_train_batch_size 4"

    def run(words):
        code = main([*fixed.split(), "--max_epochs", "1", "--save_steps", "1", *words.split()])
        return code, *capsys.readouterr()

    return run


def seed_of(folder):
    return json.loads((folder / "manifest.json").read_text())["seed"]


def test_checkpoints_lie_in_the_runs_own_folder_so_that_no_run_evicts_anothers(sft, tmp_path):
    for name in ("a", "b"):
        assert sft(f"--save_path {name} --max_ckpt_num 1")[0] == 0
    assert all((tmp_path / name / "checkpoints" / "global_step2").is_dir() for name in ("a", "b"))
    assert not (tmp_path / "ckpt").exists()
    code, told, _ = sft("--save_path a --load_checkpoint")
    assert code == 0 and "resumed from a/checkpoints/global_step2 at step 2" in told


def test_a_finished_run_is_set_aside_or_replaced_if_asked(sft, tmp_path):
    for seed in (1, 2, 3):
        code, told, _ = sft(f"--save_path out --seed {seed}")
        assert code == 0
    assert "out held a finished run, which is now out.old-2 (--overwrite replaces one)\n" in told
    assert [seed_of(tmp_path / name) for name in ("out.old-1", "out.old-2", "out")] == [1, 2, 3]
    assert (tmp_path / "out.old-1" / "checkpoints" / "global_step2").is_dir()
    assert sft("--save_path out --seed 4 --overwrite --max_steps 1")[0] == 0
    assert seed_of(tmp_path / "out") == 4 and not (tmp_path / "out.old-3").exists()
    kept = sorted(path.name for path in (tmp_path / "out" / "checkpoints").glob("global_step*"))
    assert kept == ["global_step1"], "those of the run before are gone"
    assert len(read_rows(tmp_path / "out" / "metrics.jsonl")) == 1


def test_a_run_does_not_set_aside_what_it_reads(sft, tmp_path, capsys):
    assert sft("--save_path out --save_hf_ckpt")[0] == 0
    code, _, told = sft("--pretrain out/checkpoints/global_step1_hf --save_path out")
    assert code == 2 and "lies in --save_path out, whose finished run would be set aside" in told
    write_rows(tmp_path / "out" / "held.jsonl", make_rows(4, seed=2))
    code, _, told = sft("--eval_dataset out/held.jsonl --save_path out")
    assert code == 2 and "--eval_dataset out/held.jsonl lies in --save_path out" in told
    words = "kd --pretrain model --teacher_model out --dataset train.jsonl --max_len 60 --save_path out"
    assert main(words.split()) == 2
    assert "--teacher_model out lies in --save_path out" in capsys.readouterr().err
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_an_empty_save_path_is_refused(sft, tmp_path):
    code, _, told = sft("--save_path=")
    assert code == 2 and "--save_path is empty: give a folder" in told
    assert not (tmp_path / "model.safetensors").exists()


def test_a_resolved_config_does_not_bring_its_checkpoints_to_another_folder(tmp_path):
    words = ["--pretrain", "m", "--dataset", "d", "--save_path"]
    made, _ = settle(parse(JOBS["sft"], [*words, "a"]))
    path = tmp_path / "options.yaml"
    path.write_text(to_yaml(made))
    for more, place in (([], "a/checkpoints"), (["--save_path", "b"], "b/checkpoints"), (["--ckpt_path", "c"], "c")):
        again, _ = settle(parse(JOBS["sft"], ["--config", str(path), *more]))
        assert again.ckpt_path == place and ("ckpt_path" in again.given) == (place == "c")
