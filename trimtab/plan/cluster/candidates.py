"""Layouts to choose from: which roles share devices, and how the devices of the machines are dealt out to them.

Compared are those of OpenRLHF's documents: everything shared (hybrid); policy with reference, and critic with reward
models, beside engines (pairs); every model by itself (apart); and the built-in engine on the devices of all models.
"""

import itertools
from collections.abc import Iterator, Sequence

from trimtab.distributed.ray.placement import FLAGS, Engines, Layout, Pool
from trimtab.plan.hardware import Machines

UNITS = ("actor", "reference", "teacher", "critic", "reward")
HYBRID, PAIRS, APART, BUILTIN = "hybrid", "pairs", "apart", "built-in engine"


def groupings(units: Sequence[str]) -> dict[str, list[tuple[str, ...]]]:
    """Which units share devices, by the name of the layout; engines are beside them in two of the four."""
    first = tuple(unit for unit in units if FLAGS[unit] in ("actor", "ref"))
    second = tuple(unit for unit in units if unit not in first)
    by_flag = [tuple(unit for unit in units if FLAGS[unit] == flag) for flag in dict.fromkeys(map(FLAGS.get, units))]
    found = {HYBRID: [tuple(units)], PAIRS: [first, *([second] if second else [])], APART: by_flag}
    if found[APART] == found[PAIRS]:
        del found[APART]
    return found | {BUILTIN: [tuple(units)]}


def candidates(units: Sequence[str], machines: Machines, tensor_parallel: int) -> dict[str, list[Layout]]:
    """Every way to deal all devices out, of each of the four kinds."""
    kinds: dict[str, list[Layout]] = {}
    for kind, grouped in groupings(units).items():
        engines_apart = kind in (PAIRS, APART)
        found = []
        for sizes in splits(len(grouped) + engines_apart, machines):
            pools = tuple(_pool(members, size, machines) for members, size in zip(grouped, sizes))
            if kind == BUILTIN:
                found.append(Layout(pools, None))
            elif sizes[-1] % tensor_parallel == 0:
                number = sizes[-1] // tensor_parallel
                found.append(Layout(pools, Engines(number, tensor_parallel, None if engines_apart else "actor")))
        kinds[kind] = found
    return kinds


def _pool(units: tuple[str, ...], devices: int, machines: Machines) -> Pool:
    nodes = max(1, devices // machines.gpus)
    return Pool(units[0], units, nodes, devices // nodes)


def splits(groups: int, machines: Machines) -> Iterator[tuple[int, ...]]:
    """Sizes of groups that are all devices together: whole machines, or a part of one that divides it."""
    parts = [size for size in range(1, machines.gpus) if machines.gpus % size == 0]
    sizes = [*parts, *(machines.gpus * nodes for nodes in range(1, machines.nodes + 1))]
    for found in itertools.product(sizes, repeat=groups - 1):
        rest = machines.devices - sum(found)
        if rest in sizes and _fit_into_machines((*found, rest), machines):
            yield (*found, rest)


def _fit_into_machines(sizes: Sequence[int], machines: Machines) -> bool:
    """Whether groups smaller than a machine have room on those that the others leave."""
    free = [machines.gpus] * (machines.nodes - sum(size // machines.gpus for size in sizes))
    for size in sorted((size for size in sizes if size < machines.gpus), reverse=True):
        place = next((node for node, left in enumerate(free) if left >= size), None)
        if place is None:
            return False
        free[place] -= size
    return True


def sizes_of(layout: Layout) -> list[int]:
    """Devices of the pools, and of engines that have their own."""
    apart = layout.engines is not None and layout.engines.pool is None
    return [*(pool.size for pool in layout.pools), *([layout.engines.devices] if layout.engines and apart else [])]


def words_of(layout: Layout) -> str:
    """The options that ask for it."""
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
