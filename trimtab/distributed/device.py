"""What hardware is here. No file outside this folder names a device, or a library that knows only one kind."""

import functools
import gc
import importlib
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from trimtab.distributed.devices import KINDS, OTHER, Kind
from trimtab.distributed.memory import allocator_of, keep_freed_memory
from trimtab.errors import UserError

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # 0: torch leaves alone what other packages bring


def kind_of(device: torch.device) -> Kind:
    """What a device offers, of one that is not here too. A tensor without contents (plan) has no kind."""
    if device.type == "cuda" and torch.version.hip is not None:
        return KINDS["rocm"]
    return KINDS.get(device.type, OTHER)


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels run there."""
    return kind_of(device).triton and find_spec("triton") is not None


def has_graphs(device: torch.device) -> bool:
    """Whether work can be captured there and replayed (captures.py)."""
    return kind_of(device).graphs and has_kernels(device)


@functools.cache
def overlaps_launches(device: torch.device) -> bool:
    """Whether a kernel there can begin while the one before it still works."""
    return kind_of(device).ptx and torch.cuda.get_device_capability(device) >= (9, 0)


def widest(device: torch.device) -> torch.dtype:
    """For sums that should be exact."""
    return torch.float64 if device.type == "meta" or kind_of(device).float64 else torch.float32


@dataclass(frozen=True)
class Device:
    """The accelerator this process computes on, or its CPU."""

    torch: torch.device
    name: str

    @property
    def is_accelerator(self) -> bool:
        return self.torch.type != "cpu"

    @property
    def kind(self) -> Kind:
        return kind_of(self.torch)

    def memory_gib(self) -> float:
        """Peak memory so far: the accelerator's allocator, or this process's resident set."""
        if (allocator := allocator_of(self.torch)) is not None:
            return allocator.max_memory_allocated(self.torch) / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    def has_fast_bf16(self) -> bool:
        if self.is_accelerator:
            supported = getattr(torch.get_device_module(self.torch), "is_bf16_supported", None)
            return supported is None or bool(supported())  # unknown: no warning rather than a wrong one
        try:
            flags = Path("/proc/cpuinfo").read_text()
        except OSError:
            return True
        return not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(flags.split())  # the last is aarch64's

    def bf16_fault(self) -> str | None:
        """Why bfloat16 does not work here at all, found by trying; None: it does, if slowly."""
        return None if self.kind.bf16 else _bf16_fault(self.torch)

    def fused_adam(self) -> bool:
        return self.kind.fused_adam

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
        if self.is_accelerator and (empty := getattr(torch.get_device_module(self.torch), "empty_cache", None)):
            empty()


def accelerator() -> torch.device | None:
    """The kind of accelerator that works here; None: there is none. It is asked whether it works: that its package is
    installed says nothing."""
    _meet_extensions()
    return torch.accelerator.current_accelerator(check_available=True)


@functools.cache
def _meet_extensions() -> None:
    """Import what brings other devices to torch. As a rule torch has done so itself, with its own import."""
    if os.environ.get(AUTOLOAD) == "0":
        return  # somebody wants to work without them
    for kind in KINDS.values():
        if kind.extension is None or find_spec(kind.extension) is None:
            continue
        try:
            importlib.import_module(kind.extension)
        except Exception as error:  # without its driver it raises anything
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"{kind.extension} is installed and cannot be imported ({reason}): install what {kind.name} needs, or "
                f"set {AUTOLOAD}=0 to work without it"
            ) from error


def here() -> Kind:
    """The kind of device that a run on this machine will use."""
    return kind_of(accelerator() or torch.device("cpu"))


def find_device() -> Device:
    if (found := accelerator()) is not None:
        index, count = int(os.environ.get("LOCAL_RANK", 0)), torch.accelerator.device_count()
        if index >= count:
            raise UserError(f"process {index} of this machine has no accelerator: {count} found; start fewer (--nproc)")
        torch.accelerator.set_device_index(index)
        device = torch.device(found.type, index)
        return Device(device, _name(device))
    keep_freed_memory()
    threads = torch.get_num_threads()
    return Device(torch.device("cpu"), f"CPU, {threads} thread{'s' if threads > 1 else ''}")


def _name(device: torch.device) -> str:
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(named(device.index)) if named else kind_of(device).name


def count_accelerators() -> int:
    return torch.accelerator.device_count() if accelerator() is not None else 0


def device_name(device: torch.device) -> str | None:
    """Of an accelerator, a name that all processes of its machine give it."""
    if device.type == "cpu":
        return None
    properties: Any = getattr(torch.get_device_module(device), "get_device_properties", lambda _: None)(device)
    if (identity := getattr(properties, "uuid", None)) is not None:
        return str(identity)
    index, variable = device.index or 0, kind_of(device).visible
    shown = os.environ.get(variable, "") if variable else ""
    return f"{device.type}:{shown.split(',')[index] if shown else index}"


def showing(kind: Kind, names: Sequence[str]) -> dict[str, str]:
    """The environment of a process that is to see these accelerators and no others, whatever Ray shows it."""
    assert kind.visible is not None and kind.left_visible is not None, "Ray counts such devices"
    # By number, since not every driver takes them in another order.
    ordered = sorted(names, key=int) if all(name.isdigit() for name in names) else names
    return {kind.visible: ",".join(ordered), kind.left_visible: "1"}


@functools.cache
def _bf16_fault(device: torch.device) -> str | None:
    """On some CPUs a kernel of the library behind PyTorch is missing, and a run would end in its stack trace."""
    try:
        with device:
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
