"""Launchers and worker groups: a role is a worker class, a `Group` calls it on its ranks, a launcher places it.

A role is an ordinary object with methods such as `log_probs`, `update`, `sample`. The RL loop runs in one process, the
controller, and calls a *group*: the role in one process or in several, each with its part of the work. Inside a call
all processes of a group run the same method, so a method may use collectives.

A run is described by *units*: roles that hold parts of each other, and so always share processes, with the function
that builds them where they work. A launcher builds units in their processes and returns the groups of their roles:

    InProcessLauncher      everything in this process
    LocalProcessLauncher   in processes that were started together, all of them or some for each unit (local_launcher)
    RayLauncher            on the nodes of a Ray cluster (ray/launcher)

The loop does not know which. A unit's build function is at module level, so that it can be named to another process.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab.distributed.device import Device
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.process_group import World
from trimtab.distributed.random_state import process_seed, random_state, restore_random_state, seed_everything
from trimtab.errors import RunFailed
from trimtab.interrupts import StopRequest

HOST = "host"  # the role that builds the others


class Role:
    """The methods of every role."""

    def describe(self) -> dict[str, Any]:
        """What the controller needs to know of it: plain values."""
        return {}

    def random_state(self) -> dict:
        return random_state()

    def restore_random_state(self, state: dict | None) -> None:
        if state is not None:
            restore_random_state(state)

    def close(self) -> None:
        """Release processes and connections."""


@dataclass(frozen=True)
class Processes:
    """The processes of a run that have a role, in order."""

    ranks: Sequence[int]
    parts: Sequence[int]
    """Which part of a call each of them gets. Of processes with the same part, the first one's result counts."""
    streams: Sequence[int]
    """The number of each one's random stream: processes that draw alike have the same."""

    @classmethod
    def apart(cls, ranks: Sequence[int]) -> "Processes":
        """Each with its own part and stream."""
        return cls(ranks, range(len(ranks)), ranks)

    @property
    def reporting(self) -> list[int]:
        """For every part, the rank whose result counts."""
        return [self.ranks[self.parts.index(part)] for part in range(self.size)]

    @property
    def size(self) -> int:
        return max(self.parts) + 1


class WorkerLost(RunFailed):
    """A process of a run is gone. What the others hold cannot be gathered any more; checkpoints remain."""


class EngineLost(WorkerLost):
    """A process that only answers prompts is gone: another can take its place."""

    def __init__(self, message: str, rank: int):
        super().__init__(message)
        self.rank = rank


class Unanswered:
    """In the place of a result that is not there yet."""


class PendingCall:
    """A call that has been sent; this one was done at once, in this process."""

    def __init__(self, name: str, results: list[Any] | None = None):
        self.name = name  # role and method
        self._results = results or []

    def wait(self, seconds: float | None = None) -> list[Any]:
        """One result a part, in order, or one a process for a call without parts. RunFailed: not all came in time."""
        return self._results

    def poll(self, seconds: float) -> list[Any]:
        """The same for processes that do not wait for each other: `Unanswered` for a result that is not there after
        that time, which a later call may return, and EngineLost for that of an engine that is gone."""
        return self.wait()


class Group(ABC):
    """A role, in one process or in several, as the controller calls it."""

    name: str
    processes: Processes
    apart = False
    """Processes that compute alone, each of which can be replaced."""

    @property
    def size(self) -> int:
        """How many parts a call may have: processes that learn from different data."""
        return self.processes.size

    @property
    def ranks(self) -> Sequence[int]:
        return self.processes.ranks

    def start(self, method: str, parts: Sequence[Any] | None = None, **shared: Any) -> PendingCall:
        """Call a method in every process: with its own part, if there are parts, and with the arguments that all
        share."""
        if parts is None:
            return self._send(method, [()] * len(self.ranks), self.ranks, shared)
        assert len(parts) == self.size
        return self._send(method, [(parts[part],) for part in self.processes.parts], self.processes.reporting, shared)

    def call(self, method: str, parts: Sequence[Any] | None = None, **shared: Any) -> list[Any]:
        return self.start(method, parts, **shared).wait()

    def each(self, method: str, values: Sequence[Any]) -> list[Any]:
        """Call a method in every process, each with its own value, also where several share a part."""
        return self._send(method, [(value,) for value in values], self.ranks, {}).wait()

    def _send(
        self, method: str, arguments: Sequence[tuple], reporting: Sequence[int], shared: dict[str, Any]
    ) -> PendingCall:
        """`arguments`: of every process; `reporting`: the ranks whose results are returned."""
        raise NotImplementedError

    def one_per_part(self, results: Sequence[Any]) -> list[Any]:
        """Of one result a process, that of the first process with each part."""
        parts = list(self.processes.parts)
        return [results[parts.index(part)] for part in range(self.size)]

    def replace_engine(self, lost: Exception) -> None:
        """Start another process in the place of one that is gone, with its roles as they were built at first."""
        raise lost

    @abstractmethod
    def reinit_process_group(self) -> bool:
        """After OutOfMemory. True: there are several processes, which can be called again, but what they hold together
        (a split model) can only be saved: it must be built anew."""


