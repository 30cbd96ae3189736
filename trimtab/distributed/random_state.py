"""Random numbers of a run: seeds, and the state of every generator it draws from."""

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

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
    if (found := _own_generator()) is not None:
        kind_of_device, module = found
        state[kind_of_device] = module.get_rng_state().numpy().tobytes().hex()
    return state


def restore_random_state(state: dict) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_bytes_tensor(state["torch"]))
    if (found := _own_generator()) is not None:
        kind_of_device, module = found
        if kind_of_device in state:  # it was saved on such a device
            module.set_rng_state(_bytes_tensor(state[kind_of_device]))


@contextlib.contextmanager
def preserve_rng_state() -> Iterator[None]:
    """What is drawn inside leaves the generators as they were: the CPU's, and that of this process's device."""
    host, own = torch.get_rng_state(), _own_generator()
    device = None if own is None else own[1].get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(host)
        if own is not None:
            own[1].set_rng_state(device)


class RandomStream:
    """Random numbers of one's own: what is drawn inside `drawing` comes from this stream, and the generators that
    everybody draws from are left as they were."""

    def __init__(self, seed: int):
        with preserve_rng_state():
            torch.manual_seed(seed)
            self._take()

    def _take(self) -> None:
        own = _own_generator()
        self._host = torch.get_rng_state()
        self._device = None if own is None else own[1].get_rng_state()

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        with preserve_rng_state():
            own = _own_generator()
            torch.set_rng_state(self._host)
            if own is not None and self._device is not None:
                own[1].set_rng_state(self._device)
            try:
                yield
            finally:
                self._take()

    def state(self) -> dict[str, str]:
        """As JSON holds it."""
        found = {"host": self._host, "device": self._device}
        return {name: state.numpy().tobytes().hex() for name, state in found.items() if state is not None}

    def restore(self, state: dict[str, str]) -> None:
        self._host = _bytes_tensor(state["host"])
        if "device" in state and self._device is not None:
            self._device = _bytes_tensor(state["device"])


def _own_generator() -> tuple[str, Any] | None:
    """torch's name of the accelerator that is here, which is the name of its state, and its module."""
    device = accelerator()
    module = None if device is None else torch.get_device_module(device)
    return (device.type, module) if device is not None and hasattr(module, "get_rng_state") else None


def _bytes_tensor(digits: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(digits), dtype=torch.uint8)
