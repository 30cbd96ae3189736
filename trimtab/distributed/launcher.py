"""Roles: what the RL loop speaks to, wherever they work.

A role is an ordinary object with methods such as `log_probs`, `update`, `sample`. The loop runs in one process and
calls a *group*: the role in one process, or in several, each with its part of the work.

    LocalGroup   the role in this process
    WorldGroup   the role in some or all processes of a world that a launcher started (hub.py)
    RayGroup     the role in processes on the nodes of a Ray cluster (cluster/calls.py)

The loop does not know which. Inside a call all processes of a group run the same method, so a method may use
collectives. How roles come to their processes is in staging.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from trimtab.distributed.device import Device
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.process_group import World
from trimtab.distributed.random_state import process_seed, random_state, restore_random_state, seed_everything
from trimtab.errors import RunFailed
from trimtab.interrupts import StopRequest


class Role:
    """What every role can be asked."""

    def describe(self) -> dict[str, Any]:
        """What the controller needs to know of it: plain values."""
        return {}

    def random_state(self) -> dict:
        return random_state()

    def restore_random_state(self, state: dict | None) -> None:
        if state is not None:
            restore_random_state(state)

    def close(self) -> None:
        """Let go of processes and connections."""


@dataclass(frozen=True)
class Processes:
    """Those of a run that have a role, in order."""

    ranks: Sequence[int]
    parts: Sequence[int]
    """Which part of a call each of them gets; of those with the same one the first tells the result."""
    streams: Sequence[int]
    """By which number each one's random state is known: those that draw alike have the same."""

    @classmethod
    def apart(cls, ranks: Sequence[int]) -> "Processes":
        """Each with a part of its own."""
        return cls(ranks, range(len(ranks)), ranks)

    @property
    def telling(self) -> list[int]:
        """Of every part, the process whose result counts."""
        return [self.ranks[self.parts.index(part)] for part in range(self.size)]

    @property
    def size(self) -> int:
        return max(self.parts) + 1


class PendingCall(Protocol):
    """A call that has been made."""

    name: str  # role and method

    def wait(self, seconds: float | None = None) -> list[Any]:
        """One result a part, in their order, or one a process where there were no parts. RunFailed: there is none
        after so many seconds."""

    def found(self, seconds: float) -> list[Any]:
        """The same, where the results of some do not wait for the others: in the place of one that is not there after
        so many seconds is `Unanswered`, which may be asked for again; in that of an engine that is gone, its loss."""


class WorkerLost(RunFailed):
    """A process of a run is gone. What the others hold cannot be gathered any more; checkpoints are what is left."""


class EngineLost(WorkerLost):
    """One that only answers prompts: another can take its place."""

    def __init__(self, message: str, rank: int):
        super().__init__(message)
        self.rank = rank


class Unanswered:
    """In the place of a result that is not there yet."""


class Group(ABC):
    name: str
    size: int
    """How many parts a call may have: processes that learn from different data."""
    processes: Processes
    apart = False
    """Of processes that compute alone, each of which another can stand in for."""

    @property
    def ranks(self) -> Sequence[int]:
        """Which processes of the run it is."""
        return self.processes.ranks

    @abstractmethod
    def start(self, method: str, parts: Sequence[Any] | None = None, **shared: Any) -> PendingCall:
        """Have a method run in every process: with its own part, if there are parts, and what all are told alike."""

    def call(self, method: str, parts: Sequence[Any] | None = None, **shared: Any) -> list[Any]:
        return self.start(method, parts, **shared).wait()

    def first_of_each_part(self, results: Sequence[Any]) -> list[Any]:
        """Of what every process has said, that of the first one with each part."""
        parts = list(self.processes.parts)
        return [results[parts.index(part)] for part in range(self.size)]

    @abstractmethod
    def each(self, method: str, values: Sequence[Any]) -> list[Any]:
        """Have a method run in every process, each with a value of its own, also where several share a part."""

    def replace_engine(self, lost: Exception) -> None:
        """Another process in the place of one that is gone, with its roles as they were built at first."""
        raise lost

    @abstractmethod
    def reinit_process_group(self) -> bool:
        """After OutOfMemory. True: there are several processes, which can be called again, but what they hold together
        (a split model) can only be saved: it must be built anew."""


class InProcessGroup(Group):
    size = 1
    processes = Processes.apart((0,))

    def __init__(self, name: str, role: Any, device: Device):
        self.name, self.role, self.device = name, role, device

    def start(self, method: str, parts: Sequence[Any] | None = None, **shared: Any) -> "FinishedCall":
        own = () if parts is None else (parts[0],)
        return FinishedCall(f"{self.name}.{method}", [getattr(self.role, method)(*own, **shared)])

    def each(self, method: str, values: Sequence[Any]) -> list[Any]:
        return self.call(method, values)

    def reinit_process_group(self) -> bool:
        self.device.release_memory()
        return False


class FinishedCall:
    """What was done at once, in this process."""

    def __init__(self, name: str, results: list[Any]):
        self.name, self._results = name, results

    def wait(self, seconds: float | None = None) -> list[Any]:
        return self._results

    def found(self, seconds: float) -> list[Any]:
        return self._results


# ---- How the roles of a run come to their processes. A run is described by *units*: roles that hold parts of each
# other and therefore always share processes, and the function that builds them where they work. A stage brings units
# into processes and hands back the groups that speak to their roles: LocalStage everything in this process WorldStage
# in the processes of a world that a launcher started, all of them or some for each unit RayStage on the nodes of a
# Ray cluster (cluster/stage.py) A builder is a module-level function of the options and a place, so that it can be
# named to another process.


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


class RoleHost:
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


class Launcher(ABC):
    """A way to bring roles to processes. `device`, `world`: what the controller is told of them."""

    device: Device
    world: World
    stop: StopRequest

    @abstractmethod
    def groups(self, options: SeededOptions) -> dict[str, Group]:
        """Build everything, with what the controller has made of the options."""

    @abstractmethod
    def rebuild_groups(self) -> dict[str, Group]:
        """After OutOfMemory: the same roles, with what they had learnt."""

    def described(self) -> dict[str, Any]:
        """Where the roles are, for the manifest of a run."""
        return {}

    @abstractmethod
    def hang_up(self) -> None:
        """The other processes end."""


class InProcessLauncher(Launcher):
    def __init__(self, host: RoleHost):
        self.host = host
        self.device, self.world, self.stop = host.device, host.world, host.stop

    def groups(self, options: SeededOptions) -> dict[str, Group]:
        self.host.options = options
        for unit in self.host.units:
            self.host.build(unit=unit)
        self.host.settle()
        return {
            name: InProcessGroup(name, role, self.host.device) for name, role in self.host.roles.items() if name != HOST
        }

    def rebuild_groups(self) -> dict[str, Group]:
        raise AssertionError("one process goes on with what it has")

    def hang_up(self) -> None:
        """Nobody else is there."""

    def close(self) -> None:
        self.host.close()
