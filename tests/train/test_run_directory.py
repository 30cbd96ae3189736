"""A folder belongs to one run at a time, and what looks like a model in it is one."""

import os
import shutil
import signal
import socket
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests import warm
from tests.train.every_loop import LOOPS, signal_in_step, words
from trimtab.cli.main import main
from trimtab.errors import UserError
from trimtab.files import is_unfinished, locked, mark_unfinished
from trimtab.models import save
from trimtab.models.pretrained import check_model_folder
from trimtab.report.run_data import read_run
from trimtab.train.metrics import read_rows
from trimtab.train.run_directory import RunDirectory, compare_manifests

# ---- one run at a time


@pytest.mark.short(1)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_second_run_in_the_same_folder_is_refused_and_told_of_the_first(tasks, tmp_path, loop):
    with waiting_run(words(tasks, loop, tmp_path / "out"), tmp_path / "out") as process:
        rows = read_rows(tmp_path / "out" / "metrics.jsonl")
        line = warm.output(words(tasks, loop, tmp_path / "out"), 2).splitlines()[-1]
        assert f"at work there (process {process.pid} on {socket.gethostname()})" in line
        assert read_rows(tmp_path / "out" / "metrics.jsonl") == rows and rows
    with locked("save_path", tmp_path / "out"):
        pass  # a crash has released it


@contextmanager
def waiting_run(command, out):
    """A run that waits before its end, and is killed."""
    process = warm.start(command, prepare=wait_before_the_end)
    try:
        warm.wait_until((out / "waiting").exists, process)
        yield process
    finally:
        warm.kill(process)


def wait_before_the_end():
    def wait(folder):
        (folder.path / "waiting").touch()
        time.sleep(60)

    RunDirectory.finish = wait


def test_two_runs_may_have_folders_beside_each_other_but_not_one_for_checkpoints(tasks, tmp_path):
    shared = f"--max_steps 1 --ckpt_path {tmp_path}/shared"
    with waiting_run(words(tasks, "sft", tmp_path / "a", shared), tmp_path / "a"):
        assert warm.run(words(tasks, "sft", tmp_path / "b", "--max_steps 1")) == 0
        printed = warm.output(words(tasks, "sft", tmp_path / "c", shared), 2)
        assert f"--ckpt_path {tmp_path}/shared: another run is at work there" in printed


@pytest.mark.long
def test_the_processes_of_one_run_share_their_folder_and_are_refused_together(tasks, tmp_path):
    with waiting_run(words(tasks, "sft", tmp_path / "out"), tmp_path / "out"):
        assert warm.run_world(words(tasks, "sft", tmp_path / "out"), 2) == [2, 2]
    assert warm.run_world(words(tasks, "sft", tmp_path / "out"), 2) == [0, 0]


def test_a_child_that_outlives_a_killed_run_does_not_hold_its_folder(tmp_path):
    process = warm.start_call(hold_and_fork, tmp_path)
    warm.wait_until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text(), process)
    warm.kill(process)
    try:
        with locked("save_path", tmp_path):
            pass
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def hold_and_fork(folder):
    with locked("save_path", folder):
        if os.fork() == 0:
            (folder / "child").write_text(str(os.getpid()))
        time.sleep(60)


# ---- whose model it is


@pytest.mark.short(1)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_new_run_that_was_killed_leaves_no_old_model_to_be_taken_for_its_own(tasks, finished, tmp_path, loop, capsys):
    folder = shutil.copytree(finished(loop), tmp_path / "out")
    assert read_run(folder).has_saved_model and not is_unfinished(folder)
    again = words(tasks, loop, folder, "--seed 7 --overwrite")
    assert warm.run(again, prepare=partial(signal_in_step, loop, 0, signal.SIGKILL)) == -signal.SIGKILL
    assert (folder / "model.safetensors").exists() and not read_run(folder).has_saved_model
    with pytest.raises(UserError, match="has not finished, so the model there is an earlier one"):
        check_model_folder(str(folder))
    asked = ["chat", "--pretrain", str(folder)]
    assert main(asked) == 2 and "--load_checkpoint" in capsys.readouterr().err
    assert warm.run(again) == 0
    check_model_folder(str(folder))


@pytest.mark.short(1)
@pytest.mark.parametrize("moves", range(1, 6))
def test_killed_while_its_model_is_moved_in_a_folder_is_no_model(tasks, tmp_path, moves):
    """Whatever has been moved, config.json is the last, and the mark is still there."""
    command = words(tasks, "sft", tmp_path, "--save_steps -1 --max_steps 1")
    assert warm.run(command, prepare=partial(die_before_move, moves)) == -signal.SIGKILL and is_unfinished(tmp_path)
    assert not (tmp_path / "config.json").exists()
    with pytest.raises(UserError, match="has not finished"):
        check_model_folder(str(tmp_path))
    assert list(tmp_path.glob(".writing-*"))
    assert warm.run(command) == 0
    assert not list(tmp_path.glob(".writing-*")) and not is_unfinished(tmp_path)
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {path.name for path in tmp_path.iterdir()}


def die_before_move(number):
    plain, moved = save.move, 0

    def move(source, place):
        nonlocal moved
        moved += 1
        if moved == number:
            os.kill(os.getpid(), signal.SIGKILL)
        plain(source, place)

    save.move = move


def test_an_export_beside_a_checkpoint_is_whole_or_absent(tasks, tmp_path):
    command = words(tasks, "sft", tmp_path, "--save_hf_ckpt")
    assert warm.run(command, prepare=partial(die_before_move, 3)) == -signal.SIGKILL
    place = tmp_path / "checkpoints"
    assert not list(place.glob("global_step*")) and list(place.glob(".writing-*_hf"))
    assert warm.run([*command, "--load_checkpoint"]) == 0
    for path in place.glob("global_step*_hf"):
        check_model_folder(str(path))
    assert not list(place.glob(".writing-*")) and len(list(place.glob("global_step*_hf"))) == 3


def test_an_unfinished_adapter_is_not_merged(tasks, tmp_path, capsys):
    tmp_path.joinpath("adapter_config.json").write_text("{}")
    mark_unfinished(tmp_path)
    words_ = ["--model_path", f"{tasks}/model", "--lora_path", str(tmp_path), "--output_path", f"{tmp_path}/out"]
    assert main(["lora-combine", *words_]) == 2
    assert "has not finished" in capsys.readouterr().err


def test_weights_of_other_files_are_refused():
    for first, second in (("files-12", "files-34"), ("12", "34")):
        with pytest.raises(UserError, match="its initial weights differ"):
            compare_manifests({"initial_weights": first}, {"initial_weights": second}, Path("checkpoint"))
    assert compare_manifests({"initial_weights": "files-12"}, {"initial_weights": "files-12"}, Path("checkpoint")) == []
