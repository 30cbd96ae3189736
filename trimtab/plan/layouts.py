"""The layout that the options of a run with --ray ask for (config/placement has them)."""

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.config.rl_jobs import RLOptions
from trimtab.distributed.ray.placement import FLAGS, Engines, Layout, Pool
from trimtab.errors import UserError


@dataclass(frozen=True)
class _Numbers:
    """What the options say of one model."""

    flag: str
    nodes: int
    per_node: int | None

    def __str__(self) -> str:
        return f"--{self.flag}_num_nodes {self.nodes} --{self.flag}_num_gpus_per_node {self.per_node}"


def layout_of(options: RLOptions, units: Sequence[str]) -> Layout:
    """`units`: by their names. A UserError where options contradict each other.

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


def _check_neighbours(options: RLOptions, pool: Pool) -> None:
    """Those of a tensor group have neighbouring ranks, and ranks go through the places on a node."""
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
