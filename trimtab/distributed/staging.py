"""How the roles of a run come to their processes.

A run is described by *units*: roles that hold parts of each other and therefore always share processes, and the
function that builds them where they work. A stage brings units into processes and hands back the groups that speak to
their roles:

    LocalStage   everything in this process
    WorldStage   in the processes of a world that a launcher started, all of them or some for each unit
    RayStage     on the nodes of a Ray cluster (cluster/stage.py)

A builder is a module-level function of the options and a place, so that it can be named to another process.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from trimtab.distributed.device import Device
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.random_state import process_seed, random_state, restore_random_state, seed_everything
from trimtab.distributed.roles import Group, LocalGroup, Processes
from trimtab.distributed.switchboard import Switchboard
from trimtab.distributed.world import World
from trimtab.interrupts import StopRequest

HOST = "host"


class SeededOptions(Protocol):
    """What is asked here of a job's options; units are built by all of them."""

    @property
    def seed(self) -> int: ...

    @property
    def full_determinism(self) -> bool: ...


@dataclass(frozen=True)
class Place:
    """Where a role works."""

    device: Device
    mesh: Mesh  # the processes that work together on it
    stop: StopRequest


@dataclass(frozen=True)
class Unit:
    name: str
    build: Callable[[Any, Place], dict[str, Any]]  # its roles by name, of this process
    roles: tuple[str, ...]
    engines: tuple[str, ...] = ()  # of them, those that do not split rows: each tensor group gets a part
    ranks: Sequence[int] | None = None  # the processes of a world that have it; None: all
    learns: bool = False  # a model of it is trained
    apart: bool = False  # in processes outside the world, each alone: other programs' engines
    environment: Mapping[str, str] = field(default_factory=dict)  # of those processes


class Host:
    """Builds and holds the roles of one process. Itself a role, which a controller calls in all processes alike."""

    def __init__(
        self,
        options: SeededOptions,
        units: Iterable[Unit],
        make_mesh: Callable[..., Mesh],  # (options, world, ranks, learns=...)
        device: Device,
        world: World,
        stop: StopRequest,
    ):
        self.options, self.units, self.make_mesh = options, {unit.name: unit for unit in units}, make_mesh
        self.meshes: dict[str, Mesh] = {}
        self.device, self.world, self.stop = device, world, stop
        self.roles: dict[str, Any] = {HOST: self}
        self._held: dict[str, Any] = {}
        self._random: dict | None = None

    def build(self, *, unit: str) -> None:
        """Called in every process: all make the mesh of every unit."""
        options, described = self.options, self.units[unit]
        if described.apart:
            mesh = Mesh(self.world)
        else:
            mesh = self.make_mesh(options, self.world, described.ranks, learns=described.learns)
        self.meshes[unit] = mesh
        if not mesh.here:
            return
        seed_everything(options.seed, deterministic=options.full_determinism)
        made = described.build(options, Place(self.device, mesh, self.stop))
        assert tuple(made) == described.roles, f"{unit}: {tuple(made)} were built, not {described.roles}"
        for name in made.keys() & self._held.keys():
            made[name].restore(self._held.pop(name))
        self.roles |= made

    def processes(self) -> dict[str, Processes]:
        """Of every role, those that have it."""
        found = {}
        for unit, mesh in self.meshes.items():
            streams = _streams(mesh)
            for role in self.units[unit].roles:
                parts = mesh.tensor_groups if role in self.units[unit].engines else mesh.parts
                found[role] = Processes(mesh.ranks, parts, streams)
        return found

    def settle(self) -> None:
        """When all is built: dropout differs between processes that work on different tokens, everything else does
        not."""
        if self._random is not None:
            restore_random_state(self._random)
            self._random = None
            return
        # Units that share a process share its whole tensor group.
        mesh = next((mesh for mesh in self.meshes.values() if mesh.here), None)
        stream = self.world.rank if mesh is None else _streams(mesh)[mesh.ranks.index(self.world.rank)]
        seed_everything(process_seed(self.options.seed, stream), deterministic=self.options.full_determinism)

    def let_go(self) -> None:
        """Keep this process's parts of what was learnt, for roles that are built anew."""
        self._held = {name: role.carry() for name, role in self.roles.items() if hasattr(role, "carry")}
        self._random = random_state()
        self.close()
        self.device.release_memory()

    def close(self) -> None:
        for name, role in self.roles.items():
            if name != HOST:
                role.close()
        # In place: who serves calls looks roles up here.
        for name in [name for name in self.roles if name != HOST]:
            del self.roles[name]


def _streams(mesh: Mesh) -> tuple[int, ...]:
    """By which number each of its processes draws: the rank, where there are no tensor groups."""
    return tuple(mesh.ranks[0] + group for group in mesh.tensor_groups)


class Stage(ABC):
    """A way to bring roles to processes. `device`, `world`: what the controller is told of them."""

    device: Device
    world: World
    stop: StopRequest

    @abstractmethod
    def groups(self, options: SeededOptions) -> dict[str, Group]:
        """Build everything, with what the controller has made of the options."""

    @abstractmethod
    def groups_anew(self) -> dict[str, Group]:
        """After OutOfMemory: the same roles, with what they had learnt."""

    def described(self) -> dict[str, Any]:
        """Where the roles are, for the manifest of a run."""
        return {}

    @abstractmethod
    def hang_up(self) -> None:
        """The other processes end."""


class LocalStage(Stage):
    def __init__(self, host: Host):
        self.host = host
        self.device, self.world, self.stop = host.device, host.world, host.stop

    def groups(self, options: SeededOptions) -> dict[str, Group]:
        self.host.options = options
        for unit in self.host.units:
            self.host.build(unit=unit)
        self.host.settle()
        return {
            name: LocalGroup(name, role, self.host.device) for name, role in self.host.roles.items() if name != HOST
        }

    def groups_anew(self) -> dict[str, Group]:
        raise AssertionError("one process goes on with what it has")

    def hang_up(self) -> None:
        """Nobody else is there."""

    def close(self) -> None:
        self.host.close()


class WorldStage(Stage):
    """Made in every process of a world; the first one runs the loop, the others `serve`."""

    def __init__(self, host: Host, records: Sequence[type]):
        self.host = host
        self.device, self.world, self.stop = host.device, host.world, host.stop
        self._switchboard = Switchboard(host.world, host.roles, records)
        self._hosts = self._switchboard.group(HOST)

    def groups(self, options: SeededOptions) -> dict[str, Group]:
        assert options == self.host.options, "the other processes know the options as they were given"
        for unit in self.host.units:
            self._hosts.call("build", unit=unit)
        self._hosts.call("settle")
        return {name: self._switchboard.group(name, found) for name, found in self.host.processes().items()}

    def groups_anew(self) -> dict[str, Group]:
        self._hosts.call("let_go")
        return self.groups(self.host.options)

    def serve(self) -> None:
        try:
            self._switchboard.serve()
        finally:
            self.host.close()

    def hang_up(self) -> None:
        self._switchboard.hang_up()

    def close(self) -> None:
        self.host.close()


def stage_of(host: Host, records: Sequence[type] = ()) -> LocalStage | WorldStage:
    """The way that fits how this process was started. `records`: what may travel to roles and back."""
    return LocalStage(host) if host.world.size == 1 else WorldStage(host, records)
