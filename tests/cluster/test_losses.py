"""A cluster of three machines and a spare that loses nodes, links and processes in the middle of everything a run does:
what is lost is named in time, nothing is left running, and the end is that of a run that nobody disturbed."""

import os
import random
import re
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.machines import wait_until
from tests.cluster.phases import PHASES, note_phases, noted, wait_for
from tests.train.rl import rl_run

pytestmark = pytest.mark.long

# Every machine has a model: the policy and its reference on two of them, the judge on the third.
SPREAD = (
    "--ray --actor_num_nodes 2 --actor_num_gpus_per_node 1 --ref_num_nodes 2 --ref_num_gpus_per_node 1 "
    "--colocate_actor_ref --reward_num_gpus_per_node 1 --eval_steps -1 --save_steps 1"
)
NAMED_WITHIN = 30  # seconds
DISTURBANCES = [(phase, how) for phase in PHASES for how in ("node killed", "link cut")]


class Run:
    """A command on the head, and what its workers note."""

    def __init__(self, machines, folder: Path, out: Path, *more: str):
        self.machines, self.out, self.notes, self.log = machines, out, out / "notes", out / "log"
        out.mkdir(parents=True, exist_ok=True)
        machines.warm.prepare(partial(note_phases, self.notes))
        judge = f"--reward_pretrain {folder}/judge"
        words = rl_run.arguments(folder, out, "grpo", judge, SPREAD, "--num_episodes 3", *more)
        command = [sys.executable, "-m", "trimtab.cli.main", *words]
        self.began = len(self.said())
        self.process = machines.head.popen(command, self.log, RAY_ADDRESS=machines.address)

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def iterations(self) -> int:
        """How many it has told of last."""
        return int((re.findall(r"^grpo (\d+)/", self.said(), re.MULTILINE) or [0])[-1])

    def is_running(self) -> bool:
        return self.process.poll() is None

    def begins(self, phase: str):
        return wait_for(self.notes, phase, self.is_running, address=None, seconds=180)

    def end(self, seconds: float) -> int:
        code = self.process.wait(seconds)
        self.machines.assert_no_orphan()
        return code


@pytest.fixture(scope="module")
def three(machines):
    machines.start(0, 1, 2, cpus=1, gpus=1)
    return machines


@pytest.fixture(scope="module")
def straight(three, folder, tmp_path_factory):
    run = Run(three, folder, tmp_path_factory.mktemp("straight"))
    assert run.end(300) == 0, run.said()
    used = {doing.address for doing in noted(run.notes)}
    assert used == {machine.address for machine in three.all[:3]}, "roles on all machines"
    return rl_run.result(run.out)


def victim_of(three, run, phase):
    """A machine other than the head's that is in the middle of a phase, or waits for one that is."""
    doing = run.begins(phase)
    found = next(machine for machine in three.all[:3] if machine.address == doing.address)
    return found if found is not three.head else three.all[1]


@pytest.mark.parametrize("phases", [("rollout", "scoring", "update"), ("weight sync", "save")], ids=" and ".join)
def test_what_is_lost_in_any_phase_is_named_and_the_run_resumed(three, folder, straight, tmp_path, phases):
    told, more = [], ""
    for phase, how in (disturbance for disturbance in DISTURBANCES if disturbance[0] in phases):
        run = Run(three, folder, tmp_path, more)
        if not more:
            wait_until(lambda: any((tmp_path / "checkpoints").glob("global_step*")), 180, run.said)
        victim = victim_of(three, run, phase)
        began = time.monotonic()
        victim.kill() if how == "node killed" else victim.cut()
        code = run.process.wait(60)
        took = time.monotonic() - began
        said = run.said().splitlines()[-1]
        told.append(f"{phase}, {how}: {took:.1f} s, exit code {code}: {said}")
        print(told[-1], flush=True)
        if how == "link cut":
            victim.mend()
            victim.kill()  # Ray does not take a node in again that was away
        assert code == 1 and took < NAMED_WITHIN and "lost" in said and victim.address in said, told
        assert "--load_checkpoint" in said, told
        three.assert_no_orphan()
        victim.start(cpus=1, gpus=1)
        more = "--load_checkpoint"
    last = Run(three, folder, tmp_path, more)
    assert last.end(300) == 0, last.said()
    rl_run.assert_identical(rl_run.result(tmp_path), straight)


def test_with_restarts_a_run_outlives_losses_in_every_phase(three, folder, straight, tmp_path):
    run = Run(three, folder, tmp_path, f"--max_restarts {len(DISTURBANCES)} --restart_wait 120")
    for number, (phase, how) in enumerate(DISTURBANCES, 1):
        victim = victim_of(three, run, phase)
        began = time.monotonic()
        victim.kill() if how == "node killed" else victim.cut()
        line = f"restart {number} of {len(DISTURBANCES)}"
        wait_until(lambda line=line: line in run.said() or not run.is_running(), 60, run.said)
        print(f"{phase}, {how}: {time.monotonic() - began:.1f} s", flush=True)
        assert run.is_running(), run.said()
        if how == "link cut":
            victim.mend()
            victim.kill()
        victim.start(cpus=1, gpus=1)
    assert run.end(400) == 0, run.said()
    rl_run.assert_identical(rl_run.result(tmp_path), straight)


@pytest.mark.parametrize("seed", [1])
def test_twenty_random_kills_leave_no_trace_in_the_end(three, folder, straight, tmp_path, seed):
    chance, kills = random.Random(seed), 20
    run = Run(three, folder, tmp_path, f"--max_restarts {kills} --restart_wait 120")
    for number in range(1, kills + 1):
        run.begins("rollout")
        # At any moment of the iteration; near the end at its beginning, so that the run lasts for all of the kills.
        time.sleep(chance.uniform(0, 5) if run.iterations() < 5 else 0.1)
        machine = chance.choice(three.all[:3])
        os.kill(chance.choice(machine.roles()), signal.SIGKILL)
        line = f"restart {number} of {kills}"
        took = wait_until(lambda line=line: line in run.said() or not run.is_running(), 60, run.said)
        assert run.is_running(), run.said()
        print(f"kill {number}, on {machine.address}: named after {took:.1f} s", flush=True)
    assert run.end(600) == 0, run.said()
    rl_run.assert_identical(rl_run.result(tmp_path), straight)


def test_a_machine_whose_folders_are_its_own_is_refused_before_anything_is_loaded(three, folder, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    victim = three.all[2]
    if victim.node is not None:
        victim.kill()
    victim.start(cpus=1, gpus=1, apart=[shared])
    run = Run(three, folder, tmp_path / "run", f"--save_path {shared} --ckpt_path {shared}/checkpoints")
    assert run.end(120) == 2, run.said()
    assert f"node {victim.address}" in run.said() and "put it on a file system that all nodes share" in run.said()
    assert not noted(run.notes), "nothing was built"
    victim.kill()
    victim.start(cpus=1, gpus=1)
