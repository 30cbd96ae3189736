"""Triton kernels compiled in parallel, before their first launch.

Triton compiles a kernel when it is first launched, in about half a second, and a model's first step launches thirty
kinds. So the work is first run without them: each launch is only noted, and what the kernel would have written is 0.
Then the noted kernels and what launches them are compiled in threads. Those in Triton's disk cache are only loaded.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MOST_THREADS = 32

_noting = False


def compile_together(work: Callable[[], object], device: torch.device) -> None:
    """Compile the kernels that `work` launches. It is run once, with meaningless results."""
    from triton.runtime.jit import JITFunction

    from trimtab.models.layer_kernels import INTERPRETED

    if INTERPRETED:
        return
    noted: dict[tuple, Callable[[], Any]] = {}

    def note(kernel: JITFunction, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
        def compiled() -> Any:
            return kernel.run(*given, grid=grid, warmup=True, **named)

        noted.setdefault(_signature(kernel, given, named), compiled)

    # A failure occurs again in the work itself, and is reported there; so does one of a kernel.
    with _replaced(JITFunction, "run", note), _note_taking(), _Zeros(), contextlib.suppress(Exception):
        work()

    def load(compiled: Callable[[], Any]) -> None:
        if device.index is not None:
            torch.accelerator.set_device_index(device.index)  # set for each thread
        torch.zeros(1, device=device)  # initializes the device in this thread
        with contextlib.suppress(Exception):
            compiled().run  # noqa: B018 -- a property, which loads the kernel

    if noted:
        with one_loads_at_a_time(), ThreadPoolExecutor(min(len(noted), os.cpu_count() or 1, MOST_THREADS)) as threads:
            list(threads.map(load, noted.values()))


def is_noting() -> bool:
    """Whether launches are only noted, so that nothing may be learnt from results."""
    return _noting


def _signature(kernel: Any, given: tuple, named: dict[str, Any]) -> tuple:
    """Launches with the same signature need the same binary."""
    arguments = dict(zip(kernel.arg_names, given)) | named
    found: list[Any] = [id(kernel)]
    for parameter in kernel.params:
        value = arguments.pop(parameter.name, None)
        if isinstance(value, Tensor):
            aligned = parameter.do_not_specialize_on_alignment or value.data_ptr() % 16 == 0
            found.append((value.dtype, aligned))
        elif not parameter.is_constexpr and type(value) is int:
            plain = parameter.do_not_specialize or (value == 1, value % 16 == 0)
            found.append((plain, value.bit_length() > 31))
        else:
            found.append(value if parameter.is_constexpr else type(value))
    return *found, *arguments.items()  # the last ones are options, such as the number of warps


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _note_taking() -> Iterator[None]:
    global _noting
    _noting = True
    try:
        yield
    finally:
        _noting = False


EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
}


class _Zeros(TorchDispatchMode):
    """Empty tensors are zeros inside: an index that a kernel did not write is within bounds."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = operator(*args, **(kwargs or {}))
        return made.zero_() if operator in EMPTY else made


@contextlib.contextmanager
def one_loads_at_a_time() -> Iterator[None]:
    """Lock Triton's loading of launchers inside the context. Each is a Python module, and all have the same name: two
    threads that load at once may get each other's. What they are loaded from is compiled by the C compiler, without the
    lock where that is a function of its own."""
    from triton.runtime import build, driver

    place = (build, "_load_module_from_path") if hasattr(build, "_load_module_from_path") else None
    if hasattr(driver.active, "launcher_cls"):
        place = place or (driver.active, "launcher_cls")
    if place is None:  # other versions of Triton
        yield
        return
    load, lock = getattr(*place), threading.Lock()

    def loaded(*given: Any) -> Any:
        with lock:
            return load(*given)

    with _replaced(*place, loaded):
        yield
