"""Devices: a table of the features of each kind, the device of this process, and its memory.

No file outside this folder names a device or a library for one kind of device, and only this table says what a device
supports. A missing feature is replaced if something else gives the same numbers (kernels, graphs, fused optimizer,
attention over packed rows, sums in double precision). Otherwise the option is refused (`LACKING`), before anything is
loaded.
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

from trimtab.distributed.supervision import PER_DEVICE
from trimtab.errors import UserError


@dataclass(frozen=True)
class DeviceKind:
    """The features of one kind of device."""

    name: str  # for messages
    collectives: str | None = None
    """The collectives backend; None: torch's default for the device, if any."""
    interface: str | None = None
    """Environment variable with the network interface of the collectives backend."""
    resource: str | None = None
    """Ray's resource name; None: Ray does not count such devices."""
    visible: str | None = None
    """Environment variable with the devices visible to a process."""
    extension: str | None = None
    """The package that adds the device to torch."""
    bf16: bool = False
    """Known to work; otherwise it is tried before the first step."""
    float64: bool = False
    """Supported in kernels and in collectives."""
    fused_adam: bool = False
    triton: bool = False
    ptx: bool = False
    """Triton kernels may contain inline PTX."""
    graphs: bool = False
    """CUDA graphs, also with Triton kernels."""
    varlen: bool = False
    """torch's variable-length attention in half precision."""
    wide_products: bool = False
    """Matrix products of half-precision inputs with fp32 output."""
    shared_memory: bool = False
    """Processes on one device can share tensors."""
    lacks: frozenset[str] = frozenset()
    """The features of LACKING that are refused on this device."""

    def lacking(self, feature: str) -> str | None:
        """The device's name if the feature is refused on it, else None."""
        assert feature in LACKING, feature
        return self.name if feature in self.lacks else None


