"""LoRA kernels: linear layers with adapters, and wide ones without, for up to a thousand rows.

    out = W x + b + B (s A x)

With few rows a program multiplies A along with the weights of its outputs, which is few columns more. With many rows a
separate launch is cheaper, and no program waits for it before its sum over x is done. Both terms are rounded as in
training (models/fused_layer.py), except where the sum is in parts. Tiles are loaded by tensor descriptors, which some
devices fetch without registers (sm_90).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from trimtab.models.fused_layer import LoraLinear
from trimtab.models.layer_kernels import overlapped, shared_memory, wait
from trimtab.rollout.builtin.linear import (
    FEW,
    MANY,
    TILE,
    WIDE,
    LoraTiles,
    fit_tiles,
    gated_tiles,
    product_tiles,
    smallest,
    stages_of_low,
)


@triton.jit(do_not_specialize=["rows"])
def _low(
    x, a1, a2, a3, out, rows, inner, R: tl.constexpr, LM: tl.constexpr, LK: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    wait(OVERLAPPED)
    m, layer = tl.program_id(0) * LM, tl.program_id(1)
    a = a1
    if layer == 1:
        a = a2
    elif layer == 2:
        a = a3
    total = tl.zeros([LM, R], tl.float32)
    for k in range(0, inner, LK):
        total = tl.dot(x.load([m, k]), tl.trans(a.load([0, k])), total)
    row, place = m + tl.arange(0, LM), tl.arange(0, R)
    where = out + (layer * rows + row)[:, None] * R + place[None, :]
    tl.store(where, total, (row < rows)[:, None])


@triton.jit
def _given(low, layer, m, rows, R: tl.constexpr, BM: tl.constexpr):
    """A x of these rows."""
    row, place = m + tl.arange(0, BM), tl.arange(0, R)
    return tl.load(low + (layer * rows + row)[:, None] * R + place[None, :], (row < rows)[:, None], 0.0)


@triton.jit
def _adapted(
    total, low, b, n, scale, DTYPE: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    output, place = n + tl.arange(0, BN), tl.arange(0, R)
    b_NR = tl.load(b + output[:, None] * RANK + place[None, :], (place < RANK)[None, :], 0.0)
    kind = b_NR.dtype
    scaled = (low.to(kind).to(tl.float32) * scale).to(kind)
    added = tl.dot(scaled, tl.trans(b_NR)).to(DTYPE).to(tl.float32)
    return total.to(DTYPE).to(tl.float32) + added


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight1, weight2, weight3, a1, a2, a3, b1, b2, b3, bias1, bias2, bias3, given, out, scale1, scale2, scale3,
    rows, inner, share, out_row, out_split, width1, width2,
    LAYERS: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, GIVEN: tl.constexpr, BIASED: tl.constexpr,
    SWAPPED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    # The launch that makes A x has itself waited for x before this one may begin.
    if not GIVEN:
        wait(OVERLAPPED)
    # Programs that share columns of weights follow each other.
    m, first, split = tl.program_id(0) * BM, tl.program_id(1) * BN, tl.program_id(2)
    n, weight, a, b, bias, scale, layer = first, weight1, a1, b1, bias1, scale1, 0
    if LAYERS == 3:
        if first >= width1 + width2:
            n, weight, a, b, bias, scale, layer = first - width1 - width2, weight3, a3, b3, bias3, scale3, 2
        elif first >= width1:
            n, weight, a, b, bias, scale, layer = first - width1, weight2, a2, b2, bias2, scale2, 1
    low = tl.zeros([BM, R], tl.float32)
    total = tl.zeros([BN, BM], tl.float32) if SWAPPED else tl.zeros([BM, BN], tl.float32)
    begin = split * share
    for k in range(begin, tl.minimum(begin + share, inner), BK):
        tokens = x.load([m, k])
        if SWAPPED:
            total = tl.dot(weight.load([n, k]), tl.trans(tokens), total)
        else:
            total = tl.dot(tokens, tl.trans(weight.load([n, k])), total)
        if RANK > 0 and not GIVEN:
            low = tl.dot(tokens, tl.trans(a.load([0, k])), low)
    if SWAPPED:
        total = tl.trans(total)
    if BIASED:
        total += tl.where(split == 0, tl.load(bias + n + tl.arange(0, BN)).to(tl.float32), 0.0)[None, :]
    if RANK > 0:
        if GIVEN:
            wait(OVERLAPPED)
            low = _given(given, layer, m, rows, R, BM)
            scale = tl.where(split == 0, scale, 0.0)  # all of it is in one part of the sum
        total = _adapted(total, low, b, n, scale, out.dtype.element_ty, RANK, R, BN)
    row, column = m + tl.arange(0, BM), first + tl.arange(0, BN)
    where = out + split * out_split + row.to(tl.int64)[:, None] * out_row + column[None, :]
    tl.store(where, total.to(out.dtype.element_ty), (row < rows)[:, None])


@triton.jit(do_not_specialize=["rows"])
def _gated(
    x, gate, up, a1, a2, b1, b2, given, out, scale1, scale2, rows, inner, out_row,
    RANK: tl.constexpr, R: tl.constexpr, GIVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):  # fmt: skip
    if not GIVEN:
        wait(OVERLAPPED)
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    g, u = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
    low1, low2 = tl.zeros([BM, R], tl.float32), tl.zeros([BM, R], tl.float32)
    for k in range(0, inner, BK):
        tokens = x.load([m, k])
        g = tl.dot(tokens, tl.trans(gate.load([n, k])), g)
        u = tl.dot(tokens, tl.trans(up.load([n, k])), u)
        if RANK > 0 and not GIVEN:
            low1 = tl.dot(tokens, tl.trans(a1.load([0, k])), low1)
            low2 = tl.dot(tokens, tl.trans(a2.load([0, k])), low2)
    if RANK > 0:
        if GIVEN:
            wait(OVERLAPPED)
            low1, low2 = _given(given, 0, m, rows, R, BM), _given(given, 1, m, rows, R, BM)
        g = _adapted(g, low1, b1, n, scale1, out.dtype.element_ty, RANK, R, BN)
        u = _adapted(u, low2, b2, n, scale2, out.dtype.element_ty, RANK, R, BN)
    kind = out.dtype.element_ty
    g, u = g.to(kind).to(tl.float32), u.to(kind).to(tl.float32)
    opened = (g * tl.sigmoid(g)).to(kind).to(tl.float32)
    row, column = m + tl.arange(0, BM), n + tl.arange(0, BN)
    tl.store(out + row.to(tl.int64)[:, None] * out_row + column[None, :], (opened * u).to(kind), (row < rows)[:, None])


LEAST_RANK, MOST_RANK = 16, 128  # columns of the smallest matrix product; of the largest A that is kept in registers
DTYPES = torch.bfloat16, torch.float16
LOW_ROWS = 16  # of a program of A x: few, for the sum over the inner dimension is in one part
MOST_ROWS = 1024  # beyond, launches cost little beside the products


def lora_applies(x_TI: Tensor, layers: list[LoraLinear]) -> bool:
    """Not too many rows in half precision; layers alike in bias and rank, of widths that make whole tiles."""
    tensors = [t for layer in layers for t in (layer.weight_OI, layer.a_RI, layer.b_OR) if t is not None]
    return (
        x_TI.dtype in DTYPES
        and len(x_TI) <= MOST_ROWS
        and x_TI.stride(1) == 1
        and x_TI.stride(0) % 8 == 0
        and all(t.dtype == x_TI.dtype and t.is_contiguous() for t in tensors)
        and all(
            len(layer.weight_OI) % TILE == 0
            and layer.weight_OI.shape[1] % 8 == 0
            and (layer.bias_O is None) == (layers[0].bias_O is None)
            for layer in layers
        )
        and len({layer.rank for layer in layers} - {0}) <= 1
        and _height(layers) <= MOST_RANK
        and fitting(smallest(len(x_TI)), 2, layers, len(x_TI)) is not None
    )


def is_wide(x_TI: Tensor, layers: list[LoraLinear]) -> bool:
    """Whether these kernels are the fastest for layers without adapters that share their input."""
    return len(layers) > 1 and x_TI.shape[1] >= WIDE and FEW < len(x_TI) <= MANY


def lora_product(
    x_TI: Tensor, layers: list[LoraLinear], *, parts: bool = False, exact: bool = False, tiles: LoraTiles | None = None
) -> Tensor:
    """Outputs of one layer, or of three side by side [T, O]; with `parts` partial sums in fp32 [splits, T, O], if one
    sum would leave most of the device idle; `exact`: in one part, as the trainer's sum."""
    rows, inner = x_TI.shape
    joined = layers * 3 if len(layers) == 1 else layers
    widths = [len(layer.weight_OI) for layer in layers]
    total, biased = sum(widths), layers[0].bias_O is not None
    tiles = fitting(tiles or product_tiles(rows, inner, widths, parts, exact), 1, layers, rows)
    assert tiles is not None, "can_adapt has asked"
    share = triton.cdiv(triton.cdiv(inner, tiles.splits), tiles.inner) * tiles.inner
    dtype = x_TI.dtype if tiles.splits == 1 else torch.float32
    out = torch.empty(tiles.splits, rows, total, dtype=dtype, device=x_TI.device)
    low = _low_rows(x_TI, layers)
    _product[triton.cdiv(rows, tiles.rows), total // tiles.outputs, tiles.splits](
        _tiled(x_TI, tiles.rows, tiles.inner), *_operands(joined, tiles),
        *(layer.bias_O if biased else layer.weight_OI for layer in joined), out if low is None else low, out,
        *(layer.scale for layer in joined), rows, inner, share, out.stride(1), out.stride(0), widths[0],
        sum(widths[1:2]), LAYERS=len(layers), BIASED=biased, SWAPPED=tiles.swapped, **_sizes(layers, low, tiles),
        **overlapped(x_TI.device),
    )  # fmt: skip
    return out if tiles.splits > 1 else out[0]


