"""Launches that begin while the one before them still works, where the device can (sm_90 and later).

Such a kernel calls `wait` before it touches what others write, and every program of it does: who waits for a kernel
then also waits for all that this one has waited for.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trimtab.distributed.device import kind_of


@triton.jit
def wait(OVERLAPPED: tl.constexpr):
    """For the launch before; and let the next one begin."""
    if OVERLAPPED:
        gdc_wait()
        gdc_launch_dependents()


def overlapped(device: torch.device) -> dict[str, bool]:
    """How to launch a kernel that waits."""
    return {"OVERLAPPED": True, "launch_pdl": True} if _can_overlap(device) else {"OVERLAPPED": False}


@functools.cache
def _can_overlap(device: torch.device) -> bool:
    return kind_of(device).ptx and torch.cuda.get_device_capability(device) >= (9, 0)
