"""A disk that fills up, or a folder that cannot be written, costs no more than the room it lacks."""

import errno
import os
import shutil
import tempfile
from collections import namedtuple
from functools import partial
from pathlib import Path

import pytest

from tests import warm
from tests.train.every_loop import LOOPS, words
from tests.train.job_run import assert_same_model
from tests.train.rl.rl_run import without
from trimtab.config.training_options import CheckpointOptions
from trimtab.train import run_directory as space
from trimtab.train.metrics import MetricsFile
from trimtab.train.run_directory import SpaceWatch

Usage = namedtuple("Usage", "total used free")


# ---- known in time


def watch(tmp_path, save_steps=5):
    options = CheckpointOptions(save_path=f"{tmp_path}/new/out", ckpt_path=f"{tmp_path}/ck", save_steps=save_steps)
    return SpaceWatch(options, model=400 * 2**20, checkpoint=1200 * 2**20)


@pytest.mark.parametrize(
    "save_steps, free, short", [(5, 1700, False), (5, 1500, True), (-1, 500, False), (-1, 300, True)]
)
def test_room_for_the_model_and_the_next_checkpoint_is_compared_with_what_is_free(
    tmp_path, monkeypatch, save_steps, free, short
):
    monkeypatch.setattr(space.shutil, "disk_usage", lambda path: Usage(0, 0, free * 2**20))
    warning = watch(tmp_path, save_steps).warning()
    assert (warning is not None) == short
    if short:
        needed = "1.6 GiB" if save_steps > 0 else "416 MiB"
        assert f"{space._size(free * 2**20)} are free" in warning and needed in warning and f"{tmp_path}" in warning


def test_shortness_is_told_when_it_begins_and_not_again(tmp_path, monkeypatch):
    monkeypatch.setattr(space, "EVERY", 0.0)
    found = []
    watched = watch(tmp_path)
    for free in (2000, 100, 90, 2000, 80):
        monkeypatch.setattr(space.shutil, "disk_usage", lambda path, free=free: Usage(0, 0, free * 2**20))
        found.append(watched.warning() is not None)
    assert found == [False, True, False, False, True]


@pytest.mark.short(1)
@pytest.mark.parametrize("loop", LOOPS)
def test_the_bytes_that_are_expected_are_the_bytes_that_are_written(tasks, finished, tmp_path, loop):
    out = tmp_path / "out"
    printed = warm.output(words(tasks, loop, out), prepare=partial(tell_needs, tmp_path / "needs"))
    assert "make room before then" in " ".join(printed.split())
    expected_model, expected_checkpoint = map(int, (tmp_path / "needs").read_text().split())
    written = [*out.glob("model.safetensors"), *out.glob("proposal/model.safetensors")]
    assert sum(path.stat().st_size for path in written) == pytest.approx(expected_model, rel=0.1)
    last = max((out / "checkpoints").glob("global_step*"), key=lambda p: p.stat().st_mtime)
    parts = [path for path in last.rglob("*.safetensors") if path.parent.name != "experience"]
    assert sum(path.stat().st_size for path in parts) == pytest.approx(expected_checkpoint, rel=0.1)


def tell_needs(place):
    """And let the disk look nearly full."""
    plain = SpaceWatch.__init__

    def init(watched, options, *, model, checkpoint):
        place.write_text(f"{model} {checkpoint}")
        plain(watched, options, model=model, checkpoint=checkpoint)

    SpaceWatch.__init__ = init
    space.shutil.disk_usage = lambda path: Usage(0, 0, 1000)


# ---- and survived


def full(*folders, temporary):
    """From now on nothing but small files can be written in these folders."""
    from trimtab.models import save
    from trimtab.train import checkpoint as tensor_parts

    def refuse(path):
        if any(folder in Path(path).parents for folder in folders):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save_file, write_folder = tensor_parts.save_file, save.write_folder

    def guarded_save(tensors, path, **more):
        refuse(path)
        save_file(tensors, path, **more)

    def guarded_folder(folder, *writers):
        refuse(folder / "model.safetensors")
        write_folder(folder, *writers)

    tensor_parts.save_file, save.write_folder = guarded_save, guarded_folder
    tempfile.tempdir = str(temporary)


def no_model():
    """The model cannot be written, checkpoints can."""
    from trimtab.models import save

    def refuse(folder, *writers):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save.write_folder = refuse


PLACES = [("sft", "checkpoints"), ("sft", "beside"), ("sft", "temporary"), ("ppo", "beside"), ("tail", "beside")]


