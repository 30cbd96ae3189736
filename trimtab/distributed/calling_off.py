"""Calling off what the processes of a world are in the middle of, so that all can begin it anew.

A process that cannot go on inside a collective leaves the others waiting in it. It says why in the store that all
share and breaks its connections; the others then fail where they wait, find the reason, and break theirs. Afterwards
all meet again, at the same store, as a new group of processes.
"""

import os

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from trimtab.distributed.connections import break_all
from trimtab.distributed.watch import pulse
from trimtab.distributed.world import World, join

REASON = "trimtab_called_off"


def call_off(why: str) -> None:
    """Break off the collectives of this world. What the others wait for will not come."""
    if _is_world():
        _get_default_store().set(REASON, why)
        _break_connections()


def reason_to_call_off() -> str | None:
    """Why another process has called this world's collectives off, if one has; then this one does the same."""
    if not _is_world():
        return None
    try:
        if not _get_default_store().check([REASON]):
            return None
        why = _get_default_store().get(REASON).decode(errors="replace")
    except RuntimeError:  # the store has gone with its process: not called off, but broken
        return None
    _break_connections()
    return why


def meet_again(world: World) -> None:
    """A new group of the same processes in place of the one that was called off. What was made for the old group, a
    split model most of all, cannot be used in the new one."""
    if world.size == 1:
        return
    store = dist.PrefixStore("again", _get_default_store())
    dist.destroy_process_group()
    with pulse.waiting():  # another one may be in the middle of a long call
        join(world.device, store=store, rank=world.rank, world_size=world.size)


def _is_world() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _break_connections() -> None:
    break_all(but=int(os.environ.get("MASTER_PORT", 0)))  # where the store is
