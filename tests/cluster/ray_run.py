"""RL runs on Ray, as commands: the tiny task of one machine's tests, with placement flags."""

import os
from pathlib import Path

from tests.train.rl.test_groups import keep_gradients

SEPARATE = (
    "--actor_num_gpus_per_node 1 --ref_num_gpus_per_node 1 --critic_num_gpus_per_node 1 --reward_num_gpus_per_node 1"
)
TWO_EACH = (
    "--actor_num_gpus_per_node 2 --ref_num_gpus_per_node 2 --critic_num_gpus_per_node 2 --reward_num_gpus_per_node 2"
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