@pytest.mark.short(2)
@pytest.mark.parametrize("loop, where", PLACES)
def test_a_model_that_cannot_be_written_leaves_a_checkpoint_where_there_is_room(tasks, finished, tmp_path, loop, where):
    out, temporary = tmp_path / "run" / "out", tmp_path / "temporary"
    temporary.mkdir()
    never = words(tasks, loop, out, "--save_steps -1")
    failing = {
        "checkpoints": no_model,
        "beside": partial(full, out, temporary=temporary),
        "temporary": partial(full, tmp_path / "run", temporary=temporary),
    }
    printed = warm.output(never, 2, prepare=failing[where])
    line = printed.splitlines()[-1]
    assert "cannot write the model (No space left on device)" in line and "Traceback" not in printed
    places = {"checkpoints": out / "checkpoints", "beside": tmp_path / "run" / "out-rescued"}
    place = places.get(where) or next(temporary.iterdir())
    assert f"is kept in {place}: make room and go on with --load_checkpoint --ckpt_path {place}" in line
    assert warm.run([*never, "--load_checkpoint", "--ckpt_path", str(place)]) == 0
    assert_same_model(out, finished(loop))


def test_a_reward_that_fails_on_a_full_disk_leaves_a_checkpoint_beside(tasks, tmp_path):
    out, reward = tmp_path / "run" / "out", tmp_path / "reward.py"
    reward.write_text("def reward_func(queries, prompts, labels):\n    raise ValueError('the judge is out')\n")
    asked = [*without(words(tasks, "ppo", out), "--reward_verifier"), "--remote_rm_url", str(reward)]
    line = warm.output(asked, 1, prepare=partial(full, out, temporary=tmp_path)).splitlines()[-1]
    assert "the judge is out" in line and f"is kept in {tmp_path / 'run' / 'out-rescued'}: make room" in line


@pytest.mark.parametrize("loop, more", [("sft", ""), ("ppo", "--max_steps 1 --eval_steps -1")])
def test_a_model_that_two_processes_cannot_write_leaves_a_checkpoint_of_both(tasks, tmp_path, loop, more):
    out, log = tmp_path / "out", tmp_path / "log"
    never = words(tasks, loop, out, "--save_steps -1 --zero_stage 2", more)
    codes = warm.run_world(never, 2, log=log, prepare=dict.fromkeys(range(2), no_model))
    assert codes[0] == 2 and (loop == "ppo" or codes[1] == 2)
    assert "is kept in" in (tmp_path / "log.0").read_text()
    assert warm.run_world([*never, "--load_checkpoint"], 2) == [0, 0]
    assert (out / "model.safetensors").exists()


@pytest.mark.short(1)
@pytest.mark.parametrize("loop", LOOPS)
def test_metrics_that_cannot_be_written_are_told_in_one_line_and_cost_no_step(tasks, tmp_path, loop):
    never = words(tasks, loop, tmp_path / "out", "--save_steps -1")
    printed = warm.output(never, 2, prepare=partial(full_after, 3))
    line = printed.splitlines()[-1]
    assert "cannot write there (No space left on device)" in line and "Traceback" not in printed
    assert f"step 3 is kept in {tmp_path}/out/checkpoints" in line
    resumed = warm.output([*never, "--load_checkpoint"])
    assert f"resumed from {tmp_path}/out/checkpoints/global_step3" in resumed


def full_after(step):
    """Metrics go to a disk that is full from this step on, and stay in the file's buffer when it is closed."""
    plain = MetricsFile.write

    def write(self, row):
        if row["step"] >= step:
            self._file.close()
            self._file = open("/dev/full", "w")  # noqa: SIM115 (closed by the run)
        plain(self, row)

    MetricsFile.write = write


def test_a_small_disk_that_fills_up_for_real_leaves_a_checkpoint_elsewhere(tasks, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if os.getuid() or os.system(f"mount -t tmpfs -o size=80k none {small} 2>/dev/null"):
        pytest.skip("a disk of its own needs the right to mount one")
    try:
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        command = words(tasks, "sft", small / "out", "--save_steps -1")
        said = " ".join(warm.output(command, 2, prepare=partial(full, temporary=temporary)).split())
        (kept,) = temporary.iterdir()
        assert f"--load_checkpoint --ckpt_path {kept}" in said and "make room before then" in said
        assert "Traceback" not in said and shutil.disk_usage(small).total == 80 * 1024
    finally:
        os.system(f"umount {small}")
