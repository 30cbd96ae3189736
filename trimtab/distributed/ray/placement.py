"""Placement of a run's processes on a Ray cluster: the layout that options ask for, and nodes that can hold it.

A *pool* is a set of processes, one device each, with the same units. The processes of all pools form one world; ranks
are assigned pool by pool, then node by node, then bundle by bundle. Every process with a device gets a bundle of one
placement group, and so does every engine with its own devices. In a cluster without accelerators, processes are counted
instead of devices, so that every layout also runs on CPUs.

This module does not import Ray: plans and checks need layouts without it.
"""

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.distributed.device import RESOURCES
from trimtab.errors import UserError

# The prefix of the options that place each unit; other units are placed with the policy.
FLAGS = {"actor": "actor", "reference": "ref", "teacher": "ref", "start": "ref", "critic": "critic", "reward": "reward"}


@dataclass(frozen=True)
class Pool:
    """Processes with the same units: `per_node` on each of `nodes` different nodes."""

    name: str  # the unit whose options give its size
    units: tuple[str, ...]
    nodes: int
    per_node: int

    @property
    def size(self) -> int:
        return self.nodes * self.per_node

    @property
    def flag(self) -> str:
        """Prefix of the options that place this pool."""
        return f"--{FLAGS.get(self.name, 'actor')}_num"


@dataclass(frozen=True)
class Engines:
    """vLLM engines, outside the world of the pools."""

    number: int
    tensor_parallel: int  # devices of one engine, all on one node
    pool: str | None  # the pool whose devices they share; None: they have their own

    @property
    def devices(self) -> int:
        return self.number * self.tensor_parallel


@dataclass(frozen=True)
class Layout:
    """The pools and engines of a run."""

    pools: tuple[Pool, ...]
    engines: Engines | None  # None: the policy's processes generate

    @property
    def size(self) -> int:
        """Number of processes of the world."""
        return sum(pool.size for pool in self.pools)

    @property
    def devices(self) -> int:
        """Number of devices of all pools and of engines with their own devices."""
        apart = self.engines is not None and self.engines.pool is None
        return self.size + (self.engines.devices if self.engines and apart else 0)

    def pool_of(self, unit: str) -> Pool:
        return next(pool for pool in self.pools if unit in pool.units)

    def ranks_of(self, unit: str) -> range:
        """The ranks of a unit."""
        first = 0
        for pool in self.pools:
            if unit in pool.units:
                return range(first, first + pool.size)
            first += pool.size
        raise AssertionError(f"{unit} is in no pool")

    def rows(self, resource: str | None = "device") -> list[dict[str, Any]]:
        """A row for every unit and for the engines. `resource`: the cluster's name for its devices; None: no
        accelerator."""
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
class RunPaths:
    """Paths that a run reads and writes, as (option, local path)."""

    read: Sequence[tuple[str, str]]
    written: Sequence[tuple[str, str]]  # by this process only
    shared: Sequence[tuple[str, str]]  # by several processes


# CPUs that a process reserves: enough to be counted, and little enough to fit on any node.
CPU_SHARE = 0.1
_ROUNDING = 1e-6


@dataclass(frozen=True)
class ClusterNode:
    id: str
    address: str
    resources: dict[str, float]  # total, reserved or not


@dataclass(frozen=True)
class WorkerBundle:
    """One process of the world and its bundle."""

    rank: int
    pool: str
    node: ClusterNode
    bundle: int


@dataclass(frozen=True)
class Placement:
    resource: str | None  # one of RESOURCES; None: no accelerator in the cluster
    bundles: list[dict[str, float]]  # of one placement group
    bundle_nodes: list[ClusterNode]  # the node of each bundle
    workers: list[WorkerBundle]  # by rank
    engines: list[list[int]]  # bundles of each engine: one with all its devices, or one per device of a pool
    share: float  # fraction of a device that a process in a pool's bundle reserves: 1, or less if engines share it


def place(layout: Layout, nodes: Sequence[ClusterNode]) -> Placement:
    """Assign the layout to nodes. UserError: what is missing, and which option to change."""
    for emptiest in (False, True):
        if (chosen := _choose_nodes(layout, nodes, emptiest)) is not None:
            return _make_bundles(layout, chosen, resource_of(nodes))
    raise UserError(missing(layout, nodes))


def resource_of(nodes: Iterable[ClusterNode]) -> str | None:
    """Ray's resource name for the cluster's accelerators."""
    return next((name for name in RESOURCES if any(node.resources.get(name, 0) > 0 for node in nodes)), None)


@dataclass(frozen=True)
class _Demand:
    """Devices and processes needed on each of several different nodes."""

    pool: Pool | None  # None: an engine with its own devices
    devices: int
    processes: int
    nodes: int = 1


def _demands(layout: Layout, accelerated: bool) -> list[_Demand]:
    engines = layout.engines
    demands = []
    for pool in layout.pools:
        processes = pool.per_node * (2 if engines and pool.name == engines.pool else 1)
        demands.append(_Demand(pool, pool.per_node if accelerated else 0, processes, pool.nodes))
    if engines is not None and engines.pool is None:
        demands += [_Demand(None, engines.tensor_parallel if accelerated else 0, 1)] * engines.number
    # Large and wide demands first, since small ones fit into the remaining gaps.
    return sorted(demands, key=lambda demand: (-demand.devices, -demand.nodes, -demand.processes))


