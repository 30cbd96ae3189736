"""Groups of options that say what an RL command asks for in machines, GPUs and vLLM engines, against what is here.

On one machine the models and the built-in engine share its processes; spreading them is left out so far.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from trimtab.config.groups import PrefixOptions, ProcessOptions
from trimtab.config.option import Options, option

ROLES = ("actor", "ref", "critic", "reward")
# What has nothing to do without vLLM. Its other options describe what the built-in engine always does.
_OF_OTHER_ENGINES = (
    *("vllm_num_engines", "vllm_tensor_parallel_size", "vllm_gpu_memory_utilization", "vllm_sync_backend"),
    *("vllm_sync_with_ray", "enforce_eager"),
)
_NOTHING_ASKED = {"vllm_num_engines": 0, "vllm_tensor_parallel_size": 1}


@dataclass(frozen=True, kw_only=True)
class PlacementOptions(Options):
    """Placement"""

    actor_num_nodes: int = option(1, at_least=1)
    """Machines of the policy."""
    # OpenRLHF's 8 would refuse every smaller machine; unset is what is here.
    actor_num_gpus_per_node: int | None = option(None, at_least=1)
    """GPUs of the policy on each machine, which all models share here; unset: --nproc."""
    ref_num_nodes: int = option(1, at_least=1)
    """Machines of the reference."""
    ref_num_gpus_per_node: int | None = option(None, at_least=1)
    """GPUs of the reference on each machine; fewer than --nproc: so many of the processes."""
    critic_num_nodes: int = option(1, at_least=1)
    """Machines of the critic."""
    critic_num_gpus_per_node: int | None = option(None, at_least=1)
    """GPUs of the critic on each machine; fewer than --nproc: so many of the processes."""
    reward_num_nodes: int = option(1, at_least=1)
    """Machines of the reward models."""
    reward_num_gpus_per_node: int | None = option(None, at_least=1)
    """GPUs of the reward models on each machine; fewer than --nproc: so many of the processes."""
    colocate_actor_ref: bool = option(False, always=True)
    """Policy and reference share GPUs; here they always do."""
    colocate_critic_reward: bool = option(False, always=True)
    """Critic and reward models share GPUs; here they always do."""
    colocate_all_models: bool = option(False, always=True)
    """All models and the rollout engine share GPUs; here they always do."""
    controller_apart: bool = False
    """Of several processes the first one runs the loop alone and holds no model."""
    ref_reward_offload: bool = False
    """Keep the weights of reference and reward models in main memory and bring them to the device to score."""
    deepspeed_enable_sleep: bool = False
    """Free the optimiser's device memory while answers are written. Not implemented yet."""
    actor_init_on_gpu: bool = option(False, always=True)
    """Load the policy straight to the device; that is how it is always done here."""
    async_train: bool = option(False, refused="(answers written while learning) is not implemented yet; leave it out")
    """Write the next answers while learning from the last. Not implemented yet."""
    agent_func_path: str | None = option(
        None, refused="(rollouts of several turns) is not implemented yet; leave it out"
    )
    """Python file of an environment that answers the policy turn by turn. Not implemented yet."""

    def check(self) -> Iterable[str]:
        if self.asks("deepspeed_enable_sleep"):
            yield "--deepspeed_enable_sleep has no effect: to keep the optimiser off the device use --adam_offload"


