"""The recipes for clusters: whole ones pass the checks and ask for the layout they describe, tiny ones are small."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.examples.test_examples import EXAMPLES, command, folder, run  # noqa: F401 (a fixture)
from trimtab.config.parser import parse
from trimtab.config.resolved_config import check, refuse_unimplemented, settle
from trimtab.config.rl_jobs import PPOOptions
from trimtab.plan.layouts import layout_of

UNITS = ["actor", "reference", "critic", "reward"]
HERE = {"PYTHONPATH": str(EXAMPLES.parent)}
LAYOUTS = {  # recipe: units and processes of every pool, engines and their devices
    "ray_hybrid": ([(4, 8)], (8, 1)),
    "ray_70b": ([(2, 16), (2, 16)], (4, 4)),
    "ray_rewards": ([(2, 2), (2, 2)], (4, 1)),
    "ray_remote_reward": ([(2, 2), (1, 2)], (4, 1)),
}
KNOWN = ("vLLM's log-probs are not quite", "--deepspeed_enable_sleep")  # said of every run of that kind

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="the recipes are bash scripts")


def options_of(name: str, **settings: str):
    module, words = command(name, **settings)
    assert module == "trimtab.cli.train_ppo_ray" and os.access(EXAMPLES / f"{name}.sh", os.X_OK)
    return settle(parse(PPOOptions, ["--ray", *words]))


def layout(options):
    units = [unit for unit in UNITS if unit != "reward" or options.reward_pretrain]
    return layout_of(options, units)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_whole_recipe_asks_for_its_layout(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options, warnings = options_of(name)
    said = [line for line in warnings + check(options) if not line.startswith(KNOWN)]
    assert said == []
    refuse_unimplemented(options)
    pools, engines = LAYOUTS[name]
    asked = layout(options)
    assert [(len(pool.units), pool.size) for pool in asked.pools] == pools
    assert (asked.engines.number, asked.engines.tensor_parallel) == engines
    assert (asked.engines.pool is not None) == options.colocate_all_models == (name == "ray_hybrid")
    assert options.bf16 and options.zero_stage == 3 and os.path.isabs(options.save_path)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_tiny_recipe_is_small_and_needs_no_vllm(name, folder):  # noqa: F811
    options, _ = options_of(name, TINY="1", TINY_FOLDER=str(folder))
    assert not any("micro_train_batch_size" in line for line in check(options))
    asked = layout(options)
    assert asked.engines is None and asked.devices <= 4 and options.rollout_batch_size == 8
    assert len((options.reward_pretrain or "").split(",")) == (2 if name == "ray_rewards" else 1)


def test_a_recipe_is_submitted_with_a_token_and_time_to_save(tmp_path):
    (tmp_path / "ray").write_text('#!/bin/sh\nenv | grep RAY_AUTH\nprintf "%s\\n" "$@"\n')
    (tmp_path / "ray").chmod(0o755)
    (tmp_path / "token").write_text("secret")
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = run("ray_70b", **path, RAY_AUTH_TOKEN_PATH=str(tmp_path / "token"), STOP_SECONDS="90")
    told = done.stdout.decode().splitlines()
    assert "RAY_AUTH_MODE=token" in told and f"RAY_AUTH_TOKEN_PATH={tmp_path}/token" in told
    assert '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "90"}}' in told
    words = told[told.index("job") :]
    assert words[:2] == ["job", "submit"] and words[words.index("--") + 1 :][:3] == [
        *("python3", "-m", "trimtab.cli.train_ppo_ray"),
    ]
    without = run("ray_70b", **path, RAY_AUTH_TOKEN_PATH=str(tmp_path / "none"))
    assert without.returncode == 2 and b"no token in RAY_AUTH_TOKEN_PATH" in without.stderr


def test_no_example_or_page_opens_ray_to_strangers():
    pages = [*EXAMPLES.glob("*.sh"), *(EXAMPLES.parent / "docs").glob("*.md"), EXAMPLES.parent / "README.md"]
    for page in pages:
        text = page.read_text()
        assert "RAY_AUTH_MODE=disabled" not in text
        for line in text.splitlines():
            assert "ray start" not in line or "RAY_AUTH_MODE=token" in line or "export" in text, (page, line)


@pytest.mark.parametrize(
    ("recipe", "told"), [("train_sft", "exec torchrun --nproc_per_node 8"), ("ray_hybrid", "ray start --head --block")]
)
def test_a_recipe_becomes_a_slurm_file(recipe, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("slurm", recipe, "--max_samples", "7", JOBS=str(tmp_path / "jobs"), PARTITION="large", **HERE)
    assert done.returncode == 0, done.stderr.decode()
    file = tmp_path / "jobs" / f"{recipe}_s1.sbatch"
    assert done.stdout.decode().splitlines()[0] == str(file)
    subprocess.run(["bash", "-n", str(file)], check=True)
    text = file.read_text()
    assert told in text and "#SBATCH --partition=large" in text and "#SBATCH --signal=B:TERM@120" in text
    assert text.count("--max_samples") == 1 and "--max_samples 7" in text  # the user's own


def test_every_cluster_recipe_is_here():
    found = {path.stem for path in Path(EXAMPLES).glob("*.sh")}
    assert {*LAYOUTS, "slurm"} <= found
