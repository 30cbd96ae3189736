"""Groups of roles on Ray. Messages are serialized as between any processes, and Ray transports them."""

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trimtab.distributed.device import Device, DeviceKind, kind_of_resource, visible_devices_env
from trimtab.distributed.launcher import (
    HOST,
    EngineLost,
    Group,
    Launcher,
    Processes,
    SeededOptions,
    Unanswered,
    Unit,
    WorkerLost,
)
from trimtab.distributed.process_group import World
from trimtab.distributed.ray.placement import CPU_SHARE, Layout, Placement, missing
from trimtab.distributed.ray.preflight import living_nodes
from trimtab.distributed.ray.workers import (
    DONE,
    MISTAKE,
    NO_ROOM,
    RayJob,
    RayWorker,
    RayWorkers,
    WorkerHandle,
    WorkerRank,
)
from trimtab.distributed.serialization import Serializer
from trimtab.errors import OutOfMemory, RunFailed, UserError
from trimtab.interrupts import StopRequest

ENGINE_DIED = "EngineDead"  # how vLLM calls it when a process of its own has gone
LARGE = 2**16  # bytes; what all are told alike is put into Ray's memory once


class RayGroup(Group):
    def __init__(
        self,
        workers: RayWorkers,
        serializer: Serializer,
        name: str,
        members: Sequence[WorkerHandle],
        processes: Processes | None = None,
    ):
        """`processes`: which part of a call each member gets, if not one of its own."""
        self.name, self.members = name, members
        self.processes = processes or Processes.apart([member.rank for member in members])
        self.size = self.processes.size
        self._workers, self._serializer = workers, serializer

    def start(self, method: str, parts: Sequence[Any] | None = None, **shared: Any) -> "RayCall":
        if parts is None:
            return self._ask(method, [None] * len(self.members), self.ranks, shared)
        assert len(parts) == self.size
        own = [(parts[part],) for part in self.processes.parts]
        return self._ask(method, own, self.processes.telling, shared)

    def each(self, method: str, values: Sequence[Any]) -> list[Any]:
        return self._ask(method, [(value,) for value in values], self.ranks, {}).wait()

    def _ask(
        self, method: str, values: Sequence[tuple | None], told: Sequence[int], shared: dict[str, Any]
    ) -> "RayCall":
        """`told`: whose results are handed out."""
        settings: Any = np.frombuffer(self._serializer.pack(shared), dtype=np.uint8)
        if settings.nbytes > LARGE and len(self.members) > 1:
            settings = ray.put(settings)
        asked = []
        for member, value in zip(self.members, values, strict=True):
            own = np.frombuffer(self._serializer.pack([self.name, method, value]), dtype=np.uint8)
            asked.append((member, member.handle.perform.remote(own, settings)))
        return RayCall(self._workers, self._serializer, f"{self.name}.{method}", asked, told)

    def reinit_process_group(self) -> bool:
        """All processes of the world do, also those of other groups."""
        world = self._workers.members[: self._workers.world_size]
        self._workers.call("reinit_process_group", seconds=self._workers.hang_timeout, members=world)
        return self._workers.world_size > 1


class EngineGroup(RayGroup):
    apart = True

    def __init__(self, *parts: Any, replace_engine: Callable[[EngineLost], None]):
        super().__init__(*parts)
        self._replace_engine = replace_engine

    def replace_engine(self, lost: Exception) -> None:
        assert isinstance(lost, EngineLost)
        self._replace_engine(lost)


class RayCall:
    def __init__(
        self,
        workers: RayWorkers,
        serializer: Serializer,
        name: str,
        asked: list[tuple[WorkerHandle, Any]],
        told: Sequence[int],
    ):
        self.name = name
        self._workers, self._serializer, self._asked, self._told = workers, serializer, asked, told
        self._results: dict[int, Any] = {}
        self._shortage: str | None = None

    def wait(self, seconds: float | None = None) -> list[Any]:
        if self._workers.wait(self._asked, self._take, seconds):
            late = next(member for member, _ in self._asked if member.rank not in self._results)
            raise RunFailed(f"{self.name}: {late} has not answered for {seconds} s")
        if self._shortage is not None:  # now that none is in the middle of anything
            raise OutOfMemory(self._shortage)
        return [self._results[rank] for rank in self._told]

    def found(self, seconds: float) -> list[Any]:
        deadline = time.monotonic() + seconds
        while waiting := [(member, asked) for member, asked in self._asked if member.rank not in self._results]:
            try:
                self._workers.wait(waiting, self._take, max(0.0, deadline - time.monotonic()))
                break
            except EngineLost as lost:
                self._results[lost.rank] = lost
        if self._shortage is not None:
            raise OutOfMemory(self._shortage)
        return [self._results.get(rank, Unanswered()) for rank in self._told]

    def _take(self, member: WorkerHandle, answer: tuple[str, Any]) -> None:
        kind, content = answer
        self._results[member.rank] = None
        if kind == DONE:
            self._results[member.rank] = self._serializer.unpack(np.array(content))
        elif kind == NO_ROOM:
            self._shortage = content
        elif kind == MISTAKE:
            raise UserError(content)
        elif member.engine and ENGINE_DIED in content:
            raise member.lost(f"was lost: {content}")
        else:
            self._workers.blame_somebody(member, f"{self.name}: {content}")


