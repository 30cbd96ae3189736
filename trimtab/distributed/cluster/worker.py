"""One process of a run on Ray: the host of its roles. The controller calls it, and asks it how it is while it works."""

import os
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist

from trimtab.distributed.calling_off import meet_again, reason_to_call_off
from trimtab.distributed.device import find_device
from trimtab.distributed.interfaces import speak_at
from trimtab.distributed.link import NODE_ADDRESS
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.roles import Processes
from trimtab.distributed.serialization import Serializer
from trimtab.distributed.staging import Host, SeededOptions, Unit
from trimtab.distributed.watch import in_collective, pulse
from trimtab.distributed.world import World, join
from trimtab.errors import OutOfMemory, RunFailed, UserError
from trimtab.interrupts import StopRequest

DONE, NO_ROOM, MISTAKE, FAILED = "done", "no room", "mistake", "failed"


@dataclass(frozen=True)
class Job:
    """What every process of a run is told before it builds anything. Functions and classes of modules, so that they
    can be named to another process."""

    options: SeededOptions
    units: Callable[[Any, int], Sequence[Unit]]
    make_mesh: Callable[..., Mesh]  # (options, world, ranks, learns=...)
    records: tuple[type, ...]
    prepare: Callable[[Any], None]  # this process, before any role is built
    folder: str  # from which relative paths go


@dataclass(frozen=True)
class Seating:
    """Where a process is among the others."""

    rank: int
    size: int
    neighbours: int  # processes of this run on its machine
    threads: int | None  # None: its share of the machine's


class Worker:
    def __init__(self) -> None:
        self.stop = StopRequest()
        os.environ[NODE_ADDRESS] = ray.util.get_node_ip_address()
        self._place: socket.socket | None = None
        pulse.rest()  # to start has a limit of its own

    # ---- beside the work

    @ray.method(concurrency_group="health")
    def beat(self) -> tuple[str, float, bool]:
        """What it is doing, for how many seconds nothing has moved, and whether it waits for others."""
        return pulse.doing, pulse.still(), in_collective()

    @ray.method(concurrency_group="health")
    def hear(self, number: int) -> None:
        self.stop.hear(number)

    # ---- where it is

    def where(self) -> dict[str, Any]:
        context, device = ray.get_runtime_context(), find_device()
        return {
            "node": context.get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "process": os.getpid(),
            "kind": device.kind,
            "bf16_fault": device.bf16_fault(),
            "devices": [name for names in context.get_accelerator_ids().values() for name in names],
        }

    def offer_place(self) -> tuple[str, int]:
        """Where the processes meet: open already, at the address by which the nodes know each other."""
        address = ray.util.get_node_ip_address()
        self._place = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        self._place.bind((address, 0))
        self._place.listen(1024)
        return address, self._place.getsockname()[1]

    # ---- the run

    def meet(self, job: Job, seating: Seating, address: str, port: int) -> dict[str, Any]:
        """Join the others and be ready to build roles. What its device is."""
        os.environ["LOCAL_WORLD_SIZE"] = str(seating.neighbours)
        if os.path.isdir(job.folder):
            os.chdir(job.folder)
        torch.set_num_threads(seating.threads or max(1, (os.cpu_count() or 1) // seating.neighbours))
        device = find_device()
        world = World(device=device.torch)
        if seating.size > 1:
            speak_at(ray.util.get_node_ip_address())
            os.environ["MASTER_PORT"] = str(port)  # of the connections that stay when others are broken
            listening = {} if self._place is None else {"is_master": True, "master_listen_fd": self._place.detach()}
            store = dist.TCPStore(address, port, seating.size, wait_for_workers=False, **listening)
            join(device.torch, store=store, rank=seating.rank, world_size=seating.size)
            world = World(seating.rank, seating.size, device.torch)
        job.prepare(job.options)
        units = job.units(job.options, seating.size)
        self._serializer = Serializer(*job.records, Processes)
        self.host = Host(job.options, units, job.make_mesh, device, world, self.stop)
        return device.described()

    def perform(self, own: np.ndarray, shared: np.ndarray) -> tuple[str, Any]:
        """One call of a role. What goes wrong is told, not raised: so the controller reads it as it was meant."""
        try:
            role, method, part = self._serializer.unpack(own.copy())
            settings = self._serializer.unpack(shared.copy())  # Ray's memory is not to be written to
            assert not method.startswith("_"), "a role's own business"
            pulse.thread = threading.get_ident()
            pulse.move(f"{role}.{method}")
            result = getattr(self.host.roles[role], method)(*(part or ()), **settings)
            if (why := reason_to_call_off()) is not None:
                return NO_ROOM, why
            return DONE, np.frombuffer(self._serializer.pack(result), dtype=np.uint8)
        except OutOfMemory as error:
            return NO_ROOM, str(error)
        except UserError as error:
            return MISTAKE, str(error)
        except RunFailed as error:
            return FAILED, str(error)
        except Exception as error:
            if isinstance(error, RuntimeError) and (why := reason_to_call_off()) is not None:
                return NO_ROOM, why
            where = "".join(traceback.format_tb(error.__traceback__)[-3:])
            return FAILED, f"{type(error).__name__}: {error}\n{where}".rstrip()
        finally:
            pulse.rest()

    def meet_again(self) -> None:
        self.host.device.release_memory()
        meet_again(self.host.world)

    def leave(self) -> None:
        self.host.close()