def _choose_nodes(
    layout: Layout, nodes: Sequence[ClusterNode], emptiest: bool
) -> dict[str | None, list[ClusterNode]] | None:
    """The nodes of every pool and, under the key None, of engines with their own devices. Each demand takes the fullest
    nodes with enough space, or the emptiest. None: something does not fit."""
    resource = resource_of(nodes)
    devices = {node.id: node.resources.get(resource or "", 0) for node in nodes}
    cpus = {node.id: node.resources.get("CPU", 0) for node in nodes}
    chosen: dict[str | None, list[ClusterNode]] = {None: []}
    for demand in _demands(layout, resource is not None):
        cpu = demand.processes * CPU_SHARE
        holding = [
            node
            for node in sorted(nodes, key=_by_address)
            if demand.devices <= devices[node.id] + _ROUNDING and cpu <= cpus[node.id] + _ROUNDING
        ]
        holding.sort(key=lambda node: (devices[node.id], cpus[node.id] if resource is None else 0), reverse=emptiest)
        if len(holding) < demand.nodes:
            return None
        taken = sorted(holding[: demand.nodes], key=_by_address)
        for node in taken:
            devices[node.id] -= demand.devices
            cpus[node.id] -= cpu
        chosen.setdefault(demand.pool.name if demand.pool else None, []).extend(taken)
    return chosen


def _by_address(node: ClusterNode) -> tuple[int, int, str, str]:
    try:
        address = ipaddress.ip_address(node.address)
        return (address.version, int(address), "", node.id)
    except ValueError:
        return (9, 0, node.address, node.id)


def _make_bundles(layout: Layout, chosen: dict[str | None, list[ClusterNode]], resource: str | None) -> Placement:
    engines = layout.engines
    sharing = engines.pool if engines else None
    made = Placement(resource, [], [], [], [], 0.5 if sharing else 1.0)

    def add(node: ClusterNode, devices: int, processes: int) -> int:
        bundle = {"CPU": round(processes * CPU_SHARE, 4)}
        made.bundles.append(bundle | ({resource: float(devices)} if resource else {}))
        made.bundle_nodes.append(node)
        return len(made.bundles) - 1

    for pool in layout.pools:
        for node in chosen[pool.name]:
            here = [add(node, 1, 2 if pool.name == sharing else 1) for _ in range(pool.per_node)]
            ranked = enumerate(here, len(made.workers))
            made.workers.extend(WorkerBundle(rank, pool.name, node, bundle) for rank, bundle in ranked)
            if engines and pool.name == sharing:
                size = engines.tensor_parallel
                made.engines.extend(here[at : at + size] for at in range(0, len(here) - size + 1, size))
    if engines:
        del made.engines[engines.number :]
        made.engines.extend([add(node, engines.tensor_parallel, 1)] for node in chosen[None])
    return made


# ---- missing resources


def missing(layout: Layout, nodes: Sequence[ClusterNode], available: dict[str, float] | None = None) -> str:
    """A message on what the cluster lacks for the layout, and which option to change. `available`: free resources of
    the whole cluster, if its total resources suffice."""
    resource = resource_of(nodes)
    unit = f"{resource}s" if resource else "processes"
    rooms = [_room(node.resources, resource) for node in sorted(nodes, key=_by_address)]
    counts = f"{'' if resource else 'room for '}{', '.join(map(str, rooms))}"
    listed = ("one node, with " if len(rooms) == 1 else "nodes with ") + counts if rooms else "no node"
    has = f"the cluster has {listed}"
    alone = len(layout.pools) == 1 and (layout.engines is None or layout.engines.pool is not None)
    share = "" if alone else ", or let all models share them with --colocate_all_models"
    demands = _demands(layout, resource is not None)
    for demand in demands:
        wanted = demand.devices if resource else demand.processes
        if sum(room >= wanted for room in rooms) >= demand.nodes:
            continue
        if demand.pool is None:
            return (
                f"an engine of --vllm_tensor_parallel_size {wanted} needs {wanted} {unit} on one node, and {has}: lower"
                " --vllm_tensor_parallel_size"
            )
        pool = demand.pool
        flags = f"{pool.flag}_gpus_per_node" + (f" or {pool.flag}_nodes" if pool.nodes > 1 else "")
        where = f"on each of {demand.nodes} nodes" if demand.nodes > 1 else "on one node"
        count = f"{wanted} {unit}" if wanted > 1 else f"one {resource or 'process'}"
        verb = "needs" if len(pool.units) == 1 else "need"
        return f"{' and '.join(pool.units)} {verb} {count} {where}, and {has}: lower {flags}{share}"
    parts = [f"{' and '.join(pool.units)} ({pool.nodes} x {pool.per_node})" for pool in layout.pools]
    own_devices = layout.engines is not None and layout.engines.pool is None
    if layout.engines is not None and own_devices:
        parts.append(f"engines ({layout.engines.number} x {layout.engines.tensor_parallel})")
    needed = sum((demand.devices if resource else demand.processes) * demand.nodes for demand in demands)
    everything = f"{'; '.join(parts)} need {needed} {unit}"
    if needed <= sum(rooms) and available is not None:
        now = _room(available, resource)
        if now < needed:
            return f"{everything}, and of those of the cluster {now} are free: wait for other jobs, or ask for fewer"
        return f"{everything}, free in the cluster but not where they are needed: wait for other jobs"
    flags = ", ".join(f"{pool.flag}_gpus_per_node" for pool in layout.pools)
    engines = ", --vllm_num_engines" if own_devices else ""
    together = "" if needed > sum(rooms) else " that fit together"
    return f"{everything}{together}, and {has}: lower {flags}{engines}{share}"


def _room(resources: dict[str, float], resource: str | None) -> int:
    """Number of devices or, without accelerators, of processes."""
    if resource is not None:
        return int(resources.get(resource, 0) + _ROUNDING)
    return int(resources.get("CPU", 0) / CPU_SHARE + _ROUNDING)
