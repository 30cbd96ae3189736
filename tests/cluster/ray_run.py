"""RL runs on Ray, as commands: the tiny task of one machine's tests, with placement flags."""

import os
from pathlib import Path

from tests.train.rl.test_groups import keep_gradients

SEPARATE, TWO_EACH = (
    " ".join(f"--{role}_num_gpus_per_node {number}" for role in ("actor", "ref", "critic", "reward"))
    for number in (1, 2)
)
LAYOUTS = {
    "separate": SEPARATE,
    "partly colocated": f"{SEPARATE} --colocate_actor_ref --colocate_critic_reward",
    "all colocated": f"{TWO_EACH} --colocate_all_models",
    "layers cut": f"{TWO_EACH} --colocate_all_models --ds_tensor_parallel_size 2",
    "rows shared": f"{TWO_EACH} --colocate_critic_reward --ring_attn_size 2",
}


def keep_gradients_of_processes(folder: Path) -> None:
    keep_gradients(folder / str(os.getpid()))
