"""Launchers and worker groups: a role is a worker class, a `Group` calls it on its ranks, a launcher places it.

A role is an ordinary object with methods such as `log_probs`, `update`, `sample`. The RL loop runs in one process, the
controller, and calls a *group*: the role in one process or in several, each with its part of the work. Inside a call
all processes of a group run the same method, so a method may use collectives.

A run is described by *units*: roles that share objects, and therefore processes, with the function that builds them. A
launcher builds units in their processes and returns the groups of their roles:

    InProcessLauncher      all units in this process
    LocalProcessLauncher   in processes started together, each unit in all or some of them
    RayLauncher            on the nodes of a Ray cluster (ray/launcher)

The loop does not depend on the launcher. A unit's build function is at module level, so that another process can import
it.
"""

import contextlib
import json
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trimtab.distributed.device import Device
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.process_group import World, abort_reason, new_group, reinit_process_group
from trimtab.distributed.random_state import process_seed, random_state, restore_random_state, seed_everything
from trimtab.distributed.serialization import Serializer
from trimtab.distributed.supervision import own_heartbeat
from trimtab.errors import OutOfMemory, RunFailed, UserError
from trimtab.interrupts import StopRequest

HOST = "host"  # name of the role that builds the others


class Role:
    """Base class of roles, with the methods that all have."""

    def describe(self) -> dict[str, Any]:
        """Facts for the controller, as plain values."""
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
    """The processes that have a role, in order."""

    ranks: Sequence[int]
    parts: Sequence[int]
    """The part of a call's arguments that each process gets. Of processes with the same part, the first one's result is
    returned."""
    streams: Sequence[int]
    """The number of each process's random stream; processes that must draw the same numbers share one."""

    @classmethod
    def apart(cls, ranks: Sequence[int]) -> "Processes":
        """Each with its own part and stream."""
        return cls(ranks, range(len(ranks)), ranks)

    @property
    def reporting(self) -> list[int]:
        """For every part, the rank whose result is returned."""
        return [self.ranks[self.parts.index(part)] for part in range(self.size)]

    @property
    def size(self) -> int:
        return max(self.parts) + 1


class WorkerLost(RunFailed):
    """A process of the run has died. Sharded state of the others is incomplete now; checkpoints remain."""


class EngineLost(WorkerLost):
    """A process that only generates has died, and can be replaced."""

    def __init__(self, message: str, rank: int):
        super().__init__(message)
        self.rank = rank


class Unanswered:
    """Placeholder for a result that has not arrived."""


class PendingCall:
    """A call whose results can be waited for. The base class is for calls in this process, which are complete."""

    def __init__(self, name: str, results: list[Any] | None = None):
        self.name = name  # role and method
        self._results = results or []

    def wait(self, seconds: float | None = None) -> list[Any]:
        """One result a part, in order, or one a process for a call without parts. RunFailed: not all came in time."""
        return self._results

    def poll(self, seconds: float) -> list[Any]:
        """Like `wait`, for processes independent of each other: after `seconds`, `Unanswered` stands for a missing
        result, which a later call may return, and EngineLost for the result of a dead engine."""
        return self.wait()


