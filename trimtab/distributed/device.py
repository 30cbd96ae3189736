"""Devices: what each kind offers, as a table, which one is here, and its memory.

No file outside this folder names a device, or a library that knows only one kind, and no other file says what one can
or cannot do. What a device does not offer falls back where something else gives the same numbers (kernels, graphs,
fused optimizer, attention over packed rows, sums in double precision), and is refused where nothing does (`LACKING`),
before anything is loaded.
"""

import contextlib
import ctypes
import functools
import gc
import importlib
import os
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import torch

from trimtab.errors import UserError


@dataclass(frozen=True)
class DeviceKind:
    name: str  # for people
    collectives: str | None = None
    """The collectives library; None: the one that torch knows for such devices, if any."""
    interface: str | None = None
    """Environment: the network interface that the library is to use."""
    resource: str | None = None
    """Ray's name of such devices; None: Ray does not count them."""
    visible: str | None = None
    """Environment: the devices that a process is to see."""
    extension: str | None = None
    """The package that brings the device to torch."""
    bf16: bool = False
    """Known to work; else it is tried before the first step."""
    float64: bool = False
    """In kernels and collectives alike."""
    fused_adam: bool = False
    triton: bool = False
    ptx: bool = False
    """Its instructions can stand inside Triton's kernels."""
    graphs: bool = False
    """Captured work, with Triton's kernels in it."""
    varlen: bool = False
    """torch's own attention of sequences of any length, in half precision."""
    wide_products: bool = False
    """Products of half-precision matrices with a single-precision result."""
    shared_memory: bool = False
    """Processes on one device can see each other's tensors."""
    lacks: frozenset[str] = frozenset()
    """Of LACKING, what is refused there."""

    def lacking(self, feature: str) -> str | None:
        """This device's name, if a run that asks for the feature is refused there."""
        assert feature in LACKING, feature
        return self.name if feature in self.lacks else None


# What a run can ask for and a device may not offer: config/resolved_config.py has the options.
LACKING = frozenset({"ring attention", "tensor parallel", "sleeping engines", "four bit", "liger", "flash-attn"})

CUDA = DeviceKind(
    "an NVIDIA GPU",
    collectives="nccl",
    interface="NCCL_SOCKET_IFNAME",
    resource="GPU",
    visible="CUDA_VISIBLE_DEVICES",
    bf16=True,
    float64=True,
    fused_adam=True,
    triton=True,
    ptx=True,
    graphs=True,
    varlen=True,
    wide_products=True,
    shared_memory=True,
)

DEVICE_KINDS = {
    "cpu": DeviceKind("a CPU", collectives="gloo", float64=True, fused_adam=True),
    "cuda": CUDA,
    # torch calls it cuda too, where it was built for ROCm.
    "rocm": replace(CUDA, name="an AMD GPU", ptx=False, visible="HIP_VISIBLE_DEVICES"),
    "npu": DeviceKind(
        "an Ascend NPU",
        collectives="hccl",
        interface="HCCL_SOCKET_IFNAME",
        resource="NPU",
        visible="ASCEND_RT_VISIBLE_DEVICES",
        extension="torch_npu",
        # transformers has the device's own operator for flash attention, so that its package is not needed.
        lacks=LACKING,
    ),
    "xpu": DeviceKind(
        "an Intel GPU",
        collectives="xccl",
        resource="GPU",
        visible="ZE_AFFINITY_MASK",
        fused_adam=True,
        lacks=frozenset({"sleeping engines", "liger"}),
    ),
    "mps": DeviceKind("an Apple GPU", fused_adam=True, lacks=frozenset({"sleeping engines", "four bit", "liger"})),
}
OTHER_DEVICE = DeviceKind("this accelerator", lacks=frozenset({"sleeping engines", "four bit", "liger"}))

RESOURCES = tuple(dict.fromkeys(kind.resource for kind in DEVICE_KINDS.values() if kind.resource))
INTERFACES = tuple(dict.fromkeys(kind.interface for kind in DEVICE_KINDS.values() if kind.interface))


def kind_of_resource(resource: str | None) -> DeviceKind:
    """The devices of a Ray cluster, before a process sees them: the first kind with a given resource name."""
    return next((kind for kind in DEVICE_KINDS.values() if kind.resource == resource), DEVICE_KINDS["cpu"])


# ---- memory

