"""--max_steps: a shorter run with a schedule of its own, which is resumed like any other."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from tests.train.rl import rl_run
from tests.train.test_resume import arguments, folder  # noqa: F401 (a fixture)
from trimtab.cli.main import main
from trimtab.interrupts import StopRequest
from trimtab.train.metrics import CLOCK_FIELDS, read_rows
from trimtab.train.rl.loop import RLRun
from trimtab.train.supervised import SupervisedRun


def rows(out):
    return [{k: v for k, v in row.items() if k not in CLOCK_FIELDS} for row in read_rows(out / "metrics.jsonl")]


def assert_same(first, second):
    assert rows(first) == rows(second)
    mine, theirs = (load_file(out / "model.safetensors") for out in (first, second))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def stopped_after(monkeypatch, run, method, calls):
    """Ctrl-C arrives during this call of the method."""
    plain, seen = getattr(run, method), []

    def stopping(self, stop: StopRequest):
        seen.append(1)
        if len(seen) == calls:
            stop._remember(signal.SIGINT, None)
        return plain(self, stop)

    monkeypatch.setattr(run, method, stopping)


def test_a_supervised_run_stops_there_with_its_schedule_and_a_last_evaluation_and_is_resumed(
    folder,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    whole, again = tmp_path / "whole", tmp_path / "again"
    more = ["--max_steps", "5", "--save_steps", "2"]
    assert main(arguments(folder, whole, "plain", *more)) == 0
    found = rows(whole)
    assert len(found) == 5 and "eval_loss" in found[-1]
    rates = [row["learning_rate"] for row in found]
    assert rates[0] == pytest.approx(1e-2) and rates[-1] < 3e-3, "the schedule is that of five steps, not of twelve"
    assert json.loads((whole / "manifest.json").read_text())["steps"] == 5
    with monkeypatch.context() as patched:
        stopped_after(patched, SupervisedRun, "train_step", 3)
        assert main(arguments(folder, again, "plain", *more)) == 130
    assert main(arguments(folder, again, "plain", *more, "--load_checkpoint")) == 0
    assert_same(whole, again)


def test_an_rl_run_stops_after_so_many_iterations_and_is_resumed(tmp_path, monkeypatch):
    task = rl_run.write_task(tmp_path)
    whole, again = tmp_path / "whole", tmp_path / "again"
    more = ["--max_steps", "2", "--eval_steps", "-1"]
    assert main(rl_run.arguments(task, whole, "filtered", *more)) == 0
    found = rows(whole)
    assert [row["step"] for row in found] == [0, 1, 2] and "eval_reward" in found[-1]
    with monkeypatch.context() as patched:
        stopped_after(patched, RLRun, "iterate", 2)
        assert main(rl_run.arguments(task, again, "filtered", *more)) == 130
    assert main([*rl_run.arguments(task, again, "filtered", *more), "--load_checkpoint"]) == 0
    assert_same(whole, again)


def test_more_steps_than_the_data_give_change_nothing(folder, tmp_path):  # noqa: F811
    assert main(arguments(folder, tmp_path, "plain", "--max_steps", "1000")) == 0
    assert len(rows(tmp_path)) == 12
