"""Linear layers of the engine: int8 weights, and tile sizes of the LoRA kernels.

int8: copies of the weights with one scale for each output, made again for every session.

    w ~ scale * round(w / scale),     scale = max |w| / 127 over the row of one output

The trained weights are only read, so training is not affected. The LM head keeps its weights, and so does everything
that is not a plain linear layer (adapters, experts in one tensor, GPT-2's transposed layers). In half precision and
with few rows, kernels multiply by the copies (kernels/int8_linear.py); otherwise a copy is dequantized to the
activations' dtype, which represents every code exactly. Both multiply by the same weights.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimtab.distributed.device import has_kernels
from trimtab.models.parallel.tensor_parallel import LocalParameters, local_style
from trimtab.models.policy import Policy


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """int8 weights of a linear layer, callable in place of its `forward`."""

    words_OJ: Tensor
    """int16: the low byte is a code of the first half of the inputs, the high byte the code at the same position of the
    second half, each plus 128. So a kernel has both in one register."""
    scales_O: Tensor  # fp32
    bias_O: Tensor | None
    inner: int

    def codes(self, dtype: torch.dtype) -> Tensor:
        """[O, I], exact in every dtype of activations."""
        if has_kernels(self.words_OJ.device):
            from trimtab.rollout.builtin.kernels.int8_linear import dequantize_int8

            return dequantize_int8(self, dtype)
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
    """Inside the context, the policy's linear layers multiply by int8 copies of their weights."""

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
            way = local_style(layer)
            parts = layer._parameters if way is None else way.parts(layer)
            weight_OI = parts["weight"]
            assert weight_OI is not None
            codes, scales = quantize_int8(weight_OI, way)
            fresh = packed(codes), scales
            if layer in self._copies:  # in place, so that captured graphs stay valid
                for old, new in zip(self._copies[layer], fresh):
                    old.copy_(new)
            else:
                self._copies[layer] = fresh
            layer.forward = Int8Weight(*self._copies[layer], parts["bias"], weight_OI.shape[1])

    def __exit__(self, *_) -> None:
        for layer in self.layers:
            del layer.forward  # of the instance, so that the class's applies again

    def release(self) -> None:
        self._copies.clear()


def quantize_int8(weight_OI: Tensor, way: LocalParameters | None = None) -> tuple[Tensor, Tensor]:
    """(int8 weights [O, I], fp32 scales [O]), symmetric for each output. `way`: how the layer is split over a
    tensor-parallel group; scales are those of the whole layer, so that results do not depend on the split."""
    largest_O = torch.linalg.vector_norm(weight_OI, torch.inf, 1, dtype=torch.float32)
    if way is not None:
        largest_O = way.of_whole_rows(largest_O)
    scales_O = largest_O.clamp(min=torch.finfo(torch.float32).tiny) / 127
    return (weight_OI / scales_O[:, None]).round_().to(torch.int8), scales_O


def packed(codes_OI: Tensor) -> Tensor:
    """Codes as int16 words [O, J]; see Int8Weight."""
    even = F.pad(codes_OI, (0, codes_OI.shape[1] % 2))
    bytes_OJ2 = (even.view(torch.uint8) ^ 128).unflatten(1, (2, -1)).transpose(1, 2).contiguous()
    return bytes_OJ2.view(torch.int16)[..., 0]


def int8_weights(modules: list[nn.Module]) -> list[Int8Weight] | None:
    """The int8 weights of these modules, if all have some now."""
    found = [vars(module).get("forward") for module in modules]
    weights = [forward for forward in found if isinstance(forward, Int8Weight)]
    return weights if len(weights) == len(modules) else None


# ---- tile sizes of the LoRA kernels, and which of them fit into a device's shared memory


class LoraTiles(NamedTuple):
    """Tile sizes: rows, outputs and inputs of one step; parts of the inner dimension."""

    rows: int
    outputs: int
    inner: int
    splits: int
    warps: int
    stages: int
    swapped: bool = False
    """The weights are the left factor."""


TILE = 64  # outputs
WIDE = 2048  # inputs
FEW, MANY = 64, 512  # rows
MARGIN = 2**10  # bytes of shared memory; what steps wait by takes 120


def fit_tiles(memory: int, tiles: LoraTiles, weights: int, height: int, *, on_the_way: bool) -> LoraTiles | None:
    """Fewer stages, then smaller tiles, until they fit into shared memory; None if two stages of the smallest do not
    fit. After the loop its memory is reused for A x and B, and for the result."""
    while True:
        lines = tiles.rows + weights * (tiles.outputs + (height if on_the_way else 0))
        after = max(2 * height * (tiles.rows + weights * tiles.outputs), 4 * tiles.rows * tiles.outputs)
        stages = min(tiles.stages, (memory - MARGIN) // (2 * tiles.inner * lines))
        if stages >= min(2, tiles.stages) and after <= memory - MARGIN:
            return tiles._replace(stages=stages)
        if tiles.outputs > TILE:
            tiles = tiles._replace(outputs=tiles.outputs // 2)
        elif tiles.inner > 32:
            tiles = tiles._replace(inner=tiles.inner // 2)
        else:
            return None


def stages_of_low(height: int, memory: int) -> int:
    return max(1, min(4, (memory - MARGIN) // (2 * 128 * (64 + height))))


def smallest(rows: int) -> LoraTiles:
    """Of all tiles for this many rows, the ones with the least memory."""
    return LoraTiles(64 if rows <= FEW else 128, TILE, 32, 1, 4, 2)


# ---- measured on an H200, at the shapes of a model of 8 billion parameters


def product_tiles(rows: int, inner: int, widths: list[int], parts: bool, exact: bool = False) -> LoraTiles:
    """`parts`: the sum may have several; `exact`: it has one."""
    whole = next(size for size in (256, 128, TILE) if all(width % size == 0 for width in widths))
    long = parts and inner > 8192 and not exact
    if rows <= FEW and parts and exact:
        return LoraTiles(64, 32, 128, 1, 4, 5)
    if rows <= FEW and not parts:
        return LoraTiles(64, TILE, 128, 1, 4, 5, swapped=True)
    if rows <= FEW and long and whole > TILE:
        return LoraTiles(64, 128, 64, 4, 4, 5, swapped=True)
    if rows <= FEW:
        return LoraTiles(64, TILE, 128, 2, 4, 4, swapped=True)
    if long and whole == 256:
        return LoraTiles(128, 256, 64, 4, 8, 4)
    if parts or whole == TILE:
        return LoraTiles(128, TILE, 128, 1, 4, 4, swapped=True)
    return LoraTiles(128, TILE, 64, 1, 4, 6) if rows <= 128 else LoraTiles(128, 128, 64, 1, 8, 5)


def gated_tiles(rows: int, outputs: int) -> LoraTiles:
    return LoraTiles(64, TILE, 64, 1, 4, 4) if rows <= FEW or outputs % 128 else LoraTiles(128, 128, 64, 1, 8, 4)
