"""Bytes that are alive while something is computed: what an allocator would have handed out, at each moment.

Every operation's results are looked at, and a storage counts from then until nobody holds it. What a kernel takes
and returns inside one call (workspaces of matrix products, partial sums of attention) is not seen.
"""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Inside, `now` and `peak` count what has come into being since it was entered, without `known` tensors."""

    def __init__(self, known: Iterable[Tensor] = ()):
        super().__init__()
        self.now = self.peak = 0
        self._storages = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: tuple = (), named: dict | None = None) -> Any:
        result = function(*arguments, **(named or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._storages:
            return
        self._storages.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, storage: int, size: int) -> None:
        self._storages.discard(storage)
        self.now -= size
