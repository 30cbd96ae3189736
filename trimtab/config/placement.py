"""Groups of options that say what an RL command asks for in machines, GPUs and vLLM engines.

With --ray the models are spread over a cluster as these options say (distributed/ray/placement reads them). Without,
they and the built-in engine share the processes of one machine, and what is asked for is compared with what is here.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from trimtab.config.groups import PrefixOptions, ProcessOptions
from trimtab.config.option import Options, option
from trimtab.errors import UserError

ROLES = ("actor", "ref", "critic", "reward")
COLOCATING = ("colocate_actor_ref", "colocate_critic_reward", "colocate_all_models")
# The units of a run that may be in fewer processes than the policy, and whose options say so.
_PLACED_BY = {"reference": "ref", "start": "ref", "critic": "critic", "reward": "reward"}
# What has nothing to do without vLLM. Its other options describe what the built-in engine always does.
_OF_OTHER_ENGINES = (
    *("vllm_num_engines", "vllm_tensor_parallel_size", "vllm_gpu_memory_utilization", "vllm_sync_backend"),
    "vllm_sync_with_ray",
)
_NOTHING_ASKED = {"vllm_num_engines": 0, "vllm_tensor_parallel_size": 1}


@dataclass(frozen=True, kw_only=True)
class PlacementOptions(Options):
    """Placement"""

    ray: bool = False
    """Run on a Ray cluster, with models and engines placed as the options below say; without, on this machine, where
    all models share the processes."""
    max_restarts: int = option(0, at_least=0, needs="ray")
    """How often a run that lost a process or a machine of its cluster begins again from its last checkpoint."""
    restart_wait: float = option(300.0, above=0, needs="max_restarts")
    """Seconds to wait, before such a beginning, for what was lost to be there again."""
    actor_num_nodes: int = option(1, at_least=1)
    """Machines of the policy."""
    # OpenRLHF's 8 would refuse every smaller machine; unset is what is here.
    actor_num_gpus_per_node: int | None = option(None, at_least=1)
    """GPUs, and processes, of the policy on each machine; unset: --nproc."""
    ref_num_nodes: int = option(1, at_least=1)
    """Machines of the reference."""
    ref_num_gpus_per_node: int | None = option(None, at_least=1)
    """GPUs of the reference on each machine; unset: those of the policy. Without --ray: how many of the processes."""
    critic_num_nodes: int = option(1, at_least=1)
    """Machines of the critic."""
    critic_num_gpus_per_node: int | None = option(None, at_least=1)
    """GPUs of the critic on each machine; unset: those of the policy. Without --ray: how many of the processes."""
    reward_num_nodes: int = option(1, at_least=1)
    """Machines of the reward models."""
    reward_num_gpus_per_node: int | None = option(None, at_least=1)
    """GPUs of the reward models on each machine; unset: those of the policy. Without --ray: how many of the
    processes."""
    colocate_actor_ref: bool = False
    """Policy and reference share GPUs; without --ray they always do."""
    colocate_critic_reward: bool = False
    """Critic and reward models share GPUs; without --ray they always do."""
    colocate_all_models: bool = False
    """All models and the rollout engines share GPUs; without --ray they always do."""
    controller_apart: bool = False
    """Of several processes the first one runs the loop alone and holds no model; with --ray that is always so."""
    ref_reward_offload: bool = False
    """Keep the weights of reference and reward models in main memory and bring them to the device to score."""
    deepspeed_enable_sleep: bool = False
    """While answers are written, keep in main memory what only learning needs: the optimiser's state and, where engines
    are apart, the model."""
    actor_init_on_gpu: bool = option(False, always=True)
    """Load the policy straight to the device; that is how it is always done here."""

    def check(self) -> Iterable[str]:
        for name in COLOCATING:
            if not self.ray and name in self.given and not getattr(self, name):
                yield f"--{name} False has no effect without --ray: all models share the processes"


@dataclass(frozen=True, kw_only=True)
class VLLMOptions(PrefixOptions):
    """vLLM"""

    vllm_num_engines: int | None = option(None, at_least=0)
    """Number of vLLM engines, with --ray. Without, or with 0, the built-in engine does their work, on the policy's own
    GPUs."""
    vllm_tensor_parallel_size: int = option(1, at_least=1, needs="vllm_num_engines")
    """GPUs of one engine."""
    vllm_gpu_memory_utilization: float = option(0.95, above=0, at_most=1)
    """Share of the memory that an engine may take."""
    vllm_sync_backend: str = option("nccl", choices=("nccl", "hccl", "xccl", "gloo"))
    """How weights go to the engines: by the devices' own library, whichever of the first three it is, or by gloo. The
    built-in engine reads the policy's own."""
    vllm_sync_with_ray: bool = False
    """Send the weights through Ray. They go over a link of their own here, which needs no more."""
    vllm_sync_lora: str = option("adapter", choices=("adapter", "merged"), needs=("rollout_engine", "vllm"))
    """With --lora_rank, what engines get: the adapter, or the model with the adapter merged into it."""
    vllm_enable_sleep: bool = False
    """Give the engine's memory back while the policy is trained; the built-in engine does so when it is more than what
    is free."""
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
        if self.rollout_engine == "vllm":
            if self.asks("vllm_sync_with_ray"):
                yield "--vllm_sync_with_ray: weights go over a link of their own, with the same collectives and no Ray"
            return
        if "vllm_enable_sleep" in self.given and not self.vllm_enable_sleep:
            yield "--vllm_enable_sleep False has no effect on the built-in engine: it gives memory back where it must"
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
    def policy_per_node(self) -> int:
        """Processes of the policy on each of its machines."""
        # Engines that share the policy's GPUs are as many as these are.
        engines = self.engine_gpus if self.colocate_all_models else 0
        gpus = self.actor_num_gpus_per_node or math.ceil(engines / (self.actor_num_nodes if self.ray else 1))
        return gpus if gpus > 1 and self.nproc == 1 else self.nproc

    @property
    def processes(self) -> int:
        return self.policy_per_node * (self.actor_num_nodes if self.ray else 1)

    @property
    def uses_vllm(self) -> bool:
        """Whether vLLM writes the answers, also before --rollout_engine is settled."""
        if self.rollout_engine is None:
            return self.ray and bool(self.vllm_num_engines)
        return self.rollout_engine == "vllm"

    @property
    def engines_apart(self) -> int:
        """Engines that are processes of their own in a cluster."""
        return (self.vllm_num_engines or 1) if self.ray and self.uses_vllm else 0

    def ranks_of(self, unit: str, processes: int) -> range:
        """Of the processes of a launcher, those that hold a unit: the last ones, since the first one also runs the
        loop."""
        first = 1 if self.controller_apart and processes > 1 else 0
        flag = _PLACED_BY.get(unit)
        asked = getattr(self, f"{flag}_num_gpus_per_node") if flag else None
        return range(processes)[first:][-(asked or processes) :]

    def group_sizes(self, processes: int) -> dict[str, int]:
        """In how many of the processes of a launcher each model is."""
        names = ("actor", "reference", "teacher", "critic", "reward")
        return {name: len(self.ranks_of(name, processes)) for name in names}

    def settle(self, changes: dict[str, Any]) -> Iterable[str]:
        asked = self.actor_num_gpus_per_node
        if self.ray and asked and self.asks("nproc") and self.nproc != asked:
            raise UserError(
                f"--nproc {self.nproc} and --actor_num_gpus_per_node {asked} both say how many processes the policy has"
                " on a machine: leave --nproc out"
            )
        changes["nproc"] = self.policy_per_node
        changes["rollout_engine"] = "vllm" if self.uses_vllm else "builtin"
        return ()

    def check(self) -> Iterable[str]:
        if self.ray:
            if self.uses_vllm and self.vllm_num_engines == 0:
                raise UserError(
                    "--rollout_engine vllm and --vllm_num_engines 0: ask for at least 1 engine, or use "
                    "--rollout_engine builtin"
                )
            yield from self.idle(["controller_apart"], "with --ray: the loop is always in a process of its own")
            return
        if self.uses_vllm:
            self._check_one_process()
            yield from self.idle(["vllm_num_engines"], "without --ray: one engine is in the trainer's process")
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

    def _check_one_process(self) -> None:
        if self.nproc > 1:
            raise UserError(
                f"--rollout_engine vllm in {self.nproc} processes: without --ray the engine is in the one process that "
                "trains; add --ray, or use --nproc 1"
            )
        if self.vllm_tensor_parallel_size > 1:
            raise UserError(
                f"--vllm_tensor_parallel_size {self.vllm_tensor_parallel_size}: an engine on several GPUs has "
                "processes of its own; add --ray"
            )

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
        """What is asked for and not here; `accelerators` counts those of this machine. With --ray a look at the cluster
        answers that, at the start."""
        if self.ray:
            return []
        problems = [
            f"--{role}_num_nodes {nodes} asks for several machines: add --ray, or use 1"
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
