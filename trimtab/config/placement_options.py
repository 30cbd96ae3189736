"""Options of where models run: how they are split over processes, and how RL places models and engines.

The processes of a model form a mesh (distributed/mesh.py): copies x parts of the parameters x parts of a row x parts of
every layer. --ring_attn_size and --ds_tensor_parallel_size are the last two; the rest holds different samples.

With --ray the models are spread over a cluster as these options say (distributed/ray/placement.py reads them). Without,
they and the built-in engine share the processes of one machine, and what is asked for is compared with the machine.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

from trimtab.config.option import Options, of_this_call, option
from trimtab.config.training_options import LoadOptions, PrefixOptions, ProcessOptions
from trimtab.errors import UserError


class ShardingOptions(ProcessOptions):
    """Processes and sharding"""

    dist_backend: str = option("auto", choices=("auto", "nccl", "gloo"))
    """How processes communicate: auto is the device's own library (NCCL), and gloo on a CPU or where processes share a
    device."""
    adam_offload: bool = False
    """Keep the optimiser's state in main memory and step there."""
    grad_accum_dtype: str | None = option(None, choices=("fp32", "bf16"))
    """Type of accumulated gradients: fp32 or bf16; unset: fp32."""
    overlap_comm: bool = option(False, needs=("zero_stage", 3))
    """Gather each layer's weights while the layer before it works, which takes the memory of one more layer. Gradients
    are always exchanged while the backward pass goes on."""
    zpg: int = option(1, at_least=1)
    """Between forward and backward pass keep weights split over this many neighbours only, which gather them faster
    (ZeRO++'s second partition); masters, gradients and optimiser stay split over all."""
    shard_size: int | None = option(None, at_least=1)
    """Split the model over this many processes, and let the others hold copies of it; unset: over all. Processes of
    --ds_tensor_parallel_size are not counted."""
    ds_tensor_parallel_size: int = option(1, at_least=1)
    """Split every layer's arithmetic, the embedding and the LM head over this many neighbouring processes."""
    ring_attn_size: int = option(1, at_least=1)
    """Split every row of tokens over this many neighbouring processes; attention gathers their keys and values. A row
    then holds this many times the tokens of --train_max_tokens_per_gpu."""
    ring_head_stride: int = option(1, at_least=1)
    """Heads of keys that attention gathers at a time, for --ring_attn_size: fewer need less memory. Nothing else
    changes. It must divide the heads of keys that a process has."""
    deepcompile: bool = False
    """The same as --compile on."""

    def settle(self, changes: dict[str, Any]) -> Iterable[str]:
        if self.deepcompile:
            changes["compile"] = "on"
        return ()

    @property
    def policy_processes(self) -> int:
        """How many of them hold what is trained."""
        return self.processes

    def mesh_sizes(self, processes: int, *, learns: bool = True) -> dict[str, int]:
        """The dimensions of a mesh of these processes, except the one that follows from the others. A UserError: it
        has no such dimensions. `learns`: its model is trained; one that only scores may be in fewer processes than
        --shard_size names, and keeps nothing for a backward pass."""
        context, tensor = self.ring_attn_size, self.ds_tensor_parallel_size
        together = context * tensor
        if processes % together:
            asked = [f"--{name} {getattr(self, name)}" for name in ("ring_attn_size", "ds_tensor_parallel_size")]
            used = " x ".join(flag for flag, size in zip(asked, (context, tensor)) if size > 1)
            raise UserError(
                f"{used}: {_counted(processes)} cannot be shared out so; start a multiple "
                f"of {together} (--nproc {together})"
            )
        splitting = processes // tensor  # over how many parameters can be split
        replicate = self._copies(splitting, learns=learns)
        neighbours = self.zpg if learns else 1
        split = splitting // replicate
        if neighbours > 1 and (split % neighbours or neighbours == split):
            raise UserError(
                f"--zpg {neighbours} must divide the {_counted(split)} that parameters are split over, and be fewer"
            )
        return {"replicate": replicate, "context": context, "tensor": tensor, "neighbours": neighbours}

    def _copies(self, splitting: int, *, learns: bool) -> int:
        context = self.ring_attn_size
        if self.shard_size is None:
            return splitting // context if self.zero_stage == 0 else 1
        if self.zero_stage == 0:
            raise UserError(
                "--shard_size splits what --zero_stage 0 does not: leave it out, or use --zero_stage 2 or 3"
            )
        size = self.shard_size if learns else min(self.shard_size, splitting)
        if splitting % size or size % context:
            of = "" if context == 1 else f" and be a multiple of --ring_attn_size {context}"
            raise UserError(f"--shard_size {self.shard_size} must divide {_counted(splitting)}{of}")
        return splitting // size

    def splits_frozen(self, *, offload: bool) -> bool:
        """Whether a model without gradients is split over several processes: where the trained one's weights are, where
        layers are cut, or where it is kept off the device."""
        return self.zero_stage == 3 or self.ds_tensor_parallel_size > 1 or offload

    def row_tokens(self, tokens: int) -> int:
        """Tokens of a row of which every process that works on it has so many."""
        return tokens * self.ring_attn_size

    def data_parts(self, processes: int) -> int:
        return max(1, processes // (self.ring_attn_size * self.ds_tensor_parallel_size))

    def check(self) -> Iterable[str]:
        if self.zpg > 1 and self.zero_stage < 3:
            raise UserError(f"--zpg keeps split what --zero_stage {self.zero_stage} does not split: use --zero_stage 3")
        if self.zpg > 1 and self.ds_tensor_parallel_size > 1:
            raise UserError("--zpg and --ds_tensor_parallel_size do not work together: leave one of them out")
        if self.policy_processes > 1:
            self.mesh_sizes(self.policy_processes)
        split = self.processes > 1 or self.ring_attn_size > 1 or self.ds_tensor_parallel_size > 1
        if split and isinstance(self, LoadOptions) and self.load_in_4bit:
            raise UserError("--load_in_4bit: 4-bit weights cannot be split; train in one process")
        for flag in ("ring_attn_size", "ds_tensor_parallel_size"):
            if getattr(self, flag) > 1 and isinstance(self, LoadOptions) and self.attn_implementation is not None:
                raise UserError(
                    f"--{flag} works with the attention of this project alone: leave --attn_implementation out"
                )
        if self.ring_attn_size == 1:
            yield from self.idle(["ring_head_stride"], "without --ring_attn_size")


class RehearsalOptions(ProcessOptions):
    """Processes and sharding"""

    rehearse: int | None = of_this_call(None, above=0)
    """Play one rank of a run of this many processes on this device: three steps on random data, without communication
    and files. Says what memory and time they take. --pretrain may be a size, such as 70B; no data are needed."""
    rehearse_rank: int = of_this_call(0)
    """The rank to play, where ranks hold different models."""

    def may_lack(self, name: str) -> bool:
        return (self.rehearse is not None and name in ("dataset", "prompt_data")) or super().may_lack(name)

    def settle(self, changes: dict[str, Any]) -> Iterable[str]:
        if self.rehearse is None:
            return self.idle(["rehearse_rank"], "without --rehearse")
        if self.rehearse > 0 and not 0 <= self.rehearse_rank < self.rehearse:
            raise UserError(f"--rehearse_rank {self.rehearse_rank}: the ranks are 0 to {self.rehearse - 1}")
        if self.nproc not in (1, self.rehearse):
            raise UserError(f"--nproc {self.nproc} and --rehearse {self.rehearse}: leave --nproc out")
        if getattr(self, "controller_apart", False) and self.rehearse_rank == 0 and self.rehearse > 1:
            if self.asks("rehearse_rank"):
                raise UserError("--rehearse_rank 0: with --controller_apart it holds no model; name another")
            changes["rehearse_rank"] = 1
        changes["nproc"] = self.rehearse
        return ()


def _counted(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"


# ---- machines, GPUs and vLLM engines of an RL job


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
