"""`ray job submit` as docs/cluster.md shows it, against a head on a machine of its own: output, stop, failure."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.machines import wait_until
from tests.train.rl import rl_run

pytestmark = pytest.mark.long

PROJECT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def head(machines):
    machines.head.start(cpus=2, gpus=2, dashboard=True)
    return machines.head


@pytest.fixture
def working_directory(folder, tmp_path):
    """The project and the task, as somebody would have them; and a folder that all nodes share beside it."""
    place = tmp_path / "work"
    shutil.copytree(PROJECT / "trimtab", place / "trimtab", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("model", "judge"):
        shutil.copytree(folder / name, place / name)
    shutil.copy(folder / "prompts.jsonl", place)
    shutil.copy(folder / "test.jsonl", place)
    return place


RAY = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]
DASHBOARD = "--address=http://127.0.0.1:8265"


def submit(head, here: Path, name: str, out: str, *more: str) -> list[str]:
    """The document's form."""
    words = rl_run.arguments(Path("."), Path(out), "grpo", "--eval_steps -1", *more)[1:]
    longer = '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "20"}}'
    return [
        *(*RAY, "job", "submit", DASHBOARD, "--working-dir", str(here), "--submission-id", name),
        *("--runtime-env-json", longer, "--", sys.executable, "-m", "trimtab.cli.train_ppo_ray"),
        *("--advantage_estimator", "group_norm", "--actor_num_gpus_per_node", "2", *words),
    ]


def test_a_submitted_run_trains_and_is_stopped_with_a_checkpoint(head, working_directory, tmp_path, machines):
    log, out = tmp_path / "log", tmp_path / "out"
    client = head.popen(submit(head, working_directory, "first", str(out), "--num_episodes 200"), log)
    wait_until(lambda: re.search(r"ppo [1-9]\d*/", log.read_text()) or client.poll() is not None, 180, log.read_text)
    assert client.poll() is None, log.read_text()
    assert "ray job stop first" in log.read_text(), "how to stop it is said"
    stop = head.command([*RAY, "job", "stop", DASHBOARD, "first"])
    done = subprocess.run(stop, env=machines.environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    assert client.wait(60) == 0, log.read_text()
    assert list((out / "checkpoints").glob("global_step*")), log.read_text()
    assert "stopped" in log.read_text() and "--load_checkpoint" in log.read_text(), log.read_text()
    wait_until(lambda: not any(machine.roles() for machine in machines.all), 15, lambda: str(machines.workers()))


@pytest.mark.parametrize(
    "out, more, said",
    [
        ("{}/out", "--actor_num_gpus_per_node 3", "need 3 GPUs"),
        ("relative", "", "inside Ray's copy of the working directory"),
    ],
)
def test_a_failing_one_tells_its_own_exit_code(head, working_directory, tmp_path, machines, out, more, said):
    log = tmp_path / "log"
    name = re.sub(r"\W", "", said)
    client = head.popen(submit(head, working_directory, name, out.format(tmp_path), more), log)
    assert client.wait(180) == 1, log.read_text()
    assert said in log.read_text() and "failed with exit code 2" in log.read_text(), log.read_text()
