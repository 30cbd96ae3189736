"""What hardware is here. No other file names a device."""

import contextlib
import ctypes
import functools
import gc
import os
import random
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from trimtab.errors import UserError

# How those say it that have no exception of their own: PyTorch's CPU allocator, the driver, cuBLAS.
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


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


def release_main_memory() -> None:
    """Give back to the system what was freed: the C library keeps it, and a model that is gathered layer by layer would
    seem to be held whole."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def find_device() -> Device:
    if torch.cuda.is_available():
        index, found = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if index >= found:
            raise UserError(f"process {index} of this machine has no accelerator: {found} found; start fewer (--nproc)")
        torch.cuda.set_device(index)
        return Device(torch.device("cuda", index), torch.cuda.get_device_name(index))
    _keep_freed_memory()
    threads = torch.get_num_threads()
    return Device(torch.device("cpu"), f"CPU, {threads} thread{'s' if threads > 1 else ''}")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory is short, an accelerator's or the machine's."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and any(words in said for words in OUT_OF_MEMORY)


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


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still take; of main memory, its share among the processes of this machine."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return _free_main_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def total_memory(device: torch.device) -> int:
    """Bytes of an accelerator, whoever uses them; of main memory, what this process may still take."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else free_memory(device)


Graph: TypeAlias = torch.cuda.CUDAGraph


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels run there."""
    return device.type == "cuda" and find_spec("triton") is not None


def capture(work: Callable[[], None], pool: tuple[int, int] | None) -> Graph:
    """What `work` asks of the device, to be replayed: on the same tensors, whatever they hold then. Runs it once.

    `pool`: another graph's pool(), to share what lies between; then they must be replayed one after another.
    """
    here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        work()
    here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads may use the device
        work()
    return graph


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


def _keep_freed_memory() -> None:
    """Ask the C library to reuse large blocks instead of returning them: fresh pages cost a tenth of a CPU step."""
    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(mmap_threshold, 32 * 2**20)  # the most it takes
        libc.mallopt(trim_threshold, 2**30)


def seed_everything(seed: int, *, deterministic: bool = False) -> None:
    """Seed every generator; `deterministic` also forbids kernels whose result depends on scheduling."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def process_seed(seed: int, rank: int, step: int = 0) -> int:
    """For what differs between processes, such as dropout; `step`: at which they were shared out anew."""
    return seed + 1_000_003 * rank + 15_485_863 * step


def random_state() -> dict:
    """State of every generator a run draws from, as plain values that JSON can hold."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "python": [version, list(words), gauss],
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def restore_random_state(state: dict) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_bytes_tensor(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes_tensor(state["cuda"]))


def _bytes_tensor(digits: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(digits), dtype=torch.uint8)
