"""Runs on a real Ray that are stopped, or lose a process: what is said, what is left, and how they go on."""

import os
import signal
import time
from functools import partial

import psutil
import pytest

from tests import warm
from tests.cluster.machines import wait_until
from tests.cluster.phases import note_phases, wait_for
from tests.train.rl import rl_run

TWO = "--ray --actor_num_gpus_per_node 2 --eval_steps -1 --max_steps 4"


@pytest.fixture
def words(folder):
    def make(out, *more: str) -> list[str]:
        return rl_run.arguments(folder, out, "grpo", f"--reward_pretrain {folder}/judge", TWO, *more)

    return make


@pytest.fixture(scope="module")
def straight(cluster, folder, tmp_path_factory):
    """The undisturbed run."""
    out = tmp_path_factory.mktemp("straight")
    command = rl_run.arguments(folder, out, "grpo", f"--reward_pretrain {folder}/judge", TWO)
    warm.output(command, environment=cluster.environment)
    return rl_run.result(out)


@pytest.fixture
def notes(cluster, tmp_path):
    cluster.workers.prepare(partial(note_phases, tmp_path / "notes", 0.05))
    yield tmp_path / "notes"
    cluster.workers.prepare(None)


def orphans(cluster) -> list[str]:
    """Processes of runs on the Ray of these tests."""
    found = []
    for process in psutil.Process(cluster.workers.parent).children(recursive=True):
        try:
            found.append(" ".join(process.cmdline()))
        except psutil.NoSuchProcess:
            continue
    return [line for line in found if line and not line.startswith("ray::IDLE")]


def assert_no_orphan(cluster) -> None:
    wait_until(lambda: not orphans(cluster), 15, lambda: str(orphans(cluster)))


@pytest.mark.long
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_run_goes_on_as_if_there_had_been_none(cluster, words, straight, notes, tmp_path, sent):
    log = tmp_path / "log"
    process = warm.start(words(tmp_path), log=log, environment=cluster.environment)
    wait_for(notes, "update", process.is_alive)
    os.kill(process.pid, sent)
    process.join(60)
    assert process.exitcode == 128 + sent, log.read_text()
    assert "--load_checkpoint" in log.read_text()
    assert_no_orphan(cluster)
    cluster.workers.prepare(None)
    assert warm.run(words(tmp_path, "--load_checkpoint"), log=log, environment=cluster.environment) == 0
    found = rl_run.result(tmp_path)
    assert found[:2] == straight[:2] and all(
        (found[2]["model"][name] == tensor).all() for name, tensor in straight[2]["model"].items()
    )


def test_a_killed_worker_is_named_and_the_run_can_be_resumed(cluster, words, straight, notes, tmp_path):
    log = tmp_path / "log"
    process = warm.start(words(tmp_path), log=log, environment=cluster.environment)
    warm.wait_until(lambda: any((tmp_path / "checkpoints").glob("global_step*")), process)
    victim = wait_for(notes, "update", process.is_alive).process
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    process.join(60)
    took = time.monotonic() - began
    last = log.read_text().splitlines()[-1]
    assert process.exitcode == 1 and took < 30, (process.exitcode, took, log.read_text())
    assert f"pid {victim}" in last and "127.0.0.1" in last and "actor" in last and "was lost" in last, last
    assert_no_orphan(cluster)
    cluster.workers.prepare(None)
    assert warm.run(words(tmp_path, "--load_checkpoint"), log=log, environment=cluster.environment) == 0
    rl_run.assert_identical(rl_run.result(tmp_path), straight)


@pytest.mark.long
def test_with_a_restart_the_end_is_that_of_an_undisturbed_run(cluster, words, straight, notes, tmp_path):
    log = tmp_path / "log"
    process = warm.start(words(tmp_path, "--max_restarts 1"), log=log, environment=cluster.environment)
    warm.wait_until(lambda: any((tmp_path / "checkpoints").glob("global_step*")), process)
    os.kill(wait_for(notes, "scoring", process.is_alive).process, signal.SIGKILL)
    process.join(120)
    assert process.exitcode == 0, log.read_text()
    assert "was lost" in log.read_text() and "restart 1 of 1" in log.read_text()
    rl_run.assert_identical(rl_run.result(tmp_path), straight)
    assert_no_orphan(cluster)


@pytest.mark.parametrize(
    "more, environment, said",
    [
        ("--actor_num_gpus_per_node 9", {}, ["need 9 GPUs", "has one node, with 8", "--actor_num_gpus_per_node"]),
        ("", {"RAY_AUTH_TOKEN_PATH": "/dev/null"}, ["token"]),
        ("", {"RAY_ADDRESS": "127.0.0.1:9"}, ["127.0.0.1:9 (RAY_ADDRESS)"]),
    ],
)
def test_a_mistake_is_one_line(cluster, words, tmp_path, more, environment, said):
    began = time.monotonic()
    printed = warm.output(words(tmp_path / "out", more), 2, environment=cluster.environment | environment)
    last = printed.splitlines()[-1]
    assert last.startswith("trimtab grpo: error:") and all(word in last for word in said), printed
    assert "Traceback" not in printed and time.monotonic() - began < 60


def short_of_room_in_one(room: int) -> None:
    """In the process of rank 1 passes of more tokens do not fit."""
    from trimtab.models import policy

    plain = policy.Policy.forward

    def forward(self, batch, **settings):
        import torch
        import torch.distributed as dist

        if dist.is_initialized() and dist.get_rank() == 1 and self.training and len(batch.ids_T) > room:
            raise torch.OutOfMemoryError("tried to allocate activations")
        return plain(self, batch, **settings)

    policy.Policy.forward = forward


@pytest.mark.long
def test_one_process_without_room_and_all_begin_anew(cluster, words, straight, tmp_path):
    cluster.workers.prepare(partial(short_of_room_in_one, 30))
    try:
        printed = warm.output(words(tmp_path), environment=cluster.environment)
    finally:
        cluster.workers.prepare(None)
    assert "begun anew in passes of at most" in printed
    rewards = [[row["reward"] for row in run[0] if "reward" in row] for run in (rl_run.result(tmp_path), straight)]
    assert rewards[0] == pytest.approx(rewards[1], rel=1e-3, abs=1e-5)
