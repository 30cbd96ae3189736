"""Products of linear layers with low-rank adapters inside, for up to a thousand rows.

    out = W x + b + s B (A x)

A program that multiplies its outputs' weights by all of x multiplies A by it on the way: a few columns more, where a
launch of its own would cost as much as 5 % of the layer. Tiles come by descriptors, for which a device may have an
engine that fetches them without registers (sm_90 has).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from trimtab.rollout.builtin.adapters import Adapted


@triton.jit
def _adapted(total, low, b, n, scale, KIND: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, BN: tl.constexpr):
    """Rounded as the modules round: A x, B (A x), the scaled one, the sum."""
    output, place = n + tl.arange(0, BN), tl.arange(0, R)
    b_NR = tl.load(b + output[:, None] * RANK + place[None, :], (place < RANK)[None, :], 0.0)
    part = tl.dot(low.to(b_NR.dtype), tl.trans(b_NR)).to(KIND).to(tl.float32)
    return total.to(KIND).to(tl.float32) + (part * scale).to(KIND).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight1, weight2, weight3, a1, a2, a3, b1, b2, b3, bias1, bias2, bias3, out, scale1, scale2, scale3,
    rows, inner, share, out_row, out_split, width1, width2, RANK: tl.constexpr, R: tl.constexpr, BIASED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    # Programs that share columns of weights follow each other.
    m, first, split = tl.program_id(0) * BM, tl.program_id(1) * BN, tl.program_id(2)
    n, weight, a, b, bias, scale = first, weight1, a1, b1, bias1, scale1
    if first >= width1 + width2:
        n, weight, a, b, bias, scale = first - width1 - width2, weight3, a3, b3, bias3, scale3
    elif first >= width1:
        n, weight, a, b, bias, scale = first - width1, weight2, a2, b2, bias2, scale2
    total, low = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, R], tl.float32)
    begin = split * share
    for k in range(begin, tl.minimum(begin + share, inner), BK):
        given = x.load([m, k])
        total = tl.dot(given, tl.trans(weight.load([n, k])), total)
        if RANK > 0:
            low = tl.dot(given, tl.trans(a.load([0, k])), low)
    if BIASED:
        total += tl.where(split == 0, tl.load(bias + n + tl.arange(0, BN)).to(tl.float32), 0.0)[None, :]
    kind = out.dtype.element_ty  # fp32 for parts of a sum, which are not rounded
    if RANK > 0:
        total = _adapted(total, low, b, n, scale, kind, RANK, R, BN)
    row, column = m + tl.arange(0, BM), first + tl.arange(0, BN)
    place = out + split * out_split + row.to(tl.int64)[:, None] * out_row + column[None, :]
    tl.store(place, total.to(kind), (row < rows)[:, None])


@triton.jit(do_not_specialize=["rows"])
def _gated(
    x, gate, up, a1, a2, b1, b2, out, scale1, scale2, rows, inner, out_row, RANK: tl.constexpr, R: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    g, u = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
    low1, low2 = tl.zeros([BM, R], tl.float32), tl.zeros([BM, R], tl.float32)
    for k in range(0, inner, BK):
        given = x.load([m, k])
        g = tl.dot(given, tl.trans(gate.load([n, k])), g)
        u = tl.dot(given, tl.trans(up.load([n, k])), u)
        if RANK > 0:
            low1 = tl.dot(given, tl.trans(a1.load([0, k])), low1)
            low2 = tl.dot(given, tl.trans(a2.load([0, k])), low2)
    kind = out.dtype.element_ty
    if RANK > 0:
        g = _adapted(g, low1, b1, n, scale1, kind, RANK, R, BN)
        u = _adapted(u, low2, b2, n, scale2, kind, RANK, R, BN)
    g, u = g.to(kind).to(tl.float32), u.to(kind).to(tl.float32)
    opened = (g * tl.sigmoid(g)).to(kind).to(tl.float32)
    row, column = m + tl.arange(0, BM), n + tl.arange(0, BN)
    tl.store(out + row.to(tl.int64)[:, None] * out_row + column[None, :], (opened * u).to(kind), (row < rows)[:, None])


class Tiles(NamedTuple):
    """How a product is cut: rows, outputs and inputs of one step; parts of the inner dimension."""

    rows: int
    outputs: int
    inner: int
    splits: int
    warps: int
    stages: int


LEAST_RANK = 16  # columns of the smallest matrix product
TILE = 64  # outputs
DTYPES = torch.bfloat16, torch.float16
MOST_ROWS = 1024  # beyond, launches cost little beside the products


def can_adapt(x_TI: Tensor, layers: list[Adapted]) -> bool:
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
    )


def adapted_product(x_TI: Tensor, layers: list[Adapted], *, parts: bool = False, tiles: Tiles | None = None) -> Tensor:
    """The outputs of one layer, or of three side by side [T, O]; with `parts` what adds up to them, in fp32
    [splits, T, O], where one sum would leave most of the device idle."""
    rows, inner = x_TI.shape
    joined = layers * 3 if len(layers) == 1 else layers
    widths = [len(layer.weight_OI) for layer in layers]
    total, biased = sum(widths), layers[0].bias_O is not None
    tiles = tiles or _product_tiles(rows, inner, total, parts)
    share = triton.cdiv(triton.cdiv(inner, tiles.splits), tiles.inner) * tiles.inner
    dtype = x_TI.dtype if tiles.splits == 1 else torch.float32
    out = torch.empty(tiles.splits, rows, total, dtype=dtype, device=x_TI.device)
    _product[triton.cdiv(rows, tiles.rows), total // tiles.outputs, tiles.splits](
        _tiled(x_TI, tiles.rows, tiles), *(_tiled(layer.weight_OI, tiles.outputs, tiles) for layer in joined),
        *_adapters(joined, tiles), *((layer.bias_O if biased else layer.weight_OI) for layer in joined), out,
        *(layer.scale for layer in joined), rows, inner, share, out.stride(1), out.stride(0), widths[0],
        sum(widths[1:2]), BIASED=biased, **_cut(layers, tiles),
    )  # fmt: skip
    return out if tiles.splits > 1 else out[0]


def adapted_gated(x_TI: Tensor, gate: Adapted, up: Adapted, *, tiles: Tiles | None = None) -> Tensor:
    """silu(gate(x)) * up(x), of layers without bias."""
    rows, inner = x_TI.shape
    layers, outputs = [gate, up], len(gate.weight_OI)
    tiles = tiles or _gated_tiles(rows)
    out = torch.empty(rows, outputs, dtype=x_TI.dtype, device=x_TI.device)
    _gated[triton.cdiv(rows, tiles.rows), outputs // tiles.outputs](
        _tiled(x_TI, tiles.rows, tiles), *(_tiled(layer.weight_OI, tiles.outputs, tiles) for layer in layers),
        *_adapters(layers, tiles), out, gate.scale, up.scale, rows, inner, out.stride(0), **_cut(layers, tiles),
    )  # fmt: skip
    return out


def _tiled(matrix: Tensor, height: int, tiles: Tiles) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [height, tiles.inner])


def _adapters(layers: list[Adapted], tiles: Tiles) -> list[TensorDescriptor | Tensor]:
    """All A, then all B. A layer without an adapter has its weights in their place, and a scale of nought."""
    height = _height(layers)
    a = [_tiled(layer.weight_OI if layer.a_RI is None else layer.a_RI, height, tiles) for layer in layers]
    return [*a, *(layer.weight_OI if layer.b_OR is None else layer.b_OR for layer in layers)]


def _height(layers: list[Adapted]) -> int:
    return max(LEAST_RANK, triton.next_power_of_2(max(layer.rank for layer in layers)))


def _cut(layers: list[Adapted], tiles: Tiles) -> dict[str, int]:
    return {
        "RANK": max(layer.rank for layer in layers), "R": _height(layers), "BM": tiles.rows, "BN": tiles.outputs,
        "BK": tiles.inner, "num_warps": tiles.warps, "num_stages": tiles.stages,
    }  # fmt: skip


# ---- measured on an H200, at the shapes of a model of 8 billion parameters


def _product_tiles(rows: int, inner: int, outputs: int, parts: bool) -> Tiles:
    height = 64 if rows <= 64 else 128
    splits, programs = 1, triton.cdiv(rows, height) * outputs // TILE
    while parts and splits < 8 and programs * splits * 2 <= 256 and inner >= 256 * splits:
        splits *= 2
    return Tiles(height, TILE, 64, splits, 4, 5)


def _gated_tiles(rows: int) -> Tiles:
    return Tiles(64, TILE, 64, 1, 4, 4) if rows <= 64 else Tiles(128, TILE, 64, 1, 8, 4)
