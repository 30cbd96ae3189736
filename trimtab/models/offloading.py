"""What a forward pass keeps for its backward pass, in main memory instead of the accelerator's (--offload_activations).

Only what autograd itself is given to keep goes there: with gradient checkpointing the input of every layer. What layers
compute inside is computed again, where it is needed. Left here are weights, which are not copied for being used, and
small tensors, which are not worth the way.

On an accelerator copies go on a stream of their own, out while the next layer works, and back one layer ahead of the
backward pass. On a CPU they are plain copies, of use to nobody but a test.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.distributed.sharding import local

SMALL = 2**20  # bytes


class MainMemory:
    def __init__(self, module: nn.Module, small: int = SMALL):
        self._module, self._small = [module], small  # in a list: not a part of the module
        self._stream: Any = None

    @contextlib.contextmanager
    def instead(self) -> Iterator[None]:
        """Inside, what is kept for a backward pass goes away; it is brought back when that pass asks for it."""
        weights = {local(p).untyped_storage()._cdata for p in self._module[0].parameters()}
        newest: list[Kept] = []

        def keep(tensor: Tensor) -> "Tensor | Kept":
            if tensor.nbytes < self._small or tensor.untyped_storage()._cdata in weights:
                return tensor
            kept = self._send_away(tensor, newest.pop() if newest else None)
            newest.append(kept)
            return kept

        with torch.autograd.graph.saved_tensors_hooks(keep, _bring_back):
            yield

    def _send_away(self, tensor: Tensor, before: "Kept | None") -> "Kept":
        return Kept(tensor, self._stream_of(tensor.device), before)

    def _stream_of(self, device: torch.device) -> Any:
        if device.type == "cpu":
            return None
        if self._stream is None:
            self._stream = torch.Stream(device=device)
        return self._stream


class Kept:
    """A tensor that is away."""

    def __init__(self, tensor: Tensor, stream: Any, before: "Kept | None"):
        """`before`: what was kept before it, and will be asked for after it."""
        self.device, self.stream, self.before = tensor.device, stream, before
        self._back: Tensor | None = None
        self._away = torch.empty_like(tensor, device="cpu", pin_memory=stream is not None, requires_grad=False)
        if stream is None:
            self._away.copy_(tensor)
            return
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        with stream:
            self._away.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory is not given to another before it is copied

    def send_back(self) -> None:
        """On its way; it is not there before the stream has come so far."""
        if self._back is None:
            with self.stream or contextlib.nullcontext():
                self._back = torch.empty_like(self._away, device=self.device)
                self._back.copy_(self._away, non_blocking=True)

    def back(self) -> Tensor:
        self.send_back()
        found = self._back
        assert found is not None
        if self.stream is not None:
            here = torch.accelerator.current_stream(self.device)
            here.wait_stream(self.stream)
            found.record_stream(here)
        self._back = None  # whoever asked for it holds it
        if self.before is not None:
            self.before.send_back()
        return found


def _bring_back(kept: "Tensor | Kept") -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.back()
