"""Roles on the nodes of a Ray cluster: a process for each device, all in one world, and engines outside it.

The controller is the process that was started, and holds no model. It asks where everything fits, starts the processes
there, has them meet, and then builds and calls roles as with any other stage.
"""

import dataclasses
import os
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trimtab.distributed.cluster.calls import RayGroup
from trimtab.distributed.cluster.crew import Crew
from trimtab.distributed.cluster.layout import Layout
from trimtab.distributed.cluster.losses import Member
from trimtab.distributed.cluster.nodes import living_nodes
from trimtab.distributed.cluster.seats import CPU_SHARE, Placement, missing
from trimtab.distributed.cluster.worker import Job, Seating, Worker
from trimtab.distributed.device import Device, find_device
from trimtab.distributed.roles import Group
from trimtab.distributed.staging import HOST, Stage, Unit
from trimtab.distributed.wire import Wire
from trimtab.distributed.world import World
from trimtab.errors import UserError
from trimtab.interrupts import StopRequest

TO_PLACE = 60.0  # seconds until what was free a moment ago is reserved
TO_START = 300.0  # until a process runs, with everything imported and the others met
# What the controller's environment says to libraries, and a node's may not.
PASSED_ON = ("HF_HUB_OFFLINE", "HF_HOME", "HF_ENDPOINT", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM")


class RayStage(Stage):
    def __init__(self, job: Job, layout: Layout, placement: Placement, hang_timeout: float, stop: StopRequest):
        self.job, self.layout, self.placement, self.stop = job, layout, placement, stop
        self.units = list(job.units(job.options, layout.size))
        self.device: Device = find_device()
        self.world = World(0, layout.size)  # of the roles; this process only speaks for it
        self._wire = Wire(*job.records)
        self._crew = Crew(hang_timeout, stop, layout.size)
        self.found: list[dict[str, Any]] = []  # what each process says of where it is
        self._reserved: Any = None

    # ---- processes

    def open(self) -> None:
        """Start the processes, each where it belongs."""
        self._reserved = self._reserve()
        for seat in self.placement.workers:
            roles = [role for unit in self.units if self._has(unit, seat.rank) for role in unit.roles]
            self._crew.members.append(Member(self._start(seat.bundle), seat.rank, ", ".join(roles), seat.node.address))
        found = self._crew.call("where", seconds=TO_START)
        for member, where in zip(self._crew.members, found):
            member.node, member.process = where["address"], where["process"]
        self.found = found

    def _reserve(self) -> Any:
        placement = self.placement
        labels = [{"ray.io/node-id": node.id} for node in placement.bundle_nodes]
        group = placement_group(placement.bundles, strategy="PACK", bundle_label_selector=labels)
        if not group.wait(TO_PLACE):
            remove_placement_group(group)
            raise UserError(missing(self.layout, living_nodes(), ray.available_resources()))
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
        remote = ray.remote(concurrency_groups={"health": 1})(Worker)
        return remote.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._reserved, bundle),
            runtime_env={"env_vars": said | (environment or {})},
            **wanted,
        ).remote()

    def meet(self, options: Any) -> None:
        """Have the processes meet, to work with these options."""
        self.job = dataclasses.replace(self.job, options=options)
        workers = self._crew.members
        address, port = self._crew.one(workers[0], workers[0].handle.offer_place.remote(), TO_START)
        threads = int(os.environ["OMP_NUM_THREADS"]) if "OMP_NUM_THREADS" in os.environ else None
        on_node = [seat.node.id for seat in self.placement.workers]
        calls = []
        for member, node in zip(workers, on_node):
            seating = Seating(member.rank, self.layout.size, on_node.count(node), threads)
            calls.append((member, member.handle.meet.remote(self.job, seating, address, port)))
        devices: dict[int, dict[str, Any]] = {}
        if self._crew.wait(calls, lambda member, device: devices.update({member.rank: device}), TO_START):
            late = next(member for member in workers if member.rank not in devices)
            raise late.lost(f"has not met the others in {TO_START:g} s")

    def _has(self, unit: Unit, rank: int) -> bool:
        return not unit.apart and (unit.ranks is None or rank in unit.ranks)

    # ---- roles

    def groups(self, options: Any) -> dict[str, Group]:
        assert options == self.job.options, "the other processes know the options as they were given"
        hosts = RayGroup(self._crew, self._wire, HOST, self._crew.members, range(len(self._crew.members)))
        for unit in self.units:
            hosts.call("build", unit=unit.name)
        hosts.call("settle")
        places = hosts.call("places")[0]
        groups: dict[str, Group] = {}
        for unit in self.units:
            ranks, parts = places[unit.name]
            members = [self._crew.members[rank] for rank in ranks]
            groups |= {role: RayGroup(self._crew, self._wire, role, members, parts) for role in unit.roles}
        return groups

    def groups_anew(self) -> dict[str, Group]:
        hosts = RayGroup(self._crew, self._wire, HOST, self._crew.members, range(len(self._crew.members)))
        hosts.call("let_go")
        return self.groups(self.job.options)

    def described(self) -> dict[str, Any]:
        return {"layout": self.layout.rows(self.placement.resource)}

    def hang_up(self) -> None:
        pass  # they end with the stage

    def close(self, *, kindly: bool = True) -> None:
        """`kindly`: no process is lost, so all may close what they hold."""
        self._crew.end(kindly=kindly)
        if self._reserved is not None:
            remove_placement_group(self._reserved)
            self._reserved = None
