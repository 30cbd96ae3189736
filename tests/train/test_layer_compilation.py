"""Compiled layers in whole runs: decided once, kept in checkpoints, given up before the next step where they fail. The
compiler is one that fuses nothing and is fast."""

import json

import pytest
import torch

from tests.tiny import tiny_model
from tests.train.job_run import assert_same_model, rows, weights
from tests.train.jobs import write_job
from trimtab.cli.main import main
from trimtab.config.jobs import SFTOptions
from trimtab.distributed.device import Device
from trimtab.models import compile as compiled
from trimtab.models.activation_memory import layers_of
from trimtab.models.policy import Policy
from trimtab.train import layer_compilation as compiling
from trimtab.train.metrics import read_rows
from trimtab.train.supervised import SupervisedRun


class Killed(Exception):
    pass


@pytest.fixture(autouse=True)
def fast_compiler(monkeypatch):
    monkeypatch.setattr(compiled, "COMPILER", {"backend": "aot_eager"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    write_job(folder, "sft")
    return folder


def run(folder, out, *more):
    words = (
        f"sft --pretrain {folder}/model --dataset {folder}/train.jsonl --max_len 40 --train_batch_size 4 "
        f"--micro_train_batch_size 2 --learning_rate 1e-2 --max_epochs 1 --save_steps 2 --save_path {out} "
        f"--ckpt_path {out}/ck"
    )
    return main([*words.split(), *more])


def before_step(monkeypatch, number, what):
    """Have something happen before the step of this number."""
    train_step = SupervisedRun.train_step

    def first(self, stop):
        if self.counters.step == number:
            what(self)
        return train_step(self, stop)

    monkeypatch.setattr(SupervisedRun, "train_step", first)


def kill(run):
    raise Killed


def compiled_in(out, step):
    return json.loads((out / "ck" / f"global_step{step}" / "state.json").read_text())["compiled"]


def test_a_resumed_run_follows_the_decision_and_is_the_uninterrupted_one(folder, tmp_path, monkeypatch, capsys):
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert run(folder, straight, "--compile", "on") == 0
    assert "layers of the model are compiled, in " in capsys.readouterr().out
    first, *others = read_rows(straight / "metrics.jsonl")
    assert first["seconds_compile"] > 0 and all("seconds_compile" not in row for row in others)
    assert json.loads((straight / "manifest.json").read_text())["compiled"] == {"model": True}
    with monkeypatch.context() as until, pytest.raises(Killed):
        before_step(until, 3, kill)
        run(folder, stopped, "--compile", "on")
    assert compiled_in(stopped, 2) == {"model": True}
    capsys.readouterr()
    assert run(folder, stopped, "--load_checkpoint") == 0  # auto, which alone would leave a CPU's layers plain
    assert "layers of the model are compiled" in capsys.readouterr().out
    assert rows(stopped) == rows(straight)
    assert_same_model(stopped, straight)


def test_layers_that_fail_in_a_run_are_given_up_before_the_next_step(folder, tmp_path, monkeypatch, capsys):
    def fails(*arguments, **named):
        raise torch._dynamo.exc.TorchDynamoException("no such luck")

    def break_one(run):
        layers_of(run.model.inner)[1].forward._compiled = fails

    plain, out = tmp_path / "plain", tmp_path / "out"
    assert run(folder, plain, "--compile", "off") == 0
    with monkeypatch.context() as once:
        before_step(once, 2, break_one)
        assert run(folder, out, "--compile", "on") == 0
    told = "compiled layers are given up from this step on: the compiler fails (no such luck)"
    assert capsys.readouterr().out.count(told) == 1
    assert compiled_in(out, 2) == {"model": True} and compiled_in(out, 4) == {"model": False}
    assert [row["step"] for row in rows(out)] == [row["step"] for row in rows(plain)]
    torch.testing.assert_close(weights(out), weights(plain), rtol=1e-3, atol=1e-4)
    assert run(folder, out, "--load_checkpoint", "--compile", "on") == 0  # kept, whatever is asked for
    assert "layers of the model are not compiled: the run began, or went on, with plain ones" in capsys.readouterr().out


def test_compiled_anew_too_often_is_a_reason_too(monkeypatch):
    policy = Policy(tiny_model())
    assert compiled.compile_problem(policy) == ""
    policy.attention.compiled = True
    monkeypatch.setattr(compiled, "graphs_so_far", lambda: compiled.CompiledLayer.tried + compiled.LATE)
    assert compiled.compile_problem(policy) == ""
    monkeypatch.setattr(compiled, "graphs_so_far", lambda: compiled.CompiledLayer.tried + compiled.LATE + 1)
    assert compiled.compile_problem(policy) == "they were compiled anew 17 times"


@pytest.mark.parametrize(
    ("words", "tokens", "kernels", "expected"),
    [
        ({}, 10**10, True, True),
        ({}, 10**8, True, False),  # two layers of 32: 0.7 s
        ({}, 10**10, False, False),
        ({"compile": "off"}, 10**10, True, False),
        ({"use_liger_kernel": True}, 10**10, True, False),
        ({"gradient_checkpointing": True, "gradient_checkpointing_keep": "products"}, 10**10, True, False),
    ],
)
def test_auto_compiles_where_the_run_is_long_enough(monkeypatch, words, tokens, kernels, expected):
    monkeypatch.setattr(compiling, "has_kernels", lambda device: kernels)
    device, policy = Device(torch.device("cpu"), "CPU"), Policy(tiny_model())
    assert compiling.is_worth_it(SFTOptions(**words), policy, device, tokens, 0.0) is expected
