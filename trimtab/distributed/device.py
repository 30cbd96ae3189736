"""What hardware is here. No other file names a device."""

import functools
import gc
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from trimtab.distributed.memory import keep_freed_memory
from trimtab.errors import UserError


@dataclass(frozen=True)
class Device:
    """The accelerator this process computes on, or its CPU."""

    torch: torch.device
    name: str

    @property
    def is_accelerator(self) -> bool:
        return self.torch.type != "cpu"

    def memory_gib(self) -> float:
        """Peak memory so far: the accelerator's allocator, or this process's resident set."""
        if self.is_accelerator:
            return torch.cuda.max_memory_allocated(self.torch) / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    def has_fast_bf16(self) -> bool:
        if self.is_accelerator:
            return torch.cuda.is_bf16_supported()
        try:
            flags = Path("/proc/cpuinfo").read_text()
        except OSError:
            return True  # unknown: no warning rather than a wrong one
        return not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(flags.split())  # the last is aarch64's

    def bf16_fault(self) -> str | None:
        """Why bfloat16 does not work here at all, found by trying; None: it does, if slowly."""
        return _bf16_fault(self.torch.type)

    def fused_adam(self) -> bool:
        return self.torch.type in ("cpu", "cuda")

    def described(self) -> dict[str, str | int | bool]:
        """For the manifest of a run."""
        return {
            "device": self.name,
            "device_type": self.torch.type,
            "threads": torch.get_num_threads(),
            "fused_optimiser": self.fused_adam(),
            **({"bf16_fault": fault} if (fault := self.bf16_fault()) else {}),
        }

    def release_memory(self) -> None:
        """Give back what nothing holds any more, after an attempt that took too much."""
        gc.collect()
        if self.is_accelerator:
            torch.cuda.empty_cache()


def find_device() -> Device:
    if torch.cuda.is_available():
        index, found = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if index >= found:
            raise UserError(f"process {index} of this machine has no accelerator: {found} found; start fewer (--nproc)")
        torch.cuda.set_device(index)
        return Device(torch.device("cuda", index), torch.cuda.get_device_name(index))
    keep_freed_memory()
    threads = torch.get_num_threads()
    return Device(torch.device("cpu"), f"CPU, {threads} thread{'s' if threads > 1 else ''}")


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels run there."""
    return device.type == "cuda" and find_spec("triton") is not None


@functools.cache
def _bf16_fault(device_type: str) -> str | None:
    """On some CPUs a kernel of the library behind PyTorch is missing, and a run would end in its stack trace."""
    if device_type != "cpu":
        return None
    try:
        _try_bf16()
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    return None


def _try_bf16() -> None:
    """What training does with bfloat16 weights, on a few numbers: layers, attention, a norm, and back."""
    x = torch.ones(1, 2, 4, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(16, 16, dtype=torch.bfloat16, requires_grad=True)
    attended = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    hidden = torch.nn.functional.rms_norm(torch.nn.functional.linear(attended, weight), (16,))
    torch.nn.functional.silu(hidden).float().logsumexp(-1).sum().backward()


def showing(names: Sequence[str]) -> dict[str, str]:
    """The environment of a process that is to see these accelerators and no others."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)}


def count_accelerators() -> int:
    return torch.cuda.device_count()