class Group(ABC):
    """A role in one or several processes, as the controller calls it."""

    name: str
    processes: Processes
    apart = False
    """Whether the processes are independent of each other and can be replaced one by one."""

    @property
    def size(self) -> int:
        """Number of parts of a call: processes that work on different data."""
        return self.processes.size

    @property
    def ranks(self) -> Sequence[int]:
        return self.processes.ranks

    def start(self, method: str, parts: Sequence[Any] | None = None, **shared: Any) -> PendingCall:
        """Call a method in every process, with its own part (if there are parts) and the shared keyword arguments."""
        if parts is None:
            return self._send(method, [()] * len(self.ranks), self.ranks, shared)
        assert len(parts) == self.size
        return self._send(method, [(parts[part],) for part in self.processes.parts], self.processes.reporting, shared)

    def call(self, method: str, parts: Sequence[Any] | None = None, **shared: Any) -> list[Any]:
        return self.start(method, parts, **shared).wait()

    def each(self, method: str, values: Sequence[Any]) -> list[Any]:
        """Call a method in every process, each with its own value, even if several share a part."""
        return self._send(method, [(value,) for value in values], self.ranks, {}).wait()

    def _send(
        self, method: str, arguments: Sequence[tuple], reporting: Sequence[int], shared: dict[str, Any]
    ) -> PendingCall:
        """`arguments`: of every process; `reporting`: the ranks whose results are returned."""
        raise NotImplementedError

    def one_per_part(self, results: Sequence[Any]) -> list[Any]:
        """From one result a process, select that of the first process of each part."""
        parts = list(self.processes.parts)
        return [results[parts.index(part)] for part in range(self.size)]

    def replace_engine(self, lost: Exception) -> None:
        """Start a new process in place of a dead one and build its roles from scratch."""
        raise lost

    @abstractmethod
    def reinit_process_group(self) -> bool:
        """Make the processes callable again after OutOfMemory. True: there are several, and their sharded models must
        be rebuilt, since they can only be saved now."""


class InProcessGroup(Group):
    """A role in this process."""

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
    """The device, mesh and stop request that a role is built with."""

    device: Device
    mesh: Mesh  # the processes that share the role
    stop: StopRequest


@dataclass(frozen=True)
class Unit:
    """Roles that are built together in the same processes."""

    name: str
    build: Callable[[Any, RoleContext], dict[str, Any]]  # returns this process's roles by name
    roles: tuple[str, ...]
    engines: tuple[str, ...] = ()  # roles without context parallelism: each tensor-parallel group gets a part
    ranks: Sequence[int] | None = None  # its ranks in the world; None: all
    learns: bool = False  # whether it trains a model
    apart: bool = False  # in independent processes outside the world, such as vLLM engines
    environment: Mapping[str, str] = field(default_factory=dict)  # environment variables of those processes


class RoleHost:
    """Builds and holds the roles of one process. It is itself a role, which the controller calls in all processes."""

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
        """Build a unit's roles. Called in every process, because all take part in creating the mesh of every unit."""
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
        """Seed this process after all units are built. Only dropout may differ between processes, and only between
        processes that work on different tokens."""
        if self._random is not None:
            restore_random_state(self._random)
            self._random = None
            return
        # Units that share a process share its whole tensor-parallel group.
        mesh = next((mesh for mesh in self.meshes.values() if mesh.here), None)
        stream = self.world.rank if mesh is None else _streams(mesh)[mesh.ranks.index(self.world.rank)]
        seed_everything(process_seed(self.options.seed, stream), deterministic=self.options.full_determinism)

    def release(self) -> None:
        """Close the roles, but keep this process's trained state in main memory for the rebuilt roles."""
        self._carried = {name: role.carry() for name, role in self.roles.items() if hasattr(role, "carry")}
        self._random = random_state()
        self.close()
        self.device.release_memory()

    def close(self) -> None:
        for name in [name for name in self.roles if name != HOST]:
            self.roles.pop(name).close()  # in place, because the RPC hub looks roles up in this dict


def _streams(mesh: Mesh) -> tuple[int, ...]:
    """The random stream of each process: its rank, or one stream per tensor-parallel group."""
    return tuple(mesh.ranks[0] + group for group in mesh.tensor_groups)


class Launcher(ABC):
    """Builds roles in processes. `device`, `world`: of the roles, as seen by the controller."""

    device: Device
    world: World
    stop: StopRequest

    def groups(self, options: Any) -> dict[str, Group]:
        """Build all roles with the controller's final options, and return their groups."""
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
        """Rebuild the roles after OutOfMemory, with their trained state."""

    def described(self) -> dict[str, Any]:
        """The placement of the roles, for the run's manifest."""
        return {}

    def disconnect(self) -> None:  # noqa: B027
        """Make the other processes exit."""


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