# ---- Roles on the nodes of a Ray cluster: a process for each device, all in one world, and engines outside it. The
# controller is the process that was started, and holds no model. It asks where everything fits, starts the processes
# there, has them meet, and then builds and calls roles as with any other stage.


TO_PLACE = 60.0  # seconds until what was free a moment ago is reserved
TO_START = 300.0  # until a process runs, with everything imported and the others met
# What the controller's environment says to libraries, and a node's may not.
PASSED_ON = ("HF_HUB_OFFLINE", "HF_HOME", "HF_ENDPOINT", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM")


class RayLauncher(Launcher):
    def __init__(
        self,
        job: RayJob,
        layout: Layout,
        placement: Placement,
        hang_timeout: float,
        stop: StopRequest,
        *,
        again: bool = False,
    ):
        """`again`: for a run that has lost its processes."""
        self.job, self.layout, self.placement, self.stop = job, layout, placement, stop
        self.units = list(job.units(job.options, layout.size))
        self.device = Device(torch.device("cpu"), "CPU")  # of this process, on which no model is
        self.world = World(0, layout.size)  # of the roles; this process only speaks for it
        self._serializer = Serializer(*job.records, Processes)
        self._workers = RayWorkers(hang_timeout, stop, layout.size)
        self.found: list[dict[str, Any]] = []  # what each process says of where it is
        self.devices: list[dict[str, Any]] = []  # and of its device
        self._reserved: Any = None
        self._again = again
        self._engines: dict[str, Group] = {}

    # ---- processes

    def open(self) -> None:
        """Start the processes, each where it belongs."""
        self._reserved = self._reserve()
        for seat in self.placement.workers:
            roles = [role for unit in self.units if self._has(unit, seat.rank) for role in unit.roles]
            self._workers.members.append(
                WorkerHandle(self._start(seat.bundle), seat.rank, ", ".join(roles), seat.node.address)
            )
        self.found = self._located(self._workers.members)
        if self._apart is None:
            return
        for index, bundles in enumerate(self.placement.engines):
            node, held = self.placement.bundle_nodes[bundles[0]], ", ".join(self._apart.roles)
            member = WorkerHandle(None, self.layout.size + index, held, node.address, engine=True)
            self._start_engine(member)
            self._workers.members.append(member)
        self.found += self._located(self._workers.members[self.layout.size :])

    def _located(self, members: Sequence[WorkerHandle]) -> list[dict[str, Any]]:
        """What they say of where they are."""
        found = self._workers.call("where", seconds=TO_START, members=members)
        for member, where in zip(members, found):
            member.node, member.node_id, member.process = where["address"], where["node"], where["process"]
        return found

    @property
    def _apart(self) -> Unit | None:
        """What engines hold."""
        return next((unit for unit in self.units if unit.apart), None)

    def _bundles(self, rank: int) -> list[int]:
        """Those of an engine."""
        return self.placement.engines[rank - self.layout.size]

    def _start_engine(self, member: WorkerHandle) -> None:
        assert self._apart is not None and self.layout.engines is not None
        bundles, devices = self._bundles(member.rank), float(self.layout.engines.tensor_parallel)
        environment = dict(self._apart.environment)
        if len(bundles) > 1:  # devices of a pool, of which Ray would show it the first one alone
            shown = [
                name
                for seat, found in zip(self.placement.workers, self.found)
                for name in found["devices"]
                if seat.bundle in bundles
            ]
            if shown:
                environment |= visible_devices_env(self._kind(), shown)
        shares = self.layout.engines.pool is not None
        member.handle = self._start(bundles[0], environment, self.placement.share if shares else devices)

    def _kind(self) -> DeviceKind:
        """Of the devices that Ray gives out; a process that does not see its own is of a CPU."""
        seen = self.found[0]["kind"]
        return seen if seen.visible is not None else kind_of_resource(self.placement.resource)

    def _reserve(self) -> Any:
        placement = self.placement
        labels = [{"ray.io/node-id": node.id} for node in placement.bundle_nodes]
        group = placement_group(placement.bundles, strategy="PACK", bundle_label_selector=labels)
        if not group.wait(TO_PLACE):
            remove_placement_group(group)
            lacking = missing(self.layout, living_nodes(), ray.available_resources())
            raise WorkerLost(lacking) if self._again else UserError(lacking)
        return group

    def _start(self, bundle: int, environment: dict[str, str] | None = None, devices: float | None = None) -> Any:
        placement = self.placement
        share = placement.share if devices is None else devices
        wanted: dict[str, Any] = {"num_cpus": CPU_SHARE}
        if placement.resource == "GPU":
            wanted["num_gpus"] = share
        elif placement.resource is not None:
            wanted["resources"] = {placement.resource: share}
        said = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        remote = ray.remote(concurrency_groups={"health": 1})(RayWorker)
        return remote.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._reserved, bundle),
            runtime_env={"env_vars": said | (environment or {})},
            **wanted,
        ).remote()

    def meet(self, options: SeededOptions) -> None:
        """Have the processes meet, to work with these options."""
        self.job = dataclasses.replace(self.job, options=options)
        workers = self._workers.members[: self.layout.size]
        address, port = self._workers.one(workers[0], workers[0].handle.offer_place.remote(), TO_START)
        calls = [
            (member, member.handle.meet.remote(self.job, self._seating(member), address, port))
            for member in self._workers.members
        ]
        met: dict[int, dict[str, Any]] = {}
        if self._workers.wait(calls, lambda member, device: met.update({member.rank: device}), TO_START):
            late = next(member for member, _ in calls if member.rank not in met)
            raise late.lost(f"has not met the others in {TO_START:g} s")
        self.devices = [met[member.rank] for member in self._workers.members]

    def _seating(self, member: WorkerHandle) -> WorkerRank:
        threads = int(os.environ["OMP_NUM_THREADS"]) if "OMP_NUM_THREADS" in os.environ else None
        neighbours = sum(other.node == member.node for other in self._workers.members)
        if member.engine:
            return WorkerRank(0, 1, neighbours, threads)
        return WorkerRank(member.rank, self.layout.size, neighbours, threads)

    def replace_engine(self, lost: EngineLost) -> None:
        """Other engines in the place of those that are gone, with the weights that all began with."""
        assert self._apart is not None
        engines = self._workers.members[self.layout.size :]
        gone = [member for member in engines if member.rank == lost.rank or not self._workers.answers(member)]
        alive = {node.id for node in living_nodes()}
        if not {self.placement.bundle_nodes[self._bundles(member.rank)[0]].id for member in gone} <= alive:
            raise WorkerLost(str(lost))  # its place is gone too
        try:
            for member in gone:
                self._workers.kill(member)
                self._start_engine(member)
            self._located(gone)
            for member in gone:
                self._workers.one(member, member.handle.meet.remote(self.job, self._seating(member), "", 0), TO_START)
                self._workers.tell(member)
            self._group(HOST, gone).call("build", unit=self._apart.name)
        except EngineLost as another:
            raise WorkerLost(str(another)) from another

    def _has(self, unit: Unit, rank: int) -> bool:
        return not unit.apart and (unit.ranks is None or rank in unit.ranks)

    # ---- roles

    def groups(self, options: SeededOptions) -> dict[str, Group]:
        assert options == self.job.options, "the other processes know the options as they were given"
        building = self._start_building_engines()
        if building is not None and self.layout.engines is not None and self.layout.engines.pool is not None:
            building.wait()  # each would count what the other takes of the device
            building = None
        members = self._workers.members
        workers = self._group(HOST, members[: self.layout.size])
        inside = [unit for unit in self.units if not unit.apart]
        for unit in inside:
            workers.call("build", unit=unit.name)
        workers.call("settle")
        groups: dict[str, Group] = {
            role: self._group(role, [members[rank] for rank in found.ranks], found)
            for role, found in workers.call("processes")[0].items()
        }
        if building is not None:
            building.wait()
        return groups | self._engines

    def _start_building_engines(self) -> RayCall | None:
        """Once: they go on when the others are built anew."""
        apart, engines = self._apart, self._workers.members[self.layout.size :]
        if apart is None or self._engines:
            return None
        self._engines = {
            role: EngineGroup(self._workers, self._serializer, role, engines, replace_engine=self.replace_engine)
            for role in apart.roles
        }
        return self._group(HOST, engines).start("build", unit=apart.name)

    def rebuild_groups(self) -> dict[str, Group]:
        self._group(HOST, self._workers.members[: self.layout.size]).call("let_go")
        return self.groups(self.job.options)

    def _group(self, role: str, members: Sequence[WorkerHandle], processes: Processes | None = None) -> RayGroup:
        return RayGroup(self._workers, self._serializer, role, members, processes)

    def described(self) -> dict[str, Any]:
        threads = [device["threads"] for device in self.devices]
        return {"layout": self.layout.rows(self.placement.resource), "threads_of_processes": threads}

    def hang_up(self) -> None:
        pass  # they end with the stage

    def close(self, *, kindly: bool = True) -> None:
        """`kindly`: no process is lost, so all may close what they hold."""
        self._workers.end(kindly=kindly)
        if self._reserved is not None:
            remove_placement_group(self._reserved)
            self._reserved = None
