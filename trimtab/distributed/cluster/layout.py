"""Which models of a run share processes, on how many nodes, and whether engines share their devices: what is asked of a
cluster, before anybody has looked at one (seats.py does).

A *pool* is a set of processes, a device each, that hold the same units. The processes of all pools are one world, and
their ranks go through the pools in order, then through the nodes of a pool, then through the places on a node.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
