"""A stand-in accelerator, to find out what a run assumes of its device.

It calls itself npu, as Ascend's does, and has what torch_npu's modules have under their names (`torch.npu`, a library
"hccl" between processes). It computes with the CPU's kernels on memory of its own (device.cpp), so results are the
CPU's; but no tensor of it is one of the CPU's or of CUDA's, and there are two of it. `install` is for a process of its
own: torch knows one such device, and for good.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import types
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("device.cpp")
BUILT = Path(__file__).parents[2] / "build"
DEVICES = 2


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def why_not() -> str | None:
    """Why it cannot be used here."""
    if torch.accelerator.is_available():
        return "there is an accelerator, and a process has one kind"
    return None if compiler() else "the stand-in is built with a C++ compiler"


def library() -> Path:
    """The compiled device, built once for this source and this torch, by whoever comes first."""
    made_of = SOURCE.read_bytes() + torch.__version__.encode()
    built = BUILT / f"standin-{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    BUILT.mkdir(exist_ok=True)
    with (BUILT / "standin.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            home, unfinished = Path(torch.__file__).parent, built.with_suffix(".unfinished")
            abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
            command = [compiler(), "-std=c++20", "-O1", "-fPIC", "-shared", abi, f"-I{home / 'include'}", str(SOURCE)]
            subprocess.run([*command, "-o", str(unfinished), f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"], check=True)
            unfinished.replace(built)
    return built


def install() -> None:
    """Make it this process's accelerator."""
    from tests.standin.collectives import Collectives

    torch.ops.load_library(library())
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.distributed.Backend.register_backend("hccl", Collectives, devices=["npu"])


def kernels() -> int:
    """How many have run on it so far, on all its devices."""
    return sum(torch.ops.standin.kernels(index) for index in range(DEVICES))


def _index(device: torch.device | int | str | None) -> int:
    if device is None or (isinstance(device, torch.device) and device.index is None):
        return torch.accelerator.current_device_index()
    return device if isinstance(device, int) else torch.device(device).index


def _module() -> types.ModuleType:
    """What torch_npu calls torch.npu, so far as a run asks for it."""
    module, ops = types.ModuleType("torch.npu"), torch.ops.standin
    free = lambda index: ops.total(index) - ops.held(index)  # noqa: E731
    offered = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "device_count": lambda: DEVICES,
        "current_device": torch.accelerator.current_device_index,
        "set_device": lambda device: torch.accelerator.set_device_index(_index(device)),
        "get_device_name": lambda device=None: "Stand-in",
        "is_bf16_supported": lambda: True,
        "synchronize": lambda device=None: None,
        # memory
        "mem_get_info": lambda device=None: (free(_index(device)), ops.total(_index(device))),
        "memory_allocated": lambda device=None: ops.held(_index(device)),
        "memory_reserved": lambda device=None: ops.held(_index(device)),
        "max_memory_allocated": lambda device=None: ops.peak(_index(device)),
        "empty_cache": lambda: None,
        # random numbers
        "manual_seed": lambda seed: ops.seed(_index(None), _signed(seed)),
        "manual_seed_all": lambda seed: [ops.seed(index, _signed(seed)) for index in range(DEVICES)],
        "get_rng_state": lambda device=None: ops.random_state(_index(device)),
        "set_rng_state": lambda state, device=None: ops.set_random_state(_index(device), state),
        # streams
        "Stream": lambda device=None, priority=0: torch.Stream(device=torch.device("npu", _index(device))),
        "Event": lambda **settings: torch.Event(device="npu"),
        "current_stream": lambda device=None: torch.accelerator.current_stream(_index(device)),
        "stream": lambda stream: stream,
        "device": lambda index: torch.accelerator.device_index(_index(index)),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    for name, value in offered.items():
        setattr(module, name, value)
    return module


def _signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed
