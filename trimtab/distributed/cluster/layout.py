"""Which models of a run share processes, on how many nodes, and whether engines share their devices: what the options
ask of a cluster, before anybody has looked at one (seats.py does).

A *pool* is a set of processes, a device each, that hold the same units. The processes of all pools are one world, and
their ranks go through the pools in order, then through the nodes of a pool, then through the places on a node.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.errors import UserError

# By which options each unit is placed; other units hold parts of the policy, or were made from it.
FLAGS = {"actor": "actor", "reference": "ref", "teacher": "ref", "start": "ref", "critic": "critic", "reward": "reward"}


@dataclass(frozen=True)
class Pool:
    """Processes that hold the same units: `per_node` on each of `nodes` different nodes."""

    name: str  # the unit whose options give its size
    units: tuple[str, ...]
    nodes: int
    per_node: int

    @property
    def size(self) -> int:
        return self.nodes * self.per_node

    @property
    def flag(self) -> str:
        """How the options that place this pool begin."""
        return f"--{FLAGS.get(self.name, 'actor')}_num"


@dataclass(frozen=True)
class Engines:
    """vLLM engines, outside the world of the pools."""

    number: int
    tensor_parallel: int  # devices of one, all on one node
    pool: str | None  # whose devices they share; None: they have their own

    @property
    def devices(self) -> int:
        return self.number * self.tensor_parallel


@dataclass(frozen=True)
class Layout:
    pools: tuple[Pool, ...]
    engines: Engines | None  # None: the policy's own processes write the answers

    @property
    def size(self) -> int:
        """Processes of the world."""
        return sum(pool.size for pool in self.pools)

    @property
    def devices(self) -> int:
        """Those of all pools, and of engines that have their own."""
        apart = self.engines is not None and self.engines.pool is None
        return self.size + (self.engines.devices if self.engines and apart else 0)

    def pool_of(self, unit: str) -> Pool:
        return next(pool for pool in self.pools if unit in pool.units)

    def ranks_of(self, unit: str) -> range:
        """The processes of the world that hold a unit."""
        first = 0
        for pool in self.pools:
            if unit in pool.units:
                return range(first, first + pool.size)
            first += pool.size
        raise AssertionError(f"{unit} is in no pool")

    def rows(self, resource: str | None = "device") -> list[dict[str, Any]]:
        """What is where, a row for every unit, to keep and to show. `resource`: what the cluster calls its devices;
        None: it has no accelerator."""
        rows: list[dict[str, Any]] = []
        for pool in self.pools:
            first, *others = pool.units
            own = f"{pool.size} {resource}{'s' * (pool.size > 1)}" if resource else "CPU"
            for unit, devices in ((first, own), *((unit, f"those of {first}") for unit in others)):
                rows.append({"role": unit, "nodes": pool.nodes, "processes": pool.size, "devices": devices})
        if self.engines is not None:
            number, size, shared = self.engines.number, self.engines.tensor_parallel, self.engines.pool
            own = f"{number} x {size} {resource}{'s' * (size > 1)}" if resource else "CPU"
            devices = f"those of {self.pool_of(shared).units[0]}" if shared else own
            rows.append({"role": "engines", "nodes": None, "processes": number, "devices": devices})
        return rows


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows of a layout as lines of text."""
    lines = [f"{'role':12}{'nodes':>7}{'processes':>11}  devices"]
    for row in rows:
        nodes = "" if row["nodes"] is None else row["nodes"]
        lines.append(f"{row['role']:12}{nodes:>7}{row['processes']:>11}  {row['devices']}")
    return lines


@dataclass(frozen=True)
class _Numbers:
    """What the options say of one model."""

    flag: str
    nodes: int
    per_node: int | None

    def __str__(self) -> str:
        return f"--{self.flag}_num_nodes {self.nodes} --{self.flag}_num_gpus_per_node {self.per_node}"


def layout_of(options: Any, units: Sequence[str]) -> Layout:
    """The layout that options with --ray (config/placement) ask for; a UserError where they contradict each other.

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
    return Layout(tuple(made), _engines(options, made[0]))


def _numbers(options: Any, flag: str) -> _Numbers:
    per_node = options.policy_per_node if flag == "actor" else getattr(options, f"{flag}_num_gpus_per_node")
    return _Numbers(flag, getattr(options, f"{flag}_num_nodes"), per_node)


def _pool_of(options: Any, unit: str, asked: dict[str, _Numbers]) -> str:
    """The unit after which the pool of this one is named."""
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
        # The one that has numbers; where neither has, both are with the policy.
        own, unit = (critic, "critic") if critic.per_node is not None else (reward, "reward")
    if own.per_node is None:
        return "actor"
    # The first unit that is placed by the same options.
    return next(other for other, numbers in asked.items() if numbers.flag == own.flag)


def _require_same(flag: str, one: _Numbers, other: _Numbers) -> None:
    if None not in (one.per_node, other.per_node) and (one.nodes, one.per_node) != (other.nodes, other.per_node):
        raise UserError(f"--{flag} lets models share processes, and {one} differs from {other}: give the same numbers")


def _engines(options: Any, policy: Pool) -> Engines | None:
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
