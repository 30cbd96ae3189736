"""Launches that begin while the one before them still works, where the device can (sm_90 and later).

Such a kernel calls `wait` before it touches what others write, and every program of it does: who waits for a kernel
then also waits for all that this one has waited for.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trimtab.distributed.device import overlaps_launches


@triton.jit
def wait(OVERLAPPED: tl.constexpr):
    """For the launch before; and let the next one begin."""
    if OVERLAPPED:
        gdc_wait()
        gdc_launch_dependents()


def overlapped(device: torch.device) -> dict[str, bool]:
    """How to launch a kernel that waits."""
    return {"OVERLAPPED": True, "launch_pdl": True} if overlaps_launches(device) else {"OVERLAPPED": False}
