"""A checkpoint that is not what was written is named and passed over, in every kind of job; nothing goes on from it."""

import json
import random
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests import warm
from tests.train.every_loop import LOOPS, newest_first, step, store, words
from tests.train.job_run import assert_same_model, assert_same_tensors, weights
from tests.train.rl.rl_run import at
from trimtab.errors import UserError
from trimtab.train.checkpoint import checksum, seal_state, unseal_state
from trimtab.train.metrics import read_rows
from trimtab.train.tail.tail_run import TailRun

# ---- ways to break one


def tensors_of(checkpoint: Path) -> Path:
    return next(p for p in sorted(checkpoint.rglob("*.safetensors")) if p.parent.name != "experience")


def changed(checkpoint: Path, change) -> None:
    """Write the tensors anew, as a careless hand would."""
    path = tensors_of(checkpoint)
    with safe_open(path, framework="pt") as file:
        notes = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata=notes)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def flip_a_byte(checkpoint):
    flip(tensors_of(checkpoint), -1000)


def halve_a_tensor(checkpoint):
    def change(tensors):
        name = next(name for name, tensor in tensors.items() if tensor.ndim == 2)
        tensors[name] = tensors[name][: len(tensors[name]) // 2].clone()

    changed(checkpoint, change)


def lose_moments(checkpoint):
    changed(checkpoint, lambda tensors: [tensors.pop(n) for n in list(tensors) if n.startswith("exp_avg")])


def lose_a_tensor(checkpoint):
    changed(checkpoint, lambda tensors: tensors.pop(next(n for n in tensors if n.startswith("weight/"))))


def nan_moment(checkpoint):
    def change(tensors):
        next(t for n, t in tensors.items() if n.startswith("exp_avg/")).view(-1)[0] = torch.nan

    changed(checkpoint, change)


def tensors_of_another_step(checkpoint):
    before = next(p for p in checkpoint.parent.glob("global_step*") if p != checkpoint)
    shutil.copy(tensors_of(before), tensors_of(checkpoint))


def absurd_counter(checkpoint):
    state = json.loads((checkpoint / "state.json").read_text())
    state["counters"]["skipped_steps"] = 10**9
    (checkpoint / "state.json").write_text(json.dumps(state))


def another_state(checkpoint):
    (checkpoint / "state.json").write_text('{"counters": {"step": 12}}')


def no_state(checkpoint):
    (checkpoint / "state.json").unlink()


def lose_a_file(checkpoint):
    tensors_of(checkpoint).unlink()


WAYS = [flip_a_byte, halve_a_tensor, lose_moments, lose_a_tensor, nan_moment, tensors_of_another_step]
WAYS += [absurd_counter, another_state, no_state, lose_a_file]


@pytest.mark.short(1)
@pytest.mark.parametrize("job", LOOPS)
def test_damage_is_named_and_the_checkpoint_before_is_used(finished, tmp_path, capsys, job):
    for way in WAYS:
        place = tmp_path / way.__name__
        shutil.copytree(finished(job) / "checkpoints", place)
        newest, before, *_ = newest_first(place)
        way(newest)
        path, state = store(place).load()
        assert path == before and state["counters"], way.__name__
        (line,) = capsys.readouterr().out.splitlines()
        assert f"{newest}: damaged checkpoint (" in line and f"; {before.name} is used instead" in line, way.__name__


def leave_newest(place: Path) -> Path:
    newest, *others = newest_first(place)
    for other in others:
        shutil.rmtree(other)
    return newest


@pytest.mark.parametrize("way", WAYS)
def test_a_damaged_checkpoint_without_one_before_it_is_refused_in_one_line(finished, tmp_path, way):
    shutil.copytree(finished("sft") / "checkpoints", tmp_path / "checkpoints")
    way(newest_first(tmp_path / "checkpoints")[0])
    leave_newest(tmp_path / "checkpoints")
    with pytest.raises(UserError, match=r"global_step12: damaged checkpoint \(.*no whole one before") as error:
        store(tmp_path / "checkpoints").load()
    assert "\n" not in str(error.value)


@pytest.mark.short(1)
@pytest.mark.parametrize("job, way", [("sft", nan_moment), ("ppo", flip_a_byte), ("tail", tensors_of_another_step)])
def test_a_run_over_a_damaged_checkpoint_ends_as_the_run_that_had_none(tasks, finished, tmp_path, job, way):
    out = tmp_path / "out"
    shutil.copytree(finished(job), out)
    newest, before, *_ = newest_first(out / "checkpoints")
    way(newest)
    printed = warm.output(words(tasks, job, out, "--load_checkpoint"))
    assert f"{before.name} is used instead" in printed and f"resumed from {before}" in printed
    assert_same_model(out, finished(job))


def test_the_only_checkpoint_without_a_state_is_refused_and_old_metrics_stay(tasks, finished, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(finished("sft"), out)
    newest = leave_newest(out / "checkpoints")
    no_state(newest)
    rows = read_rows(out / "metrics.jsonl")
    printed = warm.output(words(tasks, "sft", out, "--load_checkpoint"), 2)
    assert "state.json is missing" in printed and "Traceback" not in printed
    assert read_rows(out / "metrics.jsonl") == rows and not list(out.glob("metrics.1.jsonl"))
    shutil.rmtree(newest)
    with pytest.raises(UserError, match=r"latest names \(global_step12\) is gone"):
        store(out / "checkpoints").load()


@pytest.mark.parametrize("size", [1, 7, 2**20, 2**20 + 8, 3 * 2**20 + 5])
def test_any_flipped_bit_and_any_exchange_of_pieces_changes_a_checksum(tmp_path, size):
    path, chance = tmp_path / "file", random.Random(size)
    content = bytearray(chance.randbytes(size))
    path.write_bytes(content)
    first = checksum(path)
    assert checksum(path) == first
    for place in {0, size - 1, *(chance.randrange(size) for _ in range(20))}:
        content[place] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        assert checksum(path) != first
        path.write_bytes(content := bytearray(chance.randbytes(size)))
        first = checksum(path)
    if size > 2**21:
        path.write_bytes(content[2**20 : 2**21] + content[: 2**20] + content[2**21 :])
        assert checksum(path) != first


def test_parts_of_another_step_are_noticed_even_with_checksums_of_their_own(finished, tmp_path, capsys):
    place = tmp_path / "checkpoints"
    shutil.copytree(finished("sft") / "checkpoints", place)
    newest, before, *_ = newest_first(place)
    tensors_of_another_step(newest)
    state = unseal_state((newest / "state.json").read_text(), step(newest))
    parts = {"tensors.safetensors": checksum(tensors_of(newest))}
    (newest / "state.json").write_text(seal_state(state, step(newest), parts))
    assert store(place).load()[0] == before
    assert f"its tensors are of step {step(before)}" in capsys.readouterr().out


def test_what_one_process_of_two_finds_damaged_all_pass_over(tasks, tmp_path):
    out = tmp_path / "out"
    command = words(tasks, "sft", out, "--zero_stage 2")
    assert warm.run_world(command, 2) == [0, 0]
    expected = weights(out)
    newest, before, *_ = newest_first(out / "checkpoints")
    flip(newest / "tensors-00001-of-00002.safetensors", -1000)
    first, _ = warm.world_outputs([*command, "--load_checkpoint"], 2)
    assert f"{before.name} is used instead" in first
    assert_same_tensors(weights(out), expected)


def test_a_stop_inside_an_iteration_keeps_its_experience_under_checksums_too(tasks, tmp_path, capsys):
    stopped = partial(at, (3, "score_proposed", 0), signal.SIGTERM, TailRun)
    assert warm.run(words(tasks, "tail", tmp_path), prepare=stopped) == 128 + signal.SIGTERM
    newest, before, *_ = newest_first(tmp_path / "checkpoints")
    flip(newest / "experience" / "tensors.safetensors", -1)
    assert store(tmp_path / "checkpoints").load()[0] == before
    assert "experience/tensors.safetensors is not what was written" in capsys.readouterr().out
