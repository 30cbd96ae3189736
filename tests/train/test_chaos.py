"""Kills and signals, at every file operation and at random ones, over all jobs, alone and as two processes.

What comes out after going on is the run that nobody disturbed: metrics, weights and optimizer, bit for bit, in a folder
without leftovers. Where a failure is drawn at random, its seed is in the test's name and in what it prints.
"""

import os
import random
import signal
import sys
import time
from functools import cache, partial

import pytest
from safetensors.torch import load_file

from tests import warm
from tests.train import every_loop
from tests.train.job_run import assert_same_tensors, rows, weights
from tests.train.jobs import JOBS, job_words, write_job
from trimtab.files import is_unfinished
from trimtab.models.pretrained import check_model_folder

pytestmark = pytest.mark.long

SUPERVISED = ["rm", "prm hard", "dpo", "kto", "kd"]
ALL = ["sft", *SUPERVISED, "ppo", "lora", "reinforce", "rloo", "tail", "tail lora"]
SIGNALS = [signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


@pytest.fixture(scope="module")
def prepared(tasks, tmp_path_factory):
    """The folder of a job's models and data, made once."""

    @cache
    def make(job):
        if job not in SUPERVISED:
            return tasks
        folder = tmp_path_factory.mktemp("task")
        write_job(folder, job, rows=8, attention_dropout=0.1)
        return folder

    return make


def words(folder, job, out):
    if job not in SUPERVISED:
        more = "--max_samples 16 --max_ckpt_num 2 --save_hf_ckpt" if job == "sft" else ""
        return every_loop.words(folder, job, out, more)
    fixed = (
        f"{JOBS[job].verb} --pretrain {folder}/model --dataset {folder}/train.jsonl --max_len 40 "
        f"--train_batch_size 4 --micro_train_batch_size 2 --max_epochs 2 --save_steps 1 --learning_rate 1e-2 "
        f"--lr_warmup_ratio 0 --save_path {out} --ckpt_path {out}/checkpoints"
    )
    return [*fixed.split(), *job_words(folder, job).split()]


def result(out):
    """Everything two equal runs must agree on: metrics, the model, and the last checkpoint at --save_steps."""
    newest = every_loop.store(out / "checkpoints").latest()
    tensors = {str(path.relative_to(newest)): load_file(path) for path in sorted(newest.rglob("*.safetensors"))}
    return rows(out), weights(out), newest.name, tensors


def assert_undisturbed(out, expected, what, *, asked=False):
    """`asked`: a signal may have made the last checkpoint another one, inside an iteration or of a later step."""
    found = result(out)
    assert found[0] == expected[0], what
    assert_same_tensors(found[1], expected[1])
    if not asked:
        assert found[2] == expected[2] and found[3].keys() == expected[3].keys(), what
        for name, tensors in expected[3].items():
            assert_same_tensors(found[3][name], tensors)
    assert not is_unfinished(out) and not list(out.glob(".writing-*")), what
    assert not [path for path in (out / "checkpoints").iterdir() if path.name.startswith((".writing-", ".old-"))], what
    if not (out / "adapter_config.json").exists():
        check_model_folder(str(out))


def at_operation(out, number, sent, counted=None):
    """Send this process a signal before it touches a file of the run for the time of this `number`."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the tests were started with
    done = 0
    counter = None if counted is None else os.open(counted, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def hook(event, given):
        nonlocal done
        if event not in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"):
            return
        if event == "open" and given[1] is not None and not set(str(given[1])) & set("wax+"):
            return
        if isinstance(given[0], str | os.PathLike) and os.fspath(given[0]).startswith(str(out)):
            if counter is not None:
                os.write(counter, b".")
            if done == number:
                os.kill(os.getpid(), sent)
            done += 1

    sys.addaudithook(hook)


@pytest.fixture(scope="module")
def straight(prepared, tmp_path_factory):
    """The undisturbed run of each job and what it does to files, made once."""

    @cache
    def make(job, size=1):
        out = tmp_path_factory.mktemp("straight") / "out"
        counted = out.with_name("counted")
        command = words(prepared(job), job, out)
        if size == 1:
            assert warm.run(command, prepare=partial(at_operation, out, -1, 0, counted)) == 0
        else:
            assert warm.run_world(command, size) == [0] * size
        return result(out), counted.stat().st_size if counted.exists() else 60

    return make


EVERY = {"sft": 3, "ppo": 12, "tail": 16}  # of so many operations one is disturbed


@pytest.mark.parametrize("job", EVERY)
def test_killed_before_every_file_operation_and_resumed_is_undisturbed(prepared, straight, tmp_path, job):
    expected, operations = straight(job)
    points = range(0, operations, EVERY[job])
    for number in points:
        out = tmp_path / str(number)
        command = words(prepared(job), job, out)
        code = warm.run(command, prepare=partial(at_operation, out, number, signal.SIGKILL))
        assert code == -signal.SIGKILL, f"operation {number} was not reached"
        assert warm.run([*command, "--load_checkpoint"]) == 0, f"killed before operation {number}"
        assert_undisturbed(out, expected, f"killed before operation {number}")
    print(f"{job}: killed before {len(points)} of {operations} file operations")


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("job", ALL)
def test_disturbed_at_random_and_resumed_is_undisturbed(prepared, straight, tmp_path, job, seed):
    expected, operations = straight(job)
    chance = random.Random(f"{job} {seed}")
    command, told, asked = words(prepared(job), job, tmp_path), [], False
    for _ in range(2):
        number, sent = chance.randrange(operations), chance.choice(SIGNALS)
        asked = asked or sent != signal.SIGKILL
        resumed = ["--load_checkpoint"] if told else []
        code = warm.run([*command, *resumed], prepare=partial(at_operation, tmp_path, number, sent))
        told.append(f"signal {sent} before operation {number}: exit code {code}")
        assert code in (0, -sent, 128 + sent), told
    print(job, seed, *told, sep="\n  ")
    assert warm.run([*command, "--load_checkpoint"]) == 0, told
    assert_undisturbed(tmp_path, expected, told, asked=asked)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("job", ["sft", "ppo"])
def test_two_processes_of_which_one_is_disturbed_and_resumed_are_undisturbed(prepared, straight, tmp_path, job, seed):
    expected, operations = straight(job, 2)
    chance = random.Random(f"two {job} {seed}")
    rank, sent = chance.randrange(2), chance.choice(SIGNALS)
    number = chance.randrange(operations if rank == 0 else 8)
    told = f"rank {rank}, signal {sent} before operation {number}"
    command = words(prepared(job), job, tmp_path)
    processes = warm.start_world(command, 2, prepare={rank: partial(at_operation, tmp_path, number, sent)})
    deadline = time.monotonic() + 60
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        assert not process.is_alive(), f"{told}: does not end"
    print(job, seed, told, [process.exitcode for process in processes])
    assert warm.run_world([*command, "--load_checkpoint"], 2) == [0, 0], told
    assert_undisturbed(tmp_path, expected, told, asked=sent != signal.SIGKILL)
