"""Asynchronous runs on Ray: engines of their own write while the policy learns, are sent its weights, and are lost."""

import os
import re
import signal
from functools import partial
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from tests import warm
from tests.cluster.engines_apart import ON_RAY, build_engines_apart, without_vllm
from tests.cluster.machines import wait_until
from tests.cluster.test_faults import assert_no_orphan
from tests.train.rl import rl_run
from tests.train.rl.async_run import BOUND, check_ledger
from trimtab.train.metrics import read_rows
from trimtab.train.rl.experience import Experience

EPISODES = 4
PLACES = rl_run.PROMPTS * EPISODES
ASYNC = f"--async_train --async_staleness {BOUND} --num_episodes {EPISODES} --save_steps 1 --eval_steps -1"
SLOWLY = 0.02  # seconds a token


class Run:
    """A command, its engines, and what it leaves."""

    def __init__(self, cluster, folder: Path, out: Path):
        self.cluster, self.folder, self.out, self.log = cluster, folder, out, out / "log"
        self.notes = out / "engines"
        self.notes.mkdir(parents=True)
        self.write_in(SLOWLY)

    def write_in(self, seconds: float) -> None:
        """A token."""
        self.cluster.workers.prepare(partial(build_engines_apart, seconds, self.notes))

    def start(self, *more: str, layout: str = ON_RAY) -> None:
        words = rl_run.arguments(self.folder, self.out, "grpo", layout, ASYNC, *more)
        environment = self.cluster.environment
        self.process = warm.start(words, log=self.log, environment=environment, prepare=without_vllm)

    def end(self, seconds: float = 120) -> int:
        self.process.join(seconds)
        assert not self.process.is_alive(), self.said()
        assert_no_orphan(self.cluster)
        return self.process.exitcode

    def said(self) -> str:
        return self.log.read_text()

    def has_done(self, iterations: int) -> None:
        def done() -> bool:
            assert self.process.is_alive(), self.said()
            return len(self.rows()) > iterations

        wait_until(done, 90, self.said)

    def rows(self) -> list[dict]:
        return read_rows(self.out / "metrics.jsonl") if (self.out / "metrics.jsonl").exists() else []

    def engines(self) -> list[int]:
        """Their processes, the latest last."""
        return [int(path.name) for path in sorted(self.notes.iterdir(), key=os.path.getmtime)]

    def builds_another(self) -> None:
        seen = len(self.engines())
        wait_until(lambda: len(self.engines()) > seen, 60, self.said)

    def trainer(self) -> int:
        ours = psutil.Process(self.cluster.workers.parent).children(recursive=True)
        found = [p.pid for p in ours if p.name().startswith("ray::RayWorker") and p.pid not in self.engines()]
        assert len(found) == 1, found
        return found[0]


@pytest.fixture
def run(cluster, folder, tmp_path):
    made = Run(cluster, folder, tmp_path)
    yield made
    made.process.kill()
    cluster.workers.prepare(None)


def versions_of_answers(recorded: Path) -> list[list[int]]:
    """By which weights the tokens of every recorded answer were drawn."""
    found = []
    for path in sorted(recorded.glob("*.safetensors")):
        experience = Experience.from_tensors(load_file(path))
        assert experience.versions_N is not None
        found += [part.tolist() for part in experience.versions_N.split(experience.lengths_S.tolist())]
    return found


@pytest.mark.parametrize(
    "how", [pytest.param("--partial_rollout", id="in flight"), pytest.param("", id="drained", marks=pytest.mark.long)]
)
def test_engines_write_while_the_policy_learns(run, how):
    run.write_in(0.2)  # longer than an update takes
    run.start(how, f"--record {run.out}/recorded --max_steps 3 --eval_steps 2")
    assert run.end() == 0, run.said()
    check_ledger(run.out, places=3 * rl_run.A_ROLLOUT)
    rows = run.rows()
    assert max(row["age_max"] for row in rows[1:]) > 0 and all(0 <= row["waiting"] < 1 for row in rows[1:])
    assert [row["step"] for row in rows if "eval_pass_1" in row] == [0, 2, 3]
    answers = versions_of_answers(run.out / "recorded")
    assert all(versions == sorted(versions) for versions in answers)
    several = sum(len(set(versions)) > 1 for versions in answers)
    assert several > 0 if how else several == 0


@pytest.mark.long
def test_the_built_in_engine_where_the_policy_is(run):
    run.start(layout="--ray --actor_num_gpus_per_node 2 --colocate_all_models")
    assert run.end() == 0, run.said()
    check_ledger(run.out, places=PLACES)


@pytest.mark.long
@pytest.mark.parametrize("how", ["--partial_rollout", ""], ids=["in flight", "drained"])
def test_an_engine_that_dies_is_replaced_and_its_groups_begin_anew(run, how):
    run.start(how, "--max_restarts 3")
    for iterations in (1, 3, 5):
        run.has_done(iterations)
        living = [process for process in run.engines() if psutil.pid_exists(process)]
        os.kill(living[iterations % 4 // 2], signal.SIGKILL)  # the older one, the newer one, the older one
        run.builds_another()
    assert run.end() == 0, run.said()
    assert run.said().count("takes its place") == 3
    check_ledger(run.out, places=PLACES)


@pytest.mark.long
def test_without_restarts_a_lost_engine_ends_the_run_which_then_goes_on(run):
    run.start("--partial_rollout")
    run.has_done(2)
    victim = run.engines()[0]
    os.kill(victim, signal.SIGKILL)
    assert run.end() == 1, run.said()
    assert f"pid {victim}" in run.said() and "was lost" in run.said()
    run.start("--partial_rollout --load_checkpoint")
    assert run.end() == 0, run.said()
    check_ledger(run.out, places=PLACES)


@pytest.mark.long
def test_a_lost_trainer_is_begun_anew_with_what_is_under_way(run):
    run.start("--partial_rollout --max_restarts 2")
    for iterations in (2, 5):
        run.has_done(iterations)
        os.kill(run.trainer(), signal.SIGKILL)
        run.builds_another()
    assert run.end() == 0, run.said()
    assert "restart 2 of 2" in run.said()
    check_ledger(run.out, places=PLACES)


@pytest.mark.long
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("how", ["--partial_rollout", ""], ids=["in flight", "drained"])
def test_a_signal_saves_what_is_under_way(run, how, sent):
    run.start(how)
    run.has_done(2)
    os.kill(run.process.pid, sent)
    assert run.end() == 128 + sent, run.said()
    run.start(how, "--load_checkpoint")
    assert run.end() == 0, run.said()
    check_ledger(run.out, places=PLACES)


@pytest.mark.long
@pytest.mark.parametrize("stopped", [True, False], ids=["its process is stopped", "it never comes back"])
def test_an_engine_that_hangs_ends_the_run_with_a_table_and_a_checkpoint(run, stopped):
    run.start("--partial_rollout --async_timeout 5")
    run.has_done(2)
    victim = run.engines()[0]
    if stopped:
        os.kill(victim, signal.SIGSTOP)
    else:
        (run.notes / str(victim)).write_text("hang")
    assert run.end() == 1, run.said()
    assert "--async_timeout" in run.said() and "--load_checkpoint" in run.said()
    if not stopped:
        assert re.search("its (next|first) token", run.said())
    assert not psutil.pid_exists(victim)
    run.start("--partial_rollout --load_checkpoint")
    assert run.end() == 0, run.said()
    check_ledger(run.out, places=PLACES)
