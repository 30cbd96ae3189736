"""The embedded game with vLLM engines, through the command: on Ray, ahead of updates, and killed inside episodes."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.train.rl.environment_run import (
    BOUND,
    PROMPTS,
    SAMPLES,
    arguments,
    check_ledger,
    told_again,
    write_game,
    write_task,
)
from tests.train.rl.rl_run import rows
from tests.train.rl.test_environment_ways import check_versions
from tests.vllm.test_ray import ALONE, SECONDS, engines_of, environment, may_have_a_namespace  # noqa: F401 (a fixture)
from trimtab.rollout.vllm.engine import VLLMEngine
from trimtab.train.rl.experience import Experience

pytestmark = pytest.mark.skipif(not may_have_a_namespace(), reason="no PID namespace can be had here")

ON_RAY = "--ray --vllm_num_engines 1 --rollout_slots 6"
AHEAD = f"--async_train --async_staleness {BOUND} --partial_rollout"
KILLS, EPISODES, NEAR = 10, 8, 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


def command(folder: Path, out: Path, game: Path | str, *more: str) -> list[str]:
    return [*ALONE, sys.executable, "-m", "trimtab.cli.main", *arguments(folder, out, game, ON_RAY, *more)]


def trained(out: Path) -> list[dict]:
    return [row for row in rows(out) if row["step"]] if (out / "metrics.jsonl").exists() else []


@pytest.mark.parametrize("more", ["", AHEAD], ids=["in turn", "ahead"])
def test_the_embedded_game_on_ray(folder, tmp_path, environment, more):  # noqa: F811
    out = tmp_path / "out"
    words = command(folder, out, "trimtab:guess", more)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    found = trained(out)
    assert sum(row["samples"] for row in found) == PROMPTS * SAMPLES
    for row in found:
        assert 1 <= row["turns"] <= 3 and row["failed_episodes"] == row["begun_anew"] == 0
        assert row["log_prob_gap_fresh" if more else "log_prob_gap"] < 1e-4
    if more:
        check_ledger(out)


class Killed:
    """A command that is killed again and again, in three ways, and each time goes on."""

    def __init__(self, words: list[str], out: Path, environment: dict[str, str], log: Path):  # noqa: F811
        self.words, self.out, self.environment, self.log = words, out, environment, log
        self.deadline = time.monotonic() + 6 * SECONDS
        self.run = self.start()

    def start(self) -> subprocess.Popen:
        going_on = ["--load_checkpoint"] if (self.out / "checkpoints" / "latest").exists() else []
        with self.log.open("a") as log:
            return subprocess.Popen(
                [*self.words, *going_on], env=self.environment, stdout=log, stderr=subprocess.STDOUT
            )

    def has_done(self, iterations: int) -> None:
        while len(trained(self.out)) < iterations:
            if self.run.poll() == 2 and "no Ray on this machine" in self.log.read_text().splitlines()[-1]:
                self.run = self.start()  # a busy machine, where it did not come up in its half minute
            assert self.run.poll() is None and time.monotonic() < self.deadline, self.log.read_text()[-4000:]
            time.sleep(0.05)

    def driver(self) -> int:
        """The command inside its namespace, as it is called from here."""
        children = Path(f"/proc/{self.run.pid}/task/{self.run.pid}/children").read_text().split()
        return int(children[0])

    def kill(self, way: str) -> None:
        if way == "engine":
            engines = engines_of(self.environment["RAY_AUTH_TOKEN_PATH"])
            assert engines, self.log.read_text()[-4000:]
            os.kill(engines[0], signal.SIGKILL)
            return
        os.kill(self.driver(), signal.SIGTERM if way == "stop" else signal.SIGKILL)
        self.run.wait(SECONDS)
        self.run = self.start()


@pytest.mark.long
def test_ten_kills_inside_episodes_on_ray_lose_nothing(folder, tmp_path, environment):  # noqa: F811
    """Bound and ledger hold, and turns that were recorded are told to new instances, which answer alike."""
    out, journal, log = tmp_path / "out", tmp_path / "journal", tmp_path / "log"
    game = write_game(tmp_path, slow=0.15, journal=journal)
    words = command(folder, out, game, AHEAD, f"--num_episodes {EPISODES} --max_restarts {KILLS}")
    killed, moments = Killed(words, out, environment, log), random.Random(7)
    try:
        for kill in range(KILLS):
            killed.has_done(kill + 1)
            time.sleep(moments.uniform(0.1, 0.8))
            killed.kill(("engine", "stop", "engine", "kill", "stop")[kill % 5])
        assert killed.run.wait(SECONDS) == 0, log.read_text()[-4000:]
    finally:
        killed.run.kill()
    check_ledger(out, EPISODES * PROMPTS)
    assert sum(row.get("begun_anew", 0) for row in trained(out)) == 0
    assert told_again(journal) > 0
    assert all(row["log_prob_gap_fresh"] < 1e-4 for row in trained(out))


def test_every_token_of_an_episode_has_the_log_prob_of_the_weights_that_drew_it(
    folder, tmp_path, in_command, monkeypatch
):
    sent, take = {}, VLLMEngine.weights_changed
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    sent[0] = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def weights_changed(engine, version):
        take(engine, version)
        sent[version] = sent[0] | {name: tensor.clone() for name, tensor in engine.weights.tensors()}

    monkeypatch.setattr(VLLMEngine, "weights_changed", weights_changed)
    game, recording = write_game(tmp_path, slow=0.02), tmp_path / "recording"
    more = f"--rollout_engine vllm --rollout_slots 6 {AHEAD} --num_episodes 2 --record {recording}"
    assert in_command(arguments(folder, tmp_path / "out", game, more)) == 0
    check_ledger(tmp_path / "out", 2 * PROMPTS)
    several = 0
    for path in sorted(recording.glob("*.safetensors")):
        experience = Experience.from_tensors(load_file(path))
        for sample in range(len(experience)):
            several += check_versions(experience, sample, sent, model, NEAR)
    assert several > 0, "some were played by two policies"
    assert torch.isfinite(experience.sampled_N).all()