@dataclass(frozen=True, kw_only=True)
class VLLMOptions(PrefixOptions):
    """vLLM"""

    vllm_num_engines: int | None = option(None, at_least=0)
    """Number of vLLM engines. The built-in engine does their work, on the policy's own GPUs."""
    vllm_tensor_parallel_size: int = option(1, at_least=1, needs="vllm_num_engines")
    """GPUs of one engine."""
    vllm_gpu_memory_utilization: float = 0.95
    """Share of the memory that an engine may take."""
    vllm_sync_backend: str = "nccl"
    """How weights go to the engines: nccl or gloo. The built-in engine reads the policy's own."""
    vllm_sync_with_ray: bool = False
    """Send the weights through Ray."""
    vllm_enable_sleep: bool = option(False, always=True)
    """Give the engine's memory back while the policy is trained; done here when it is more than what is free."""
    enforce_eager: bool = False
    """Capture no graphs."""
    enable_vllm_is_correction: bool = False
    """Weigh tokens by how much the policy and the engine that wrote them differ."""
    vllm_is_truncated_threshold: float = option(2.0, needs="enable_vllm_is_correction")
    """Upper bound of that weight."""

    @property
    def engine_gpus(self) -> int:
        """GPUs of all engines."""
        return (self.vllm_num_engines or 0) * self.vllm_tensor_parallel_size

    def check(self) -> Iterable[str]:
        asked = [name for name in _OF_OTHER_ENGINES if self.asks(name)]
        if not self.vllm_num_engines and "vllm_tensor_parallel_size" in asked:
            asked.remove("vllm_tensor_parallel_size")  # said to need the other
        aside = [f"--{name}" for name in asked if getattr(self, name) != _NOTHING_ASKED.get(name)]
        if aside:
            yield f"the built-in engine writes the answers, with the policy's own weights: {', '.join(aside)} set aside"


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(ProcessOptions, PlacementOptions, VLLMOptions):
    """Placement"""

    @property
    def processes(self) -> int:
        # Engines that share the policy's GPUs are as many as these are.
        gpus = self.actor_num_gpus_per_node or (self.engine_gpus if self.colocate_all_models else 0)
        return gpus if gpus > 1 and self.nproc == 1 else self.nproc

    def ranks(self, asked: int | None, processes: int) -> range:
        """Of the processes of a launcher, those of a role that is to have so many: the last ones, since the first one
        also runs the loop."""
        first = 1 if self.controller_apart and processes > 1 else 0
        return range(processes)[first:][-(asked or processes) :]

    def group_sizes(self, processes: int) -> dict[str, int]:
        """In how many of the processes each model is."""
        asked = {
            "actor": None,
            "reference": self.ref_num_gpus_per_node,
            "teacher": None,
            "critic": self.critic_num_gpus_per_node,
            "reward": self.reward_num_gpus_per_node,
        }
        return {name: len(self.ranks(number, processes)) for name, number in asked.items()}

    def settle(self, changes: dict[str, Any]) -> Iterable[str]:
        changes["nproc"] = self.processes
        return ()

    def check(self) -> Iterable[str]:
        asked = self.gpus_asked_for()
        used = "one process" if self.nproc == 1 else f"{self.nproc} processes"
        given = [name for role in ROLES if self.asks(name := f"{role}_num_gpus_per_node")]
        if given and asked > self.nproc:
            flags = ", ".join(f"--{name}" for name in given)
            yield f"all models share {used}, on as many of the {asked} GPUs that are asked for: {flags}"
        elif others := [f"--{name}" for name in given if self._is_set_aside(name)]:
            yield f"all models share {used}: {', '.join(others)} set aside"
        if self.asks("controller_apart") and self.nproc == 1:
            yield "--controller_apart has no effect in one process: ask for several with --nproc"

    def _is_set_aside(self, name: str) -> bool:
        """The policy is in all processes; another model may be in fewer."""
        asked = getattr(self, name)
        return asked > self.nproc or (asked < self.nproc and name.startswith("actor"))

    def gpus_asked_for(self) -> int:
        """GPUs on each machine that the command gives to models and engines; 0 where it says nothing."""
        actor, reference, critic, reward = (
            self.actor_num_gpus_per_node or 0,
            self.ref_num_gpus_per_node or 0,
            self.critic_num_gpus_per_node or 0,
            self.reward_num_gpus_per_node or 0,
        )
        if self.colocate_all_models:
            return max(actor, reference, critic, reward, self.engine_gpus)
        first = max(actor, reference) if self.colocate_actor_ref else actor + reference
        second = max(critic, reward) if self.colocate_critic_reward else critic + reward
        return first + second + self.engine_gpus

    def problems(self, accelerators: Callable[[], int]) -> list[str]:
        """What is asked for and not here; `accelerators` counts those of this machine."""
        problems = [
            f"--{role}_num_nodes {nodes} asks for several machines, which is not implemented yet: use 1"
            for role in ROLES
            if (nodes := getattr(self, f"{role}_num_nodes")) > 1
        ]
        asked = self.gpus_asked_for()
        if asked > 1 and asked > (found := accelerators()):
            share = "" if self.colocate_all_models else ", or let all models share them with --colocate_all_models"
            problems.append(
                f"models and engines ask for {asked} GPUs, and this machine has {found}: ask for fewer{share}"
            )
        return problems
