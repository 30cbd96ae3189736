"""Random numbers of a run: seeds, and saving and restoring all generators."""

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.distributed.device import accelerator


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
    """Seed for randomness that differs between processes, such as dropout; `step`: the step at which the run was
    resumed with another number of processes."""
    return seed + 1_000_003 * rank + 15_485_863 * step


def random_state() -> dict:
    """State of every generator of a run, as JSON values."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "python": [version, list(words), gauss],
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
        "torch": _to_hex(torch.get_rng_state()),
    }
    if (found := _device_generator()) is not None:
        device_type, module = found
        state[device_type] = _to_hex(module.get_rng_state())
    return state


def restore_random_state(state: dict) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_from_hex(state["torch"]))
    if (found := _device_generator()) is not None:
        device_type, module = found
        if device_type in state:  # the state was saved on such a device
            module.set_rng_state(_from_hex(state[device_type]))


@contextlib.contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore torch's generators, the CPU's and the device's, at the end of the context."""
    before = _torch_states()
    try:
        yield
    finally:
        _set_torch_states(*before)


class RandomStream:
    """A separate random stream: torch uses it inside `drawing`, and its own generators are restored afterwards."""

    def __init__(self, seed: int):
        with preserve_rng_state():
            torch.manual_seed(seed)
            self._host, self._device = _torch_states()

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        with preserve_rng_state():
            _set_torch_states(self._host, self._device)
            try:
                yield
            finally:
                self._host, self._device = _torch_states()

    def state(self) -> dict[str, str]:
        """The state as JSON values."""
        return {"host": _to_hex(self._host)} | ({} if self._device is None else {"device": _to_hex(self._device)})

    def restore(self, state: dict[str, str]) -> None:
        self._host = _from_hex(state["host"])
        if "device" in state and self._device is not None:
            self._device = _from_hex(state["device"])


def _torch_states() -> tuple[Tensor, Tensor | None]:
    found = _device_generator()
    return torch.get_rng_state(), None if found is None else found[1].get_rng_state()


def _set_torch_states(host: Tensor, device: Tensor | None) -> None:
    torch.set_rng_state(host)
    if device is not None and (found := _device_generator()) is not None:
        found[1].set_rng_state(device)


def _device_generator() -> tuple[str, Any] | None:
    """torch's device type (also the key of its state) and module of this machine's accelerator, if it has a
    generator."""
    device = accelerator()
    module = None if device is None else torch.get_device_module(device)
    return (device.type, module) if device is not None and hasattr(module, "get_rng_state") else None


def _to_hex(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def _from_hex(digits: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(digits), dtype=torch.uint8)
