"""Memory of an accelerator or of this machine: how much there is, giving it back, and knowing when it is short."""

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# How those say it that have no exception of their own: PyTorch's CPU allocator, the driver, cuBLAS.
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def allocator_of(device: torch.device) -> Any:
    """torch's module of a device that has memory of its own and counts it; None: it is main memory, or as good as."""
    module = getattr(torch, device.type, None)
    return module if hasattr(module, "mem_get_info") else None


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still take; of main memory, its share among the processes of this machine."""
    if (allocator := allocator_of(device)) is not None:
        free, _ = allocator.mem_get_info(device)
        return free + allocator.memory_reserved(device) - allocator.memory_allocated(device)
    return _free_main_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def total_memory(device: torch.device) -> int:
    """Bytes of an accelerator, whoever uses them; of main memory, what this process may still take."""
    allocator = allocator_of(device)
    return free_memory(device) if allocator is None else allocator.mem_get_info(device)[1]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory is short, an accelerator's or the machine's."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and any(words in said for words in OUT_OF_MEMORY)


def release_main_memory() -> None:
    """Give back to the system what was freed: the C library keeps it, and a model that is gathered layer by layer would
    seem to be held whole."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def keep_freed_memory() -> None:
    """Ask the C library to reuse large blocks instead of returning them: fresh pages cost a tenth of a CPU step."""
    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(mmap_threshold, 32 * 2**20)  # the most it takes
        libc.mallopt(trim_threshold, 2**30)


def _free_main_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    group = Path("/sys/fs/cgroup")  # a container's own limit
    with contextlib.suppress(OSError, ValueError):  # none, or "max"
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        kinds = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached_files = int(kinds["inactive_file"]) + int(kinds["active_file"])  # let go when it is needed
        free = min(free, max(0, limit - used + cached_files))
    return free
