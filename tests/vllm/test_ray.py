"""Engines as processes of a Ray cluster: the command, with a Ray of its own in a PID namespace of its own."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.train.rl.async_run import check_ledger
from tests.train.rl.rl_run import arguments, rows, write_task
from tests.vllm.conftest import SIZES
from trimtab.train.rl.experience import Experience

ALONE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
ON_RAY = "--ray --vllm_num_engines 2 --rollout_slots 16 --enable_prefix_caching"
SECONDS = 600


def may_have_a_namespace() -> bool:
    return shutil.which("unshare") is not None and subprocess.run([*ALONE, "true"], capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not may_have_a_namespace(), reason="no PID namespace can be had here")


@pytest.fixture
def environment(tmp_path):
    token = tmp_path / "token"
    token.write_text(os.urandom(32).hex())
    told = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "PYTHONPATH": str(Path(__file__).parents[2])}
    return os.environ | told | {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture
def task(tmp_path):
    return write_task(tmp_path, tie_word_embeddings=True, **SIZES)


def command(task: Path, out: Path, *words: str) -> list[str]:
    return [*ALONE, sys.executable, "-m", "trimtab.cli.main", *arguments(task, out, "grpo", ON_RAY, *words)]


def engines_of(token: str) -> list[int]:
    """Processes of the run with this token that hold engines: they have loaded vLLM's kernels."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_worker = (path / "cmdline").read_bytes().startswith(b"ray::RayWorker")
            is_ours = is_worker and token.encode() in (path / "environ").read_bytes()
            if is_ours and "/vllm/" in (path / "maps").read_text():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def test_grpo_on_ray_with_two_engines(task, tmp_path, environment):
    out = tmp_path / "out"
    done = subprocess.run(
        command(task, out, "--max_steps 2"), env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows(out)
    assert [row["step"] for row in found] == [0, 1, 2]
    assert all(row["log_prob_gap"] < 1e-4 for row in found[1:])


def test_an_engine_that_dies_is_replaced_and_answers_from_the_current_weights(task, tmp_path, environment):
    out = tmp_path / "out"
    log = (tmp_path / "log").open("w+")
    run = subprocess.Popen(
        command(task, out, "--max_restarts 1"), env=environment, stdout=log, stderr=subprocess.STDOUT
    )
    try:
        deadline = time.monotonic() + SECONDS
        while not (out / "metrics.jsonl").exists() or len(rows(out)) < 2:
            assert run.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.2)
        os.kill(engines_of(environment["RAY_AUTH_TOKEN_PATH"])[0], signal.SIGKILL)
        assert run.wait(SECONDS) == 0, (tmp_path / "log").read_text()
    finally:
        if run.poll() is None:
            run.kill()
        log.close()
    found = rows(out)
    assert found[-1]["step"] == 5 and all(row["log_prob_gap"] < 1e-4 for row in found[1:])
    assert "engine 1 of 1 takes its place" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("how", ["--partial_rollout", ""], ids=["in flight", "drained"])
def test_engines_write_while_the_policy_learns(task, tmp_path, environment, how):
    """The weights that arrive are compared with the trainer's after every update, as always."""
    out = tmp_path / "out"
    done = subprocess.run(
        command(task, out, f"--async_train --async_staleness 2 --generate_max_len 64 --record {out}/recorded", how),
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_ledger(out)
    versions = [
        part.tolist()
        for path in sorted((out / "recorded").glob("*.safetensors"))
        for experience in [Experience.from_tensors(load_file(path))]
        for part in experience.versions_N.split(experience.lengths_S.tolist())
    ]
    assert all(own == sorted(own) for own in versions)
    assert how or all(len(set(own)) == 1 for own in versions)


@pytest.mark.parametrize(
    "split",
    [
        "--ds_tensor_parallel_size 2",
        "--ring_attn_size 2",
        "--ds_tensor_parallel_size 2 --lora_rank 4 --vllm_sync_lora merged",
        "--ds_tensor_parallel_size 2 --lora_rank 4 --vllm_sync_lora adapter",
    ],
)
def test_the_weights_of_a_split_actor_reach_an_engine_whole(task, tmp_path, environment, split):
    """Two processes hold the policy, which has one part of the samples."""
    out = tmp_path / "out"
    done = subprocess.run(
        command(task, out, "--vllm_num_engines 1 --actor_num_gpus_per_node 2 --max_steps 2", split),
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows(out)
    assert [row["step"] for row in found] == [0, 1, 2]
    assert all(row["log_prob_gap"] < 1e-4 and row["grad_norm"] > 0 for row in found[1:])
