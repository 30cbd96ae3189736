"""Rolling out with int8 weights: copies for the linear layers, one scale for each output, made anew for every call.

    w ~ scale * round(w / scale),     scale = max |w| / 127 over the row of one output

The trained weights are only read, so training goes on with them bit for bit. The LM head stays as it is, and so does
what is not a plain linear layer (adapters, experts in one tensor, GPT-2's transposed layers). In half precision, up to
many rows, kernels multiply by the copies as they are (kernels/int8.py); elsewhere a product unpacks its copy to the
activations' dtype, which holds every code exactly. Both are products with the same weights.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimtab.distributed.device import has_kernels
from trimtab.models.cut_layers import Local, way_of_work
from trimtab.models.policy import Policy


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """What a linear layer multiplies by, in the place of its own `forward`."""

    words_OJ: Tensor
    """int16: in the low byte a code of the first half of the inputs, in the high one the same place's of the second,
    each plus 128. So a kernel has two numbers that stand side by side in one register."""
    scales_O: Tensor  # fp32
    bias_O: Tensor | None
    inner: int

    def codes(self, dtype: torch.dtype) -> Tensor:
        """[O, I], which every dtype of activations holds exactly."""
        if has_kernels(self.words_OJ.device):
            from trimtab.rollout.builtin.kernels.int8_linear import unpacked

            return unpacked(self, dtype)
        bytes_O2J = self.words_OJ.view(torch.uint8).unflatten(1, (-1, 2)).transpose(1, 2)
        return bytes_O2J.to(dtype, memory_format=torch.contiguous_format).sub_(128).flatten(1)[:, : self.inner]

    def __call__(self, x: Tensor) -> Tensor:
        if has_kernels(x.device):
            from trimtab.rollout.builtin.kernels.int8_linear import added, can_multiply, int8_product

            x_TI = x.flatten(0, -2)
            if can_multiply(x_TI, [self]):
                return added(int8_product(x_TI, [self], parts=True), x.dtype).view(*x.shape[:-1], -1)
        out = F.linear(x, self.codes(x.dtype)).mul_(self.scales_O)
        return out if self.bias_O is None else out + self.bias_O


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
            way = way_of_work(layer)
            parts = layer._parameters if way is None else way.parts(layer)
            weight_OI = parts["weight"]
            assert weight_OI is not None
            codes, scales = quantised(weight_OI, way)
            fresh = packed(codes), scales
            if layer in self._copies:  # in place: whoever knows the addresses may go on using them
                for old, new in zip(self._copies[layer], fresh):
                    old.copy_(new)
            else:
                self._copies[layer] = fresh
            layer.forward = Int8Weight(*self._copies[layer], parts["bias"], weight_OI.shape[1])

    def __exit__(self, *_) -> None:
        for layer in self.layers:
            del layer.forward  # the instance's own; the class's is back

    def release(self) -> None:
        self._copies.clear()


def quantised(weight_OI: Tensor, way: Local | None = None) -> tuple[Tensor, Tensor]:
    """(int8 weights [O, I], fp32 scales [O]), symmetric for each output. `way`: how the layer is cut over processes, if
    it is; scales are those of the whole layer, so that the policy is the same however it is cut."""
    largest_O = torch.linalg.vector_norm(weight_OI, torch.inf, 1, dtype=torch.float32)
    if way is not None:
        largest_O = way.of_whole_rows(largest_O)
    scales_O = largest_O.clamp(min=torch.finfo(torch.float32).tiny) / 127
    return (weight_OI / scales_O[:, None]).round_().to(torch.int8), scales_O


def packed(codes_OI: Tensor) -> Tensor:
    """int16 [O, J], as in Int8Weight."""
    even = F.pad(codes_OI, (0, codes_OI.shape[1] % 2))
    bytes_OJ2 = (even.view(torch.uint8) ^ 128).unflatten(1, (2, -1)).transpose(1, 2).contiguous()
    return bytes_OJ2.view(torch.int16)[..., 0]


def int8_weights(modules: list[nn.Module]) -> list[Int8Weight] | None:
    """What the modules multiply by now, if that is int8 in all of them."""
    found = [vars(module).get("forward") for module in modules]
    weights = [forward for forward in found if isinstance(forward, Int8Weight)]
    return weights if len(weights) == len(modules) else None


# ---- Linear layers with low-rank adapters (PEFT's), as what kernels need to know of them. y = W x + b + s B (A x)
# Merging s B A into W for a rollout would be faster still, and wrong: in half precision a weight does not change by
# less than half of its last bit, and what a few optimiser steps write into B is less. The rollout would be the base
# model's.


@dataclass(frozen=True, eq=False)
class LoraLinear:
    """A linear layer that kernels can multiply by. One without an adapter has neither A nor B."""

    weight_OI: Tensor
    bias_O: Tensor | None
    a_RI: Tensor | None = None
    b_OR: Tensor | None = None
    scale: float = 0.0

    @property
    def rank(self) -> int:
        return 0 if self.a_RI is None else len(self.a_RI)


def adapted(module: nn.Module) -> LoraLinear | None:
    """None: only the module itself knows what it does (4-bit or int8 weights, DoRA, several adapters at once)."""
    if type(module) is nn.Linear:
        return None if "forward" in vars(module) else LoraLinear(module.weight, module.bias)
    if not hasattr(module, "lora_A"):
        return None
    from peft.tuners.lora import Linear

    if type(module) is not Linear or type(module.base_layer) is not nn.Linear or "forward" in vars(module.base_layer):
        return None
    weight, bias = module.base_layer.weight, module.base_layer.bias
    if module.disable_adapters or module.merged:
        return None if module.disable_adapters and module.merged else LoraLinear(weight, bias)
    names = [name for name in module.active_adapters if name in module.lora_A]
    if not names:
        return LoraLinear(weight, bias)
    a, b = module.lora_A[names[0]], module.lora_B[names[0]]
    if len(names) > 1 or names[0] in module.lora_variant or b.bias is not None:
        return None
    return LoraLinear(weight, bias, a.weight, b.weight, module.scaling[names[0]])
