"""Layouts that documents describe, scaled down to models of a few thousand parameters: each trains two iterations."""

import json

import pytest

from tests import warm
from tests.cli.test_rl_documents import folder, judge, with_places  # noqa: F401
from tests.config.test_documented_commands import RL_OFTEN, WITH_REWARD_MODEL
from trimtab.train.metrics import read_rows

# Short answers, few prompts. What comes last on a command line counts.
SMALL = """--prompt_max_len 40 --generate_max_len 8 --rollout_batch_size 4 --train_batch_size 4 --max_samples 8
    --micro_train_batch_size 4 --actor_learning_rate 1e-3 --rollout_engine builtin --bf16 False"""
OF_EACH = " ".join(f"--{role}_num_nodes 1 --{role}_num_gpus_per_node 1" for role in ("ref", "critic", "reward"))
SEPARATE = f"{WITH_REWARD_MODEL} --actor_num_gpus_per_node 2 {OF_EACH}"
# Others train with recorded rollouts in the short tests (test_layouts.py).
SHORT = ("several reward models", "remote reward")

# (words, devices of each role)
LAYOUTS = {
    "separate": (
        SEPARATE,
        {"actor": "2 GPUs", "reference": "1 GPU", "critic": "1 GPU", "reward": "1 GPU"},
    ),
    "colocated": (
        f"{WITH_REWARD_MODEL} --actor_num_gpus_per_node 1 {OF_EACH} --colocate_actor_ref --colocate_critic_reward",
        {"actor": "1 GPU", "reference": "those of actor", "critic": "1 GPU", "reward": "those of critic"},
    ),
    "hybrid": (
        f"""{WITH_REWARD_MODEL} --colocate_all_models --actor_num_gpus_per_node 2 --vllm_num_engines 2
        --vllm_gpu_memory_utilization 0.5 --vllm_enable_sleep --deepspeed_enable_sleep --enforce_eager""",
        {"actor": "2 GPUs", **dict.fromkeys(("reference", "critic", "reward"), "those of actor")},
    ),
    "several reward models": (
        f"""{RL_OFTEN} --reward_pretrain owner/judge,owner/judge --advantage_estimator reinforce
        --actor_num_gpus_per_node 1 --ref_num_gpus_per_node 1 --reward_num_gpus_per_node 2""",
        {"actor": "1 GPU", "reference": "1 GPU", "reward": "2 GPUs"},
    ),
    "remote reward": (
        f"""{RL_OFTEN} --remote_rm_url http://localhost:5000/get_reward --advantage_estimator group_norm
        --n_samples_per_prompt 2 --train_batch_size 8 --actor_num_gpus_per_node 1 --ref_num_gpus_per_node 1""",
        {"actor": "1 GPU", "reference": "1 GPU"},
    ),
}


@pytest.mark.short(1)
@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS]
)
def test_a_layout_trains_two_iterations(cluster, folder, judge, tmp_path, name):  # noqa: F811
    words, devices = LAYOUTS[name]
    argv = ["ppo", "--ray", *with_places(words, folder, judge, tmp_path), *SMALL.split()]
    printed = warm.output(argv, environment=cluster.environment)
    rows = read_rows(tmp_path / "out" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2] and all(row["skipped_steps"] == 0 for row in rows)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert {row["role"]: row["devices"] for row in manifest["layout"]} == devices
    assert "role          nodes  processes  devices" in printed
    assert "<h2>Where it ran</h2>" in (tmp_path / "out" / "report.html").read_text()