# ---- processes of one torchrun-style world: rank 0 is the controller, the other ranks serve its calls
#
# `RpcHub` connects rank 0 with the others, once for all groups of a run. Rank 0 calls and the others serve; it also
# performs calls itself if it has the role. Several calls of different groups may be pending at once: every process
# answers in the order of the calls. A process that fails writes the reason into the shared store before it exits, and
# the caller raises it.
#
# Calls and results are sent as JSON and raw numbers (serialization): neither the store nor the sockets authenticate the
# sender, so nothing is unpickled.

FAILURE = "trimtab_failure"  # in the store


class RpcCall(PendingCall):
    """A call to several processes, with the results received so far."""

    def __init__(self, hub: "RpcHub", name: str, ranks: Sequence[int], reporting: Sequence[int]):
        super().__init__(name)
        self.ranks, self.reporting = ranks, reporting
        self.work: tuple | None = None  # the call's arguments for this process, if it is among the ranks
        self.results: dict[int, Any] = {}
        self.sent: list[tuple[Any, torch.Tensor]] = []
        self._hub = hub

    def wait(self, seconds: float | None = None) -> list[Any]:
        self._hub.finish(self, seconds)
        return [self.results[rank] for rank in self.reporting]


class RpcHub:
    """The connections between rank 0 and the other processes of a world."""

    def __init__(self, world: World, roles: dict[str, Any], records: Sequence[type] = ()):
        """`roles`: this process's roles, which may be added later; `records`: dataclasses and exceptions in
        messages."""
        self.world, self.roles = world, roles
        self._serializer = Serializer(*records)
        self._connect()

    def _connect(self) -> None:
        self._channel = new_group(backend="gloo")
        self._store = dist.distributed_c10d._get_default_store()
        self._own: deque[RpcCall] = deque()  # calls that this process still has to perform itself
        self._expected: list[deque[RpcCall]] = [deque() for _ in range(self.world.size)]

    def reinit_process_group(self) -> None:
        """Reconnect after collectives were aborted."""
        reinit_process_group(self.world)
        self._connect()

    def group(self, name: str, processes: Processes | None = None) -> "RpcGroup":
        """`processes`: the ranks with this role; None: all."""
        return RpcGroup(self, name, processes or Processes.apart(range(self.world.size)))

    # ---- rank 0

    def start(
        self, group: "RpcGroup", method: str, arguments: Sequence[tuple], reporting: Sequence[int], shared: dict
    ) -> RpcCall:
        call = RpcCall(self, f"{group.name}.{method}", group.ranks, reporting)
        try:
            for rank, own in zip(group.ranks, arguments, strict=True):
                asked = (group.name, method, own, shared)
                if rank == self.world.rank:
                    call.work = asked
                    self._own.append(call)
                else:
                    call.sent += self._post(asked, rank)
                    self._expected[rank].append(call)
        except RuntimeError as error:
            self._explain(error)
            raise
        return call

    def finish(self, call: RpcCall, seconds: float | None) -> None:
        """Perform own calls and receive results until all results of `call` are there."""
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            while call in self._own:
                mine = self._own.popleft()
                assert mine.work is not None
                mine.results[self.world.rank] = self._perform(*mine.work)
            for rank in call.ranks:
                late = f"{call.name}: process {rank} has not answered for {seconds} s"
                while rank not in call.results:
                    result = self._receive(rank, deadline, late)
                    self._expected[rank].popleft().results[rank] = result
            for sending, _ in call.sent:
                sending.wait()
        except RuntimeError as error:  # raised by sends and collectives when a process has died
            self._explain(error)
            raise

    def _explain(self, error: RuntimeError) -> None:
        """Raise the reason that another process has stored for a broken connection, if any."""
        if (why := abort_reason()) is not None:
            raise OutOfMemory(why) from error
        if not self._store.check([FAILURE]):
            return
        with contextlib.suppress(ValueError):  # not written by one of our processes
            kind, rank, message = json.loads(self._store.get(FAILURE))
            raise (UserError(message) if kind == "UserError" else RunFailed(f"process {rank}: {message}")) from error

    def disconnect(self) -> None:
        for rank in range(1, self.world.size):
            with contextlib.suppress(RuntimeError):  # it may have exited already
                self._send(None, rank)

    # ---- other ranks

    def serve(self) -> None:
        """Answer calls until rank 0 disconnects."""
        while True:
            try:
                if (asked := self._receive(0)) is None:
                    return
                result = self._perform(*asked)
                if abort_reason() is None:
                    self._send(result, 0)
                    continue
            except OutOfMemory:
                pass
            except BaseException as error:
                if not isinstance(error, RuntimeError) or abort_reason() is None:
                    self._report(error)
                    raise
            self.reinit_process_group()

    def _report(self, error: BaseException) -> None:
        known = type(error) if isinstance(error, UserError | RunFailed) else RunFailed
        message = str(error) if known is type(error) else f"{type(error).__name__}: {error}"
        self._store.set(FAILURE, json.dumps([known.__name__, self.world.rank, message]))

    def _perform(self, role: str, method: str, own: tuple, shared: dict[str, Any]) -> Any:
        assert not method.startswith("_"), "a private method of a role"
        own_heartbeat.move(f"{role}.{method}")
        return getattr(self.roles[role], method)(*own, **shared)

    # ---- messages

    def _post(self, value: Any, rank: int) -> list[tuple[Any, torch.Tensor]]:
        """Send without waiting: the receiver may be busy, or have a result to send first. The caller must keep the
        returned tensors until they have been sent."""
        message = torch.frombuffer(self._serializer.pack(value), dtype=torch.uint8)
        parts = torch.tensor([len(message)]), message
        return [(dist.isend(part, rank, group=self._channel), part) for part in parts]

    def _send(self, value: Any, rank: int) -> None:
        with own_heartbeat.waiting():
            for sending, _ in self._post(value, rank):
                sending.wait()

    def _receive(self, rank: int, deadline: float | None = None, late: str = "") -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        with own_heartbeat.waiting():
            coming = dist.irecv(size, rank, group=self._channel)
            assert coming is not None
            try:
                if deadline is None:
                    coming.wait()
                else:
                    coming.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
            except RuntimeError as error:
                if deadline is not None and "timed out" in str(error).lower():
                    raise RunFailed(late) from error
                raise
            message = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(message, rank, group=self._channel)
        return self._serializer.unpack(message.numpy())


