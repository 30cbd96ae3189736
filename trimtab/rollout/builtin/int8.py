"""Rolling out with int8 weights: copies for the linear layers, one scale for each output, made anew for every call.

    w ~ scale * round(w / scale),     scale = max |w| / 127 over the row of one output

The trained weights are only read, so training goes on with them bit for bit. The LM head stays as it is, and so does
what is not a plain linear layer (adapters, experts in one tensor, GPT-2's transposed layers). The product unpacks the
copy to the activations' dtype; that is right on every device, and no faster than the weights themselves.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimtab.models.policy import Policy


class Int8Layers:
    """Inside the context, the policy's linear layers multiply by int8 copies of the weights they have at its start."""

    def __init__(self, policy: Policy):
        head = set(policy.head.modules())
        self.layers = [
            module
            for name, module in policy.inner.named_modules()
            if type(module) is nn.Linear and module not in head and "lora_" not in name
        ]
        self._copies: dict[nn.Linear, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def __enter__(self) -> None:
        for layer in self.layers:
            fresh = quantised(layer.weight)
            if layer in self._copies:  # in place: whoever knows the addresses may go on using them
                for old, new in zip(self._copies[layer], fresh):
                    old.copy_(new)
            else:
                self._copies[layer] = fresh
            layer.forward = functools.partial(int8_linear, *self._copies[layer], layer.bias)

    def __exit__(self, *_) -> None:
        for layer in self.layers:
            del layer.forward  # the instance's own; the class's is back

    def release(self) -> None:
        self._copies.clear()


def quantised(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 weights [O, I], fp32 scales [O]), symmetric for each output."""
    weight = weight_OI.float()
    scales = weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return (weight / scales[:, None]).round().to(torch.int8), scales


def int8_linear(weight_OI: Tensor, scales_O: Tensor, bias_O: Tensor | None, x: Tensor) -> Tensor:
    out = (F.linear(x, weight_OI.to(x.dtype)) * scales_O).to(x.dtype)
    return out if bias_O is None else out + bias_O