def lora_gated(x_TI: Tensor, gate: LoraLinear, up: LoraLinear, *, tiles: LoraTiles | None = None) -> Tensor:
    """silu(gate(x)) * up(x), of layers without bias."""
    rows, inner = x_TI.shape
    layers, outputs = [gate, up], len(gate.weight_OI)
    tiles = fitting(tiles or gated_tiles(rows, outputs), 2, layers, rows)
    assert tiles is not None, "can_adapt has asked"
    out = torch.empty(rows, outputs, dtype=x_TI.dtype, device=x_TI.device)
    low = _low_rows(x_TI, layers)
    _gated[triton.cdiv(rows, tiles.rows), outputs // tiles.outputs](
        _tiled(x_TI, tiles.rows, tiles.inner), *_operands(layers, tiles), out if low is None else low, out,
        gate.scale, up.scale, rows, inner, out.stride(0), **_sizes(layers, low, tiles), **overlapped(x_TI.device),
    )  # fmt: skip
    return out


def _low_rows(x_TI: Tensor, layers: list[LoraLinear]) -> Tensor | None:
    """A x of every layer [layers, T, R]; None if the product kernel computes it."""
    rows, inner = x_TI.shape
    if not any(layer.rank for layer in layers) or rows <= FEW:
        return None
    joined = layers * 3 if len(layers) == 1 else [*layers, layers[-1]][:3]
    height, tall = _height(layers), LOW_ROWS
    out = torch.empty(len(layers), rows, height, dtype=torch.float32, device=x_TI.device)
    a = [_tiled(layer.weight_OI if layer.a_RI is None else layer.a_RI, height, 128) for layer in joined]
    _low[triton.cdiv(rows, tall), len(layers)](
        _tiled(x_TI, tall, 128), *a, out, rows, inner, R=height, LM=tall, LK=128, num_warps=4,
        num_stages=stages_of_low(height, shared_memory()), **overlapped(x_TI.device),
    )  # fmt: skip
    return out


