"""On which nodes of a cluster the processes of a layout sit: one bundle of a placement group for every process that has
a device, and one for every engine that has devices of its own.

Without accelerators in the cluster, processes are counted instead of devices, so that every layout runs on CPUs too.
"""

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from trimtab.distributed.cluster.layout import Layout, Pool
from trimtab.distributed.devices import RESOURCES
from trimtab.errors import UserError

# Of a processor, what a process reserves: enough to be counted, and little enough to fit on any node.
CPU_SHARE = 0.1
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Node:
    id: str
    address: str
    resources: dict[str, float]  # all of the node's, taken or not


@dataclass(frozen=True)
class Seat:
    """One process of the world."""

    rank: int
    pool: str
    node: Node
    bundle: int


@dataclass(frozen=True)
class Placement:
    resource: str | None  # one of RESOURCES; None: no accelerator in the cluster
    bundles: list[dict[str, float]]  # of one placement group
    bundle_nodes: list[Node]  # where each bundle must be
    workers: list[Seat]  # by rank
    engines: list[list[int]]  # bundles of each engine: one with all its devices, or a pool's, a device each
    share: float  # of a device, what each process in a pool's bundle takes: 1, or less where engines share it


def place(layout: Layout, nodes: Sequence[Node]) -> Placement:
    """Where everything goes; a UserError that says what is missing and which option to change."""
    for roomiest in (False, True):
        chosen = _chosen_nodes(layout, nodes, roomiest)
        if chosen is not None:
            return _seated(layout, chosen, resource_of(nodes))
    raise UserError(missing(layout, nodes))


def resource_of(nodes: Iterable[Node]) -> str | None:
    """What Ray calls the accelerators of the cluster."""
    return next((name for name in RESOURCES if any(node.resources.get(name, 0) > 0 for node in nodes)), None)


@dataclass
class _Free:
    """What is left of a node."""

    node: Node
    devices: float
    cpus: float

    def holds(self, devices: int, processes: int) -> bool:
        return devices <= self.devices + _ROUNDING and processes * CPU_SHARE <= self.cpus + _ROUNDING

    def take(self, devices: int, processes: int) -> None:
        self.devices -= devices
        self.cpus -= processes * CPU_SHARE


@dataclass(frozen=True)
class _Demand:
    """So many devices and processes on each of so many different nodes."""

    of: Pool | None  # None: an engine
    devices: int
    processes: int
    nodes: int = 1


@dataclass
class _Chosen:
    pools: dict[str, list[Node]] = field(default_factory=dict)
    engines: list[Node] = field(default_factory=list)


def _demands(layout: Layout, accelerated: bool) -> list[_Demand]:
    sharing = layout.engines.pool if layout.engines else None
    demands = []
    for pool in layout.pools:
        processes = pool.per_node * (2 if pool.name == sharing else 1)
        demands.append(_Demand(pool, pool.per_node if accelerated else 0, processes, pool.nodes))
    if layout.engines is not None and sharing is None:
        size = layout.engines.tensor_parallel
        demands += [_Demand(None, size if accelerated else 0, 1)] * layout.engines.number
    # The large and the wide first: what is small finds a place between them.
    return sorted(demands, key=lambda demand: (-demand.devices, -demand.nodes, -demand.processes))


def _chosen_nodes(layout: Layout, nodes: Sequence[Node], roomiest: bool) -> _Chosen | None:
    """A node for everything: the fullest that has room, or the emptiest."""
    resource = resource_of(nodes)
    free = [_Free(node, node.resources.get(resource or "", 0), node.resources.get("CPU", 0)) for node in nodes]
    free.sort(key=lambda one: _by_address(one.node))
    chosen = _Chosen()
    for demand in _demands(layout, resource is not None):
        holding = [one for one in free if one.holds(demand.devices, demand.processes)]
        holding.sort(key=lambda one: (one.devices, one.cpus if resource is None else 0), reverse=roomiest)
        if len(holding) < demand.nodes:
            return None
        taken = holding[: demand.nodes]
        for one in taken:
            one.take(demand.devices, demand.processes)
        if demand.of is None:
            chosen.engines.append(taken[0].node)
        else:
            chosen.pools[demand.of.name] = sorted((one.node for one in taken), key=_by_address)
    return chosen


def _by_address(node: Node) -> tuple[int, int, str, str]:
    try:
        address = ipaddress.ip_address(node.address)
        return (address.version, int(address), "", node.id)
    except ValueError:
        return (9, 0, node.address, node.id)