# Features that a device may lack; config/resolved_config.py maps them to options and alternatives.
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
    # In ROCm builds torch calls this device cuda too.
    "rocm": replace(CUDA, name="an AMD GPU", ptx=False, visible="HIP_VISIBLE_DEVICES"),
    "npu": DeviceKind(
        "an Ascend NPU",
        collectives="hccl",
        interface="HCCL_SOCKET_IFNAME",
        resource="NPU",
        visible="ASCEND_RT_VISIBLE_DEVICES",
        extension="torch_npu",
        # transformers uses the device's own flash attention operator, without the flash-attn package.
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

# Messages of torch's CPU allocator, the driver and cuBLAS, which have no exception class for out-of-memory.
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def allocator_of(device: torch.device) -> Any:
    """torch's module of a device with its own, accounted memory; None: the device uses main memory."""
    module = getattr(torch, device.type, None)
    return module if hasattr(module, "mem_get_info") else None


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still allocate; of main memory, its share among this machine's processes."""
    if (allocator := allocator_of(device)) is not None:
        free = allocator.mem_get_info(device)[0] // processes_per_device(torch.accelerator.device_count())
        return free + allocator.memory_reserved(device) - allocator.memory_allocated(device)
    return _free_main_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def total_memory(device: torch.device) -> int:
    """Bytes of an accelerator's memory; of main memory, the bytes this process may still allocate."""
    allocator = allocator_of(device)
    if allocator is None:
        return free_memory(device)
    return allocator.mem_get_info(device)[1] // processes_per_device(torch.accelerator.device_count())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception reports that an accelerator's or the machine's memory is exhausted."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    message = str(error)
    return isinstance(error, RuntimeError) and any(words in message for words in OUT_OF_MEMORY)


def release_main_memory() -> None:
    """Return freed memory to the system. The C library keeps it otherwise, so that a model gathered layer by layer
    would take as much memory as a whole one."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def keep_freed_memory() -> None:
    """Ask the C library to reuse large blocks instead of returning them: fresh pages cost a tenth of a CPU step."""
    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(mmap_threshold, 32 * 2**20)  # the largest value it accepts
        libc.mallopt(trim_threshold, 2**30)


def return_freed_memory() -> None:
    """Ask the C library to return every block of 64 KiB or more when it is freed, so that memory can be measured."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(-3, 2**16)


def private_bytes() -> int:
    """This process's memory without mapped files; where the system does not say, its largest so far."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
    except (OSError, StopIteration):
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _free_main_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    group = Path("/sys/fs/cgroup")  # a container's limit
    with contextlib.suppress(OSError, ValueError):  # none, or "max"
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        kinds = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached_files = int(kinds["inactive_file"]) + int(kinds["active_file"])  # dropped when memory is needed
        free = min(free, max(0, limit - used + cached_files))
    return free


# ---- the device of this process

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # 0: torch does not import device extensions


def kind_of(device: torch.device) -> DeviceKind:
    """The features of a device, which need not be present."""
    if device.type == "cuda" and torch.version.hip is not None:
        return DEVICE_KINDS["rocm"]
    return DEVICE_KINDS.get(device.type, OTHER_DEVICE)


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run on the device."""
    return kind_of(device).triton and find_spec("triton") is not None


def has_graphs(device: torch.device) -> bool:
    """Whether the device can capture and replay work (`capture_graph`)."""
    return kind_of(device).graphs and has_kernels(device)


@functools.cache
def overlaps_launches(device: torch.device) -> bool:
    """Whether a kernel can start before the previous one has finished (programmatic dependent launch)."""
    return kind_of(device).ptx and torch.cuda.get_device_capability(device) >= (9, 0)


def is_hopper(device: torch.device) -> bool:
    """Whether products and kernels have the orders of sums that --exact was tried with (H100, H200)."""
    return kind_of(device).ptx and torch.cuda.get_device_capability(device) == (9, 0)


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
        """Why bfloat16 fails on this device, found by trying; None: it works, perhaps slowly."""
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
        """Free unreferenced tensors and the allocator's cache, after running out of memory."""
        gc.collect()
        if self.is_accelerator and (empty := getattr(torch.get_device_module(self.torch), "empty_cache", None)):
            empty()


def accelerator() -> torch.device | None:
    """The usable accelerator of this machine; None: there is none. An installed package alone does not count."""
    _import_extensions()
    return torch.accelerator.current_accelerator(check_available=True)


@functools.cache
def _import_extensions() -> None:
    """Import the packages that add devices to torch, in case torch's own import has not."""
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


SHARING = frozenset({"cpu", "cuda"})  # devices on whose tensors gloo works


def processes_per_device(devices: int) -> int:
    """Processes of this machine on each of its devices, as the launcher started them."""
    if PER_DEVICE in os.environ:
        return int(os.environ[PER_DEVICE])
    return -(-int(os.environ.get("LOCAL_WORLD_SIZE", 1)) // max(1, devices)) if devices else 1


def choose_collectives(device_type: str, own: str | None, asked: str, each: int) -> str | None:
    """The collectives backend. `own`: the device's library; `asked`: --dist_backend; `each`: processes per device.
    UserError: they do not go together."""
    if asked not in ("auto", "gloo", own):
        raise UserError(f"--dist_backend {asked}: the library of this device ({device_type}) is {own}; leave it out")
    if device_type not in SHARING and (each > 1 or asked == "gloo"):
        raise UserError(f"gloo does not work on {device_type} devices: start one process a device, without gloo")
    if each > 1 and asked != "gloo" and asked == own:
        raise UserError(
            f"--dist_backend {asked}: {each} processes would share a device, which {asked} refuses; use gloo, or start "
            "fewer (--nproc)"
        )
    return "gloo" if asked == "gloo" or each > 1 else own


def find_device() -> Device:
    if (found := accelerator()) is not None:
        index, count = int(os.environ.get("LOCAL_RANK", 0)), torch.accelerator.device_count()
        if index >= count:
            if processes_per_device(count) == 1 or found.type not in SHARING:
                few = f"process {index} of this machine has no accelerator: {count} found"
                raise UserError(f"{few}; start fewer (--nproc)")
            index %= count
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
    """A name of the accelerator that is the same in all processes of its machine."""
    if device.type == "cpu":
        return None
    properties: Any = getattr(torch.get_device_module(device), "get_device_properties", lambda _: None)(device)
    if (identity := getattr(properties, "uuid", None)) is not None:
        return str(identity)
    index, variable = device.index or 0, kind_of(device).visible
    shown = os.environ.get(variable, "") if variable else ""
    return f"{device.type}:{shown.split(',')[index] if shown else index}"


def visible_devices_env(kind: DeviceKind, names: Sequence[str]) -> dict[str, str]:
    """Environment of a process that may use only these accelerators; it also keeps Ray from changing the variable."""
    assert kind.visible is not None, "Ray counts such devices"
    # Ascending, since not every driver accepts another order.
    ordered = sorted(names, key=int) if all(name.isdigit() for name in names) else names
    return {kind.visible: ",".join(ordered), f"RAY_EXPERIMENTAL_NOSET_{kind.visible}": "1"}


@functools.cache
def _bf16_fault(device: torch.device) -> str | None:
    """The first line of the error that bfloat16 raises: on some CPUs, oneDNN lacks a kernel."""
    try:
        with device:
            _try_bf16()
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    return None


def _try_bf16() -> None:
    """Run the operations of training in bfloat16 on small tensors: linear, attention, norm, and backward."""
    x = torch.ones(1, 2, 4, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(16, 16, dtype=torch.bfloat16, requires_grad=True)
    attended = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    hidden = torch.nn.functional.rms_norm(torch.nn.functional.linear(attended, weight), (16,))
    torch.nn.functional.silu(hidden).float().logsumexp(-1).sum().backward()


# ---- CUDA graphs

DeviceGraph: TypeAlias = torch.cuda.CUDAGraph


def capture_graph(work: Callable[[], None], pool: tuple[int, int] | None) -> DeviceGraph:
    """Warm up `work` and capture it as a graph, which replays it on the current contents of the same tensors. `pool`:
    pool() of another graph to share temporary memory with; the two must then not be replayed at the same time."""
    current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(current)
    with torch.cuda.stream(aside):
        work()
    current.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads may use the device
        work()
    return graph
