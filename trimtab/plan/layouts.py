"""Layouts of a job: over how many processes each model is split, and which models share devices.

A single device is a split over one process; a supervised job is one pool of processes; an RL job on a cluster has a
pool for every group of models that share devices, and engines. `layout_of` is the layout that the options of a run ask
for; the candidates are the layouts that a plan compares.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.config.placement_options import ShardingOptions
from trimtab.config.rl_jobs import RLOptions
from trimtab.distributed.ray.placement import FLAGS, Engines, Layout, Pool
from trimtab.errors import UserError
from trimtab.models.load import TrainedModelOptions
from trimtab.models.parallel.tensor_parallel import supports_tensor_parallel
from trimtab.plan.hardware import ClusterHardware
from trimtab.plan.workload import Work

SPLITTING = (  # options that a plan may choose if they are not given
    *("zero_stage", "shard_size", "ds_tensor_parallel_size", "ring_attn_size"),
    *("gradient_checkpointing", "offload_activations", "adam_offload"),
)
SHORTEST = 1024  # least tokens of a row per process: with fewer, communication dominates
MOST_CONTEXT = 16
UNITS = ("actor", "reference", "teacher", "critic", "reward")
HYBRID, PAIRS, APART, BUILTIN = "hybrid", "pairs", "apart", "built-in engine"


@dataclass(frozen=True)
class Split:
    """The mesh sizes of a model over the processes of its pool."""

    processes: int
    replicate: int
    context: int
    tensor: int
    neighbours: int
    """Processes over which weights stay sharded between a forward and its backward pass (--zpg)."""
    zero_stage: int

    @classmethod
    def of(cls, options: ShardingOptions, processes: int) -> "Split":
        """UserError: this many processes cannot satisfy the options."""
        return cls(processes, **options.mesh_sizes(processes), zero_stage=options.zero_stage)

    @property
    def data(self) -> int:
        """Number of data-parallel parts: processes, or groups of them, with different samples."""
        return self.processes // (self.context * self.tensor)

    @property
    def parts(self) -> int:
        """Number of shards of parameters, gradients and moments."""
        return self.processes // (self.replicate * self.tensor)

    def __str__(self) -> str:
        sizes = {"replicate": self.replicate, "parameters": self.parts // self.context}
        sizes |= {"context": self.context, "tensor": self.tensor}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one process"


# ---- the layout of a run's options (config/placement has them)


@dataclass(frozen=True)
class _Numbers:
    """The placement options of one model."""

    flag: str
    nodes: int
    per_node: int | None

    def __str__(self) -> str:
        return f"--{self.flag}_num_nodes {self.nodes} --{self.flag}_num_gpus_per_node {self.per_node}"


def layout_of(options: RLOptions, units: Sequence[str]) -> Layout:
    """The layout of these units. UserError: options contradict each other.

    A model whose number of GPUs is not given shares the policy's processes.
    """
    asked = {unit: _numbers(options, FLAGS.get(unit, "actor")) for unit in units}
    actor = asked["actor"]
    pools: dict[str, list[str]] = {}
    for unit in units:
        pools.setdefault(_pool_of(options, unit, asked), []).append(unit)
    made = []
    for name, members in pools.items():
        numbers = asked[name]
        assert numbers.per_node is not None, "a pool is named after a model that has numbers"
        made.append(Pool(name, tuple(members), numbers.nodes, numbers.per_node))
    assert made[0].name == "actor" and actor.per_node, "the policy is first"
    for pool in made:
        _check_neighbours(options, pool)
    return Layout(tuple(made), _engines(options, made[0]))


def _numbers(options: RLOptions, flag: str) -> _Numbers:
    per_node = options.policy_per_node if flag == "actor" else getattr(options, f"{flag}_num_gpus_per_node")
    return _Numbers(flag, getattr(options, f"{flag}_num_nodes"), per_node)


def _pool_of(options: RLOptions, unit: str, asked: dict[str, _Numbers]) -> str:
    """The name of this unit's pool, which is the name of a unit."""
    actor, own = asked["actor"], asked[unit]
    if own.flag == "actor":
        return "actor"
    if own.per_node is None and own.nodes not in (1, actor.nodes):
        raise UserError(f"--{own.flag}_num_nodes {own.nodes} needs --{own.flag}_num_gpus_per_node beside it")
    if options.colocate_all_models or (own.flag == "ref" and options.colocate_actor_ref):
        _require_same("colocate_all_models" if options.colocate_all_models else "colocate_actor_ref", actor, own)
        return "actor"
    if own.flag in ("critic", "reward") and options.colocate_critic_reward and {"critic", "reward"} <= asked.keys():
        critic, reward = asked["critic"], asked["reward"]
        _require_same("colocate_critic_reward", critic, reward)
        # The one with a number of GPUs; if neither has one, both share the policy's pool.
        own, unit = (critic, "critic") if critic.per_node is not None else (reward, "reward")
    if own.per_node is None:
        return "actor"
    # The first unit that the same options place.
    return next(other for other, numbers in asked.items() if numbers.flag == own.flag)