def _seated(layout: Layout, chosen: _Chosen, resource: str | None) -> Placement:
    engines = layout.engines
    sharing = engines.pool if engines else None
    made = Placement(resource, [], [], [], [], 0.5 if sharing else 1.0)

    def add(node: Node, devices: int, processes: int) -> int:
        bundle = {"CPU": round(processes * CPU_SHARE, 4)}
        made.bundles.append(bundle | ({resource: float(devices)} if resource else {}))
        made.bundle_nodes.append(node)
        return len(made.bundles) - 1

    for pool in layout.pools:
        for node in chosen.pools[pool.name]:
            here = []
            for _ in range(pool.per_node):
                here.append(add(node, 1, 2 if pool.name == sharing else 1))
                made.workers.append(Seat(len(made.workers), pool.name, node, here[-1]))
            if engines and pool.name == sharing:
                size = engines.tensor_parallel
                made.engines.extend(here[at : at + size] for at in range(0, len(here) - size + 1, size))
    if engines:
        del made.engines[engines.number :]
        made.engines.extend([add(node, engines.tensor_parallel, 1)] for node in chosen.engines)
    return made


def missing(layout: Layout, nodes: Sequence[Node], available: dict[str, float] | None = None) -> str:
    """What the cluster lacks for the layout, and which option to change. `available`: what is free in all of it, where
    the nodes are enough in themselves."""
    resource = resource_of(nodes)
    accelerated = resource is not None
    unit = f"{resource}s" if accelerated else "processes"
    rooms = [_room(node.resources, resource) for node in sorted(nodes, key=_by_address)]
    has = f"the cluster has {_listed(rooms, unit)}"
    demands = _demands(layout, accelerated)
    for demand in demands:
        wanted = demand.devices if accelerated else demand.processes
        if sum(room >= wanted for room in rooms) >= demand.nodes:
            continue
        if demand.of is None:
            return (
                f"an engine of --vllm_tensor_parallel_size {wanted} needs {wanted} {unit} on one node, and {has}: lower"
                " --vllm_tensor_parallel_size"
            )
        flags = f"{demand.of.flag}_gpus_per_node" + (f" or {demand.of.flag}_nodes" if demand.of.nodes > 1 else "")
        where = f"on each of {demand.nodes} nodes" if demand.nodes > 1 else "on one node"
        share = _sharing_instead(layout)
        count = f"{wanted} {unit}" if wanted > 1 else f"one {resource or 'process'}"
        verb = "needs" if len(demand.of.units) == 1 else "need"
        return f"{' and '.join(demand.of.units)} {verb} {count} {where}, and {has}: lower {flags}{share}"
    needed = sum((demand.devices if accelerated else demand.processes) * demand.nodes for demand in demands)
    everything = f"{_parts(layout)} need {needed} {unit}"
    if needed <= sum(rooms) and available is not None:
        now = _room(available, resource)
        if now < needed:
            return f"{everything}, and of those of the cluster {now} are free: wait for other jobs, or ask for fewer"
        return f"{everything}, free in the cluster but not where they are needed: wait for other jobs"
    flags = ", ".join(f"{pool.flag}_gpus_per_node" for pool in layout.pools)
    engines = ", --vllm_num_engines" if layout.engines and layout.engines.pool is None else ""
    together = "" if needed > sum(rooms) else " that fit together"
    return f"{everything}{together}, and {has}: lower {flags}{engines}{_sharing_instead(layout)}"


def _room(resources: dict[str, float], resource: str | None) -> int:
    """Devices, or processes where there are none."""
    if resource is not None:
        return int(resources.get(resource, 0) + _ROUNDING)
    return int(resources.get("CPU", 0) / CPU_SHARE + _ROUNDING)


def _listed(rooms: list[int], unit: str) -> str:
    if not rooms:
        return "no node"
    counts = ", ".join(map(str, rooms))
    room = "" if unit.endswith("s") and unit[0].isupper() else "room for "
    return f"one node, with {room}{counts}" if len(rooms) == 1 else f"nodes with {room}{counts}"


def _parts(layout: Layout) -> str:
    parts = [f"{' and '.join(pool.units)} ({pool.nodes} x {pool.per_node})" for pool in layout.pools]
    if layout.engines is not None and layout.engines.pool is None:
        parts.append(f"engines ({layout.engines.number} x {layout.engines.tensor_parallel})")
    return "; ".join(parts)


def _sharing_instead(layout: Layout) -> str:
    """Advice where something does not share devices yet."""
    alone = len(layout.pools) == 1 and (layout.engines is None or layout.engines.pool is not None)
    return "" if alone else ", or let all models share them with --colocate_all_models"
