"""How many machines and GPUs an RL command asks for, against what is here.

On one machine the models and the rollout engine share its processes; spreading them is left out so far.
"""

from collections.abc import Callable
from typing import Any

ROLES = ("actor", "ref", "critic", "reward")


def placement_problems(options: Any, accelerators: Callable[[], int]) -> list[str]:
    """What is asked for and not here; `accelerators` counts those of this machine."""
    problems = [
        f"--{role}_num_nodes {nodes} asks for several machines, which is not implemented yet: use 1"
        for role in ROLES
        if (nodes := getattr(options, f"{role}_num_nodes")) > 1
    ]
    asked = gpus_asked_for(options)
    if asked > 1 and asked > (found := accelerators()):
        share = "" if options.colocate_all_models else ", or let all models share them with --colocate_all_models"
        problems.append(f"models and engines ask for {asked} GPUs, and this machine has {found}: ask for fewer{share}")
    return problems


def gpus_asked_for(options: Any) -> int:
    """GPUs on each machine that the command gives to models and engines; 0 where it says nothing."""
    actor, reference, critic, reward = (getattr(options, f"{role}_num_gpus_per_node") or 0 for role in ROLES)
    engines = (options.vllm_num_engines or 0) * options.vllm_tensor_parallel_size
    if options.colocate_all_models:
        return max(actor, reference, critic, reward, engines)
    first = max(actor, reference) if options.colocate_actor_ref else actor + reference
    second = max(critic, reward) if options.colocate_critic_reward else critic + reward
    return first + second + engines