def _require_same(flag: str, one: _Numbers, other: _Numbers) -> None:
    if None not in (one.per_node, other.per_node) and (one.nodes, one.per_node) != (other.nodes, other.per_node):
        raise UserError(f"--{flag} lets models share processes, and {one} differs from {other}: give the same numbers")


def _check_neighbours(options: RLOptions, pool: Pool) -> None:
    """Refuse a tensor-parallel group across nodes: its ranks are adjacent, and ranks are assigned node by node."""
    tensor = options.ds_tensor_parallel_size
    if pool.per_node % tensor:
        raise UserError(
            f"{pool.flag}_gpus_per_node {pool.per_node}: the {tensor} processes of --ds_tensor_parallel_size work on "
            f"every layer together, on one node; give a multiple of {tensor}"
        )


def _engines(options: RLOptions, policy: Pool) -> Engines | None:
    number, size = options.engines_apart, options.vllm_tensor_parallel_size
    if not number:
        return None
    if not options.colocate_all_models:
        return Engines(number, size, None)
    room = policy.nodes * (policy.per_node // size)
    if number > room:
        raise UserError(
            f"--colocate_all_models: {number} engines of --vllm_tensor_parallel_size {size} share the policy's "
            f"{policy.size} GPUs ({policy.per_node} on a node), where {room} have room: lower --vllm_num_engines, or "
            "raise --actor_num_gpus_per_node"
        )
    return Engines(number, size, policy.name)


# ---- candidates for a model split over all devices


def split_candidates(
    options: TrainedModelOptions, machines: ClusterHardware, work: Work, config: Any
) -> Iterator[dict[str, Any]]:
    """Options to change: all combinations of options that the user has not given and the machines allow. `config`: of
    the trained model."""
    longest = min(MOST_CONTEXT, machines.devices, max(1, work.least // SHORTEST))
    ways: dict[str, list[Any]] = {
        "ds_tensor_parallel_size": [
            size for size in _powers(machines.gpus) if size == 1 or supports_tensor_parallel(config, size)
        ],
        "ring_attn_size": _powers(longest),
        "zero_stage": [2, 3],
        "gradient_checkpointing": [False, True],
        "offload_activations": [False, True],
        "adam_offload": [False, True],
        "shard_size": [None, *(machines.gpus * nodes for nodes in _powers(machines.nodes)[:-1])],
    }
    assert set(ways) == set(SPLITTING)
    ways |= {name: [getattr(options, name)] for name in ways if name in options.given}
    for values in itertools.product(*ways.values()):
        found = dict(zip(ways, values))
        if found["offload_activations"] and not found["gradient_checkpointing"]:
            continue  # only layer inputs are worth offloading
        if found["shard_size"] is not None and "shard_size" not in options.given:
            found["shard_size"] //= found["ds_tensor_parallel_size"]  # a replica then fills whole machines
        yield found


def _powers(most: int) -> list[int]:
    """Powers of two up to `most`."""
    return [2**power for power in range(most.bit_length()) if most % 2**power == 0 or most > 2**power]


# ---- candidates for an RL job on a cluster
#
# The layouts of OpenRLHF's documents: all models and engines share devices (hybrid); policy with reference, critic with
# reward models, and separate engines (pairs); every model separate (apart); and the built-in engine on the devices of
# all models.


def groupings(units: Sequence[str]) -> dict[str, list[tuple[str, ...]]]:
    """Units that share devices, by layout; in PAIRS and APART engines have their own devices."""
    first = tuple(unit for unit in units if FLAGS[unit] in ("actor", "ref"))
    second = tuple(unit for unit in units if unit not in first)
    by_flag = [tuple(unit for unit in units if FLAGS[unit] == flag) for flag in dict.fromkeys(map(FLAGS.get, units))]
    found = {HYBRID: [tuple(units)], PAIRS: [first, *([second] if second else [])], APART: by_flag}
    if found[APART] == found[PAIRS]:
        del found[APART]
    return found | {BUILTIN: [tuple(units)]}


def cluster_candidates(
    units: Sequence[str], machines: ClusterHardware, tensor_parallel: int
) -> dict[str, list[Layout]]:
    """All ways to distribute the devices, for each of the four kinds."""
    kinds: dict[str, list[Layout]] = {}
    for kind, grouped in groupings(units).items():
        engines_apart = kind in (PAIRS, APART)
        kinds[kind] = []
        for sizes in splits(len(grouped) + engines_apart, machines):
            pools = tuple(make_pool(members, size, machines) for members, size in zip(grouped, sizes))
            if kind == BUILTIN:
                kinds[kind].append(Layout(pools, None))
            elif sizes[-1] % tensor_parallel == 0:
                engines = Engines(sizes[-1] // tensor_parallel, tensor_parallel, None if engines_apart else "actor")
                kinds[kind].append(Layout(pools, engines))
    return kinds


def make_pool(units: tuple[str, ...], devices: int, machines: ClusterHardware) -> Pool:
    nodes = max(1, devices // machines.gpus)
    return Pool(units[0], units, nodes, devices // nodes)


def splits(groups: int, machines: ClusterHardware) -> Iterator[tuple[int, ...]]:
    """Sizes of groups that use all devices: whole machines, or a divisor of one."""
    parts = [size for size in range(1, machines.gpus) if machines.gpus % size == 0]
    sizes = [*parts, *(machines.gpus * nodes for nodes in range(1, machines.nodes + 1))]
    for found in itertools.product(sizes, repeat=groups - 1):
        rest = machines.devices - sum(found)
        if rest in sizes and _fit_into_machines((*found, rest), machines):
            yield (*found, rest)


def _fit_into_machines(sizes: Sequence[int], machines: ClusterHardware) -> bool:
    """Whether groups smaller than a machine fit on the machines that the larger ones leave."""
    free = [machines.gpus] * (machines.nodes - sum(size // machines.gpus for size in sizes))
    for size in sorted((size for size in sizes if size < machines.gpus), reverse=True):
        place = next((node for node, left in enumerate(free) if left >= size), None)
        if place is None:
            return False
        free[place] -= size
    return True


# ---- layouts as options


def sizes_of(layout: Layout) -> list[int]:
    """Devices of the pools, and of engines with their own devices."""
    engines = layout.engines
    return [*(pool.size for pool in layout.pools), *([engines.devices] if engines and engines.pool is None else [])]


def layout_flags(layout: Layout) -> str:
    """The options that ask for a layout of an RL job."""
    flags = []
    for pool in layout.pools:
        for flag in dict.fromkeys(FLAGS[unit] for unit in pool.units):
            flags.append(f"--{flag}_num_nodes {pool.nodes} --{flag}_num_gpus_per_node {pool.per_node}")
    together = [{FLAGS[unit] for unit in pool.units} for pool in layout.pools]
    if len(layout.pools) == 1 and (layout.engines is None or layout.engines.pool is not None):
        flags.append("--colocate_all_models")
    else:
        flags += ["--colocate_actor_ref"] * any({"actor", "ref"} <= found for found in together)
        flags += ["--colocate_critic_reward"] * any({"critic", "reward"} <= found for found in together)
    if layout.engines is None:
        return " ".join([*flags, "--vllm_num_engines 0"])
    engines = layout.engines
    flags.append(f"--vllm_num_engines {engines.number} --vllm_tensor_parallel_size {engines.tensor_parallel}")
    if engines.pool is not None:
        flags.append("--vllm_enable_sleep --deepspeed_enable_sleep")
    return " ".join(flags)
