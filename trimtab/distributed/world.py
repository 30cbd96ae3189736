"""All processes of a run. One process is a world of one, without any communication."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trimtab.distributed.connections import opening
from trimtab.distributed.device import Device, kind_of
from trimtab.distributed.launch import STORE_SOCKET
from trimtab.distributed.peers import Peers
from trimtab.distributed.watch import pulse, watch_others
from trimtab.errors import UserError

Item = TypeVar("Item")

# Of one message or collective: processes wait for each other as long as a slow reward takes, and watch.py finds out
# which of them hangs.
PATIENCE = timedelta(days=30)


@dataclass(frozen=True)
class World(Peers):
    """Who started together, or have met otherwise. Who of them hold a model together is a mesh (mesh.py)."""

    def say(self, line: str) -> None:
        if self.leads:
            print(line, flush=True)


def find_world(device: Device) -> World:
    """Join the processes that a launcher started, if one did."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        return World(device=device.torch)
    if not dist.is_initialized():
        join(device.torch, **_meeting_place(size))
        watch_others(dist.distributed_c10d._get_default_store(), dist.get_rank(), size)
    return World(dist.get_rank(), size, device.torch)


def join(device: torch.device, **place: Any) -> None:
    """Meet the other processes at `place`: a store, this process's rank and how many they are."""
    library = collectives_of(device)
    if library is None:
        raise UserError(f"{kind_of(device).name} has no collectives in this torch: start one process")
    # What is kept in main memory is summed there.
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{library}"
    # A device that is bound must be known to every group, also to those that speak gloo alone.
    known = device.type != "cpu" and device.type in dist.Backend.backend_capability[dist.Backend.GLOO]
    options = {"device_id": device} if known else {}
    with opening():
        dist.init_process_group(backend, timeout=PATIENCE, **place, **options)


def collectives_of(device: torch.device) -> str | None:
    """The library by which processes on such devices speak to each other, if there is one."""
    if (known := kind_of(device).collectives) is not None:
        return known
    try:
        return dist.get_default_backend_for_device(device.type)
    except ValueError:
        return None


def _meeting_place(size: int) -> dict[str, Any]:
    """The store of processes that our own launcher started, behind its socket on the loopback interface: torch itself
    would listen on every interface. Other launchers have a place of their own."""
    if STORE_SOCKET not in os.environ:
        return {}
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    listening = {"is_master": True, "master_listen_fd": int(os.environ[STORE_SOCKET])} if rank == 0 else {}
    store = dist.TCPStore("127.0.0.1", port, size, wait_for_workers=False, **listening)
    return {"store": store, "rank": rank, "world_size": size}


def leave_world() -> None:
    pulse.left = True
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def deal(
    items: list[Item], size: int, cost: Callable[[Item], int], split: Callable[[Item], list[Item]]
) -> list[list[Item | None]]:
    """Share out items so that every process has equally many and about equal cost.

    Costly items are split until their number divides; where nothing can be split any more, a process gets None: it
    still takes part in the collectives of that turn, with an item that counts for nothing.
    """
    items = list(items)
    while len(items) % size:
        for index in sorted(range(len(items)), key=lambda i: (-cost(items[i]), i)):
            parts = split(items[index])
            if len(parts) > 1:
                items[index : index + 1] = parts
                break
        else:
            break
    padded: list[Item | None] = [*items, *[None] * (-len(items) % size)]
    turns = len(padded) // size
    shares: list[list[Item | None]] = [[] for _ in range(size)]
    load = [0] * size
    for item in sorted(padded, key=lambda x: 0 if x is None else -cost(x)):
        rank = min((r for r in range(size) if len(shares[r]) < turns), key=lambda r: (load[r], r))
        shares[rank].append(item)
        load[rank] += 0 if item is None else cost(item)
    return shares