class RpcGroup(Group):
    def __init__(self, hub: RpcHub, name: str, processes: Processes):
        self._hub, self.name, self.processes = hub, name, processes

    def _send(
        self, method: str, arguments: Sequence[tuple], reporting: Sequence[int], shared: dict[str, Any]
    ) -> RpcCall:
        return self._hub.start(self, method, arguments, reporting, shared)

    def reinit_process_group(self) -> bool:
        self._hub.reinit_process_group()
        return True


class LocalProcessLauncher(InProcessLauncher):
    """Launcher in every process of a world; rank 0 runs the loop, the others `serve`."""

    def __init__(self, host: RoleHost, records: Sequence[type]):
        super().__init__(host)
        self._hub = RpcHub(host.world, host.roles, (*records, Processes))

    def _hosts(self, options: Any) -> tuple[Group, Iterable[str]]:
        assert options == self.host.options, "the other processes know the options as they were given"
        return self._hub.group(HOST), self.host.units

    def _group(self, role: str, processes: Processes) -> Group:
        return self._hub.group(role, processes)

    def rebuild_groups(self) -> dict[str, Group]:
        self._hub.group(HOST).call("release")
        return self.groups(self.host.options)

    def serve(self) -> None:
        try:
            self._hub.serve()
        finally:
            self.host.close()

    def disconnect(self) -> None:
        self._hub.disconnect()


def launcher_of(host: RoleHost, records: Sequence[type] = ()) -> InProcessLauncher:
    """The launcher for the size of this process's world. `records`: dataclasses and exceptions in calls and results."""
    return InProcessLauncher(host) if host.world.size == 1 else LocalProcessLauncher(host, records)