class InProcessGroup(Group):
    processes = Processes.apart((0,))

    def __init__(self, name: str, role: Any, device: Device):
        self.name, self.role, self.device = name, role, device

    def _send(
        self, method: str, arguments: Sequence[tuple], reporting: Sequence[int], shared: dict[str, Any]
    ) -> PendingCall:
        return PendingCall(f"{self.name}.{method}", [getattr(self.role, method)(*arguments[0], **shared)])

    def reinit_process_group(self) -> bool:
        self.device.release_memory()
        return False


# ---- roles in their processes


@dataclass(frozen=True)
class RoleContext:
    """Where a role works."""

    device: Device
    mesh: Mesh  # the processes that work together on it
    stop: StopRequest


@dataclass(frozen=True)
class Unit:
    """Roles that are built together, in the same processes."""

    name: str
    build: Callable[[Any, RoleContext], dict[str, Any]]  # its roles by name, of this process
    roles: tuple[str, ...]
    engines: tuple[str, ...] = ()  # roles that do not split rows: each tensor group gets a part
    ranks: Sequence[int] | None = None  # the processes of the world that have it; None: all
    learns: bool = False  # a model of it is trained
    apart: bool = False  # in processes outside the world, each alone: other programs' engines
    environment: Mapping[str, str] = field(default_factory=dict)  # of those processes


class RoleHost:
    """Builds and holds the roles of one process. Itself a role, which the controller calls in all processes alike."""

    def __init__(
        self,
        options: Any,
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
        self._carried: dict[str, Any] = {}
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
        made = described.build(options, RoleContext(self.device, mesh, self.stop))
        assert tuple(made) == described.roles, f"{unit}: {tuple(made)} were built, not {described.roles}"
        for name in made.keys() & self._carried.keys():
            made[name].restore(self._carried.pop(name))
        self.roles |= made

    def processes(self) -> dict[str, Processes]:
        """The processes of every role."""
        found = {}
        for unit, mesh in self.meshes.items():
            for role in self.units[unit].roles:
                parts = mesh.tensor_groups if role in self.units[unit].engines else mesh.parts
                found[role] = Processes(mesh.ranks, parts, _streams(mesh))
        return found

    def settle(self) -> None:
        """When all units are built, seed this process: dropout differs between processes that work on different
        tokens, everything else does not."""
        if self._random is not None:
            restore_random_state(self._random)
            self._random = None
            return
        # Units that share a process share its whole tensor group.
        mesh = next((mesh for mesh in self.meshes.values() if mesh.here), None)
        stream = self.world.rank if mesh is None else _streams(mesh)[mesh.ranks.index(self.world.rank)]
        seed_everything(process_seed(self.options.seed, stream), deterministic=self.options.full_determinism)

    def release(self) -> None:
        """Close the roles, but keep this process's parts of what they have learnt for roles that are built anew."""
        self._carried = {name: role.carry() for name, role in self.roles.items() if hasattr(role, "carry")}
        self._random = random_state()
        self.close()
        self.device.release_memory()

    def close(self) -> None:
        for name in [name for name in self.roles if name != HOST]:
            self.roles.pop(name).close()  # in place: the RPC hub looks roles up in this dict


def _streams(mesh: Mesh) -> tuple[int, ...]:
    """The random stream of each process: its rank, where there are no tensor groups."""
    return tuple(mesh.ranks[0] + group for group in mesh.tensor_groups)


class Launcher(ABC):
    """Brings roles to processes. `device`, `world`: those of the roles, as the controller sees them."""

    device: Device
    world: World
    stop: StopRequest

    def groups(self, options: Any) -> dict[str, Group]:
        """Build all roles, with the options as the controller has completed them, and return their groups."""
        hosts, units = self._hosts(options)
        for unit in units:
            hosts.call("build", unit=unit)
        hosts.call("settle")
        return {role: self._group(role, found) for role, found in hosts.call("processes")[0].items()}

    @abstractmethod
    def _hosts(self, options: Any) -> tuple[Group, Iterable[str]]:
        """The role hosts of all processes of the world, and the units that they build."""

    @abstractmethod
    def _group(self, role: str, processes: Processes) -> Group: ...

    @abstractmethod
    def rebuild_groups(self) -> dict[str, Group]:
        """After OutOfMemory: the same roles, with what they had learnt."""

    def described(self) -> dict[str, Any]:
        """Where the roles are, for the manifest of a run."""
        return {}

    def disconnect(self) -> None:  # noqa: B027
        """Tell the other processes to end."""


class InProcessLauncher(Launcher):
    """Builds roles in this process."""

    def __init__(self, host: RoleHost):
        self.host = host
        self.device, self.world, self.stop = host.device, host.world, host.stop

    def _hosts(self, options: Any) -> tuple[Group, Iterable[str]]:
        self.host.options = options
        return InProcessGroup(HOST, self.host, self.device), self.host.units

    def _group(self, role: str, processes: Processes) -> Group:
        return InProcessGroup(role, self.host.roles[role], self.device)

    def rebuild_groups(self) -> dict[str, Group]:
        raise AssertionError("one process goes on with what it has")

    def close(self) -> None:
        self.host.close()