def _operands(layers: list[LoraLinear], tiles: LoraTiles) -> list[TensorDescriptor | Tensor]:
    """All weights, all A, all B. A layer without an adapter has its weights in their place, and scale 0."""
    height = _height(layers)
    weights = [_tiled(layer.weight_OI, tiles.outputs, tiles.inner) for layer in layers]
    a = [_tiled(layer.weight_OI if layer.a_RI is None else layer.a_RI, height, tiles.inner) for layer in layers]
    return [*weights, *a, *(layer.weight_OI if layer.b_OR is None else layer.b_OR for layer in layers)]


def _tiled(matrix: Tensor, height: int, width: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [height, width])


def _height(layers: list[LoraLinear]) -> int:
    return max(LEAST_RANK, triton.next_power_of_2(max(layer.rank for layer in layers)))


def _sizes(layers: list[LoraLinear], low: Tensor | None, tiles: LoraTiles) -> dict[str, int]:
    return {
        "RANK": max(layer.rank for layer in layers), "R": _height(layers), "GIVEN": low is not None,
        "BM": tiles.rows, "BN": tiles.outputs, "BK": tiles.inner, "num_warps": tiles.warps, "num_stages": tiles.stages,
    }  # fmt: skip


def fitting(tiles: LoraTiles, weights: int, layers: list[LoraLinear], rows: int) -> LoraTiles | None:
    """`weights`: of how many a program multiplies; by A of each too, where that is done on the way."""
    adapted = any(layer.rank for layer in layers)
    return fit_tiles(shared_memory(), tiles, weights, _height(layers) if adapted else 0, on_the_way=rows <= FEW)