# What torch's CPU allocator, the driver and cuBLAS say, which have no exception class for it.
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def allocator_of(device: torch.device) -> Any:
    """torch's module of a device that has its own memory and counts it; None: it is main memory, or as good as."""
    module = getattr(torch, device.type, None)
    return module if hasattr(module, "mem_get_info") else None


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still take; of main memory, its share among the processes of this machine."""
    if (allocator := allocator_of(device)) is not None:
        free, _ = allocator.mem_get_info(device)
        return free + allocator.memory_reserved(device) - allocator.memory_allocated(device)
    return _free_main_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def total_memory(device: torch.device) -> int:
    """Bytes of an accelerator, used or not; of main memory, what this process may still take."""
    allocator = allocator_of(device)
    return free_memory(device) if allocator is None else allocator.mem_get_info(device)[1]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory is short, an accelerator's or the machine's."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and any(words in said for words in OUT_OF_MEMORY)


def release_main_memory() -> None:
    """Return freed memory to the system: the C library keeps it, and a model that is gathered layer by layer would seem
    to be held whole."""
    if _malloc_trim is not None:
        _malloc_trim(0)


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
        cached_files = int(kinds["inactive_file"]) + int(kinds["active_file"])  # dropped when memory is needed
        free = min(free, max(0, limit - used + cached_files))
    return free


# ---- which device is here

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # 0: torch imports no other packages' devices


def kind_of(device: torch.device) -> DeviceKind:
    """What a device offers, whether or not it is here."""
    if device.type == "cuda" and torch.version.hip is not None:
        return DEVICE_KINDS["rocm"]
    return DEVICE_KINDS.get(device.type, OTHER_DEVICE)


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels run there."""
    return kind_of(device).triton and find_spec("triton") is not None


def has_graphs(device: torch.device) -> bool:
    """Whether work can be captured there and replayed (`capture_graph`)."""
    return kind_of(device).graphs and has_kernels(device)


@functools.cache
def overlaps_launches(device: torch.device) -> bool:
    """Whether a kernel there can begin while the one before it still works."""
    return kind_of(device).ptx and torch.cuda.get_device_capability(device) >= (9, 0)


def widest(device: torch.device) -> torch.dtype:
    """The dtype for sums that should be exact."""
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
    def kind(self) -> DeviceKind:
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
        """Free what nothing refers to any more, after an attempt that took too much."""
        gc.collect()
        if self.is_accelerator and (empty := getattr(torch.get_device_module(self.torch), "empty_cache", None)):
            empty()


def accelerator() -> torch.device | None:
    """The accelerator that works here, not only one whose package is installed; None: there is none."""
    _import_extensions()
    return torch.accelerator.current_accelerator(check_available=True)


@functools.cache
def _import_extensions() -> None:
    """Import the packages that bring other devices to torch, as torch's own import does as a rule."""
    if os.environ.get(AUTOLOAD) == "0":
        return
    for kind in DEVICE_KINDS.values():
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


def local_device_kind() -> DeviceKind:
    """The kind of device that a run on this machine will use."""
    return kind_of(accelerator() or torch.device("cpu"))


def find_device() -> Device:
    if (found := accelerator()) is not None:
        index, count = int(os.environ.get("LOCAL_RANK", 0)), torch.accelerator.device_count()
        if index >= count:
            raise UserError(f"process {index} of this machine has no accelerator: {count} found; start fewer (--nproc)")
        torch.accelerator.set_device_index(index)
        device = torch.device(found.type, index)
        named = getattr(torch.get_device_module(device), "get_device_name", None)
        return Device(device, str(named(index)) if named else kind_of(device).name)
    keep_freed_memory()
    threads = torch.get_num_threads()
    return Device(torch.device("cpu"), f"CPU, {threads} thread{'s' if threads > 1 else ''}")


def count_accelerators() -> int:
    return torch.accelerator.device_count() if accelerator() is not None else 0


def device_name(device: torch.device) -> str | None:
    """The name of an accelerator that all processes of its machine give it."""
    if device.type == "cpu":
        return None
    properties: Any = getattr(torch.get_device_module(device), "get_device_properties", lambda _: None)(device)
    if (identity := getattr(properties, "uuid", None)) is not None:
        return str(identity)
    index, variable = device.index or 0, kind_of(device).visible
    shown = os.environ.get(variable, "") if variable else ""
    return f"{device.type}:{shown.split(',')[index] if shown else index}"


def visible_devices_env(kind: DeviceKind, names: Sequence[str]) -> dict[str, str]:
    """The environment of a process that is to see these accelerators and no others; Ray leaves it as it is."""
    assert kind.visible is not None, "Ray counts such devices"
    # By number, since not every driver takes them in another order.
    ordered = sorted(names, key=int) if all(name.isdigit() for name in names) else names
    return {kind.visible: ",".join(ordered), f"RAY_EXPERIMENTAL_NOSET_{kind.visible}": "1"}


@functools.cache
def _bf16_fault(device: torch.device) -> str | None:
    """On some CPUs a kernel of the library behind torch is missing, and a run would end in its stack trace."""
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


# ---- captured work

DeviceGraph: TypeAlias = torch.cuda.CUDAGraph


def capture_graph(work: Callable[[], None], pool: tuple[int, int] | None) -> DeviceGraph:
    """Run `work` once and capture it, to be replayed on the same tensors with the contents that they have then. `pool`:
    another graph's pool(), to share temporary memory; then they must be replayed one after another."""
    current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(current)
    with torch.cuda.stream(aside):
        work()
    current.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads may use the device
        work()
    return graph
