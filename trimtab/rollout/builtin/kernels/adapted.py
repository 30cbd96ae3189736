"""Products of wide linear layers, and of layers with low-rank adapters, for up to a thousand rows.

    out = W x + b + s B (A x)

A x is the work of a few programs of the same launch, which come first and are done long before the others, each of
which waits for them only when it has multiplied its own weights by all of x: launches of their own would cost 5 % of a
layer, and A x in every program as much. Tiles come by descriptors, for which a device may have an engine that fetches
them without registers (sm_90 has).
"""

import functools
import threading
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from trimtab.rollout.builtin.adapters import Adapted


@triton.jit
def _low(
    x, a1, a2, a3, low, signals, rows, inner, program, R: tl.constexpr, LM: tl.constexpr, LK: tl.constexpr,
):  # fmt: skip
    """A x of some rows and one layer, then a signal to those who wait for it."""
    blocks = tl.cdiv(rows, LM)
    which, m = program // blocks, (program % blocks) * LM
    a = a1
    if which == 1:
        a = a2
    elif which == 2:
        a = a3
    total = tl.zeros([LM, R], tl.float32)
    for k in tl.range(0, inner, LK, num_stages=3):
        total = tl.dot(x.load([m, k]), tl.trans(a.load([0, k])), total)
    row, place = m + tl.arange(0, LM), tl.arange(0, R)
    where = low + (which * rows + row)[:, None] * R + place[None, :]
    tl.store(where, total.to(low.dtype.element_ty), (row < rows)[:, None])
    tl.debug_barrier()
    tl.atomic_add(signals, 1, sem="release", scope="gpu")


@triton.jit
def _wait(signals, count, waiting):
    """For so many signals; the last one of those who wait leaves none behind."""
    seen = tl.atomic_add(signals, 0, sem="acquire", scope="gpu")
    while seen < count:
        seen = tl.atomic_add(signals, 0, sem="acquire", scope="gpu")
    before = tl.atomic_add(signals + 1, 1, sem="acq_rel", scope="gpu")
    if before == waiting - 1:
        tl.atomic_xchg(signals + 1, 0, sem="relaxed", scope="gpu")
        tl.atomic_xchg(signals, 0, sem="relaxed", scope="gpu")


@triton.jit
def _adapted(
    total, low, b, which, m, n, rows, scale, KIND: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Rounded as the modules round: A x, B (A x), the scaled one, the sum."""
    row, output, place = m + tl.arange(0, BM), n + tl.arange(0, BN), tl.arange(0, R)
    b_NR = tl.load(b + output[:, None] * RANK + place[None, :], (place < RANK)[None, :], 0.0)
    # Not from the cache of one processor alone: others have written it.
    where = low + (which * rows + row)[:, None] * R + place[None, :]
    low_MR = tl.load(where, (row < rows)[:, None], 0.0, cache_modifier=".cg")
    part = tl.dot(low_MR, tl.trans(b_NR)).to(KIND).to(tl.float32)
    return total.to(KIND).to(tl.float32) + (part * scale).to(KIND).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, xl, weight1, weight2, weight3, a1, a2, a3, b1, b2, b3, bias1, bias2, bias3, low, signals, out,
    scale1, scale2, scale3, rows, inner, share, columns, out_row, out_split, width1, width2,
    LAYERS: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, BIASED: tl.constexpr, SWAPPED: tl.constexpr,
    LM: tl.constexpr, LK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    program, blocks, first_ones = tl.program_id(0), tl.cdiv(rows, BM), 0
    if RANK > 0:
        first_ones = tl.cdiv(rows, LM) * LAYERS
    if program < first_ones:
        if RANK > 0:
            _low(xl, a1, a2, a3, low, signals, rows, inner, program, R, LM, LK)
    else:
        # Programs that share columns of weights follow each other.
        program -= first_ones
        m, column, split = (program % blocks) * BM, (program // blocks) % columns, program // (blocks * columns)
        first = column * BN
        n, weight, b, bias, scale, which = first, weight1, b1, bias1, scale1, 0
        if LAYERS == 3:
            if first >= width1 + width2:
                n, weight, b, bias, scale, which = first - width1 - width2, weight3, b3, bias3, scale3, 2
            elif first >= width1:
                n, weight, b, bias, scale, which = first - width1, weight2, b2, bias2, scale2, 1
        begin = split * share
        end = tl.minimum(begin + share, inner)
        if SWAPPED:
            turned = tl.zeros([BN, BM], tl.float32)
            for k in range(begin, end, BK):
                turned = tl.dot(weight.load([n, k]), tl.trans(x.load([m, k])), turned)
            total = tl.trans(turned)
        else:
            total = tl.zeros([BM, BN], tl.float32)
            for k in range(begin, end, BK):
                total = tl.dot(x.load([m, k]), tl.trans(weight.load([n, k])), total)
        if BIASED:
            total += tl.where(split == 0, tl.load(bias + n + tl.arange(0, BN)).to(tl.float32), 0.0)[None, :]
        kind: tl.constexpr = out.dtype.element_ty  # fp32 for parts of a sum, which are not rounded
        if RANK > 0 and split == 0:
            _wait(signals, first_ones, blocks * columns)
            total = _adapted(total, low, b, which, m, n, rows, scale, kind, RANK, R, BM, BN)
        row, place = m + tl.arange(0, BM), first + tl.arange(0, BN)
        where = out + split * out_split + row.to(tl.int64)[:, None] * out_row + place[None, :]
        tl.store(where, total.to(kind), (row < rows)[:, None])


@triton.jit(do_not_specialize=["rows"])
def _gated(
    x, xl, gate, up, a1, a2, b1, b2, low, signals, out, scale1, scale2, rows, inner, columns, out_row,
    RANK: tl.constexpr, R: tl.constexpr, LM: tl.constexpr, LK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    program, blocks, first_ones = tl.program_id(0), tl.cdiv(rows, BM), 0
    if RANK > 0:
        first_ones = tl.cdiv(rows, LM) * 2
    if program < first_ones:
        if RANK > 0:
            _low(xl, a1, a2, a2, low, signals, rows, inner, program, R, LM, LK)
    else:
        program -= first_ones
        m, n = (program % blocks) * BM, (program // blocks) * BN
        g, u = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
        for k in range(0, inner, BK):
            given = x.load([m, k])
            g = tl.dot(given, tl.trans(gate.load([n, k])), g)
            u = tl.dot(given, tl.trans(up.load([n, k])), u)
        kind: tl.constexpr = out.dtype.element_ty
        if RANK > 0:
            _wait(signals, first_ones, blocks * columns)
            g = _adapted(g, low, b1, 0, m, n, rows, scale1, kind, RANK, R, BM, BN)
            u = _adapted(u, low, b2, 1, m, n, rows, scale2, kind, RANK, R, BM, BN)
        g, u = g.to(kind).to(tl.float32), u.to(kind).to(tl.float32)
        opened = (g * tl.sigmoid(g)).to(kind).to(tl.float32)
        row, place = m + tl.arange(0, BM), n + tl.arange(0, BN)
        where = out + row.to(tl.int64)[:, None] * out_row + place[None, :]
        tl.store(where, (opened * u).to(kind), (row < rows)[:, None])


class Tiles(NamedTuple):
    """How a product is cut: rows, outputs and inputs of one step; parts of the inner dimension."""

    rows: int
    outputs: int
    inner: int
    splits: int
    warps: int
    stages: int
    swapped: bool = False
    """The weights are the left factor."""


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


def is_wide(x_TI: Tensor, layers: list[Adapted], *, parts: bool = False) -> bool:
    """Whether these kernels are faster than others for layers without adapters."""
    return x_TI.shape[1] >= WIDE and len(x_TI) <= (64 if parts else 512)


def adapted_product(x_TI: Tensor, layers: list[Adapted], *, parts: bool = False, tiles: Tiles | None = None) -> Tensor:
    """The outputs of one layer, or of three side by side [T, O]; with `parts` what adds up to them, in fp32
    [splits, T, O], where one sum would leave most of the device idle."""
    rows, inner = x_TI.shape
    joined = layers * 3 if len(layers) == 1 else layers
    widths = [len(layer.weight_OI) for layer in layers]
    total, biased = sum(widths), layers[0].bias_O is not None
    tiles = tiles or _product_tiles(rows, inner, widths, parts)
    share = triton.cdiv(triton.cdiv(inner, tiles.splits), tiles.inner) * tiles.inner
    dtype = x_TI.dtype if tiles.splits == 1 else torch.float32
    out = torch.empty(tiles.splits, rows, total, dtype=dtype, device=x_TI.device)
    columns, low = total // tiles.outputs, _Low.of(x_TI, layers)
    _product[low.programs + triton.cdiv(rows, tiles.rows) * columns * tiles.splits,](
        _tiles(x_TI, tiles.rows, tiles.inner), low.x,
        *(_tiles(layer.weight_OI, tiles.outputs, tiles.inner) for layer in joined), *low.a(joined),
        *(layer.weight_OI if layer.b_OR is None else layer.b_OR for layer in joined),
        *(layer.bias_O if biased else layer.weight_OI for layer in joined), low.out, low.signals, out,
        *(layer.scale for layer in joined), rows, inner, share, columns, out.stride(1), out.stride(0), widths[0],
        sum(widths[1:2]), LAYERS=len(layers), BIASED=biased, SWAPPED=tiles.swapped, **low.sizes, **_sizes(tiles),
    )  # fmt: skip
    return out if tiles.splits > 1 else out[0]


def adapted_gated(x_TI: Tensor, gate: Adapted, up: Adapted, *, tiles: Tiles | None = None) -> Tensor:
    """silu(gate(x)) * up(x), of layers without bias."""
    rows, inner = x_TI.shape
    layers, outputs = [gate, up], len(gate.weight_OI)
    tiles = tiles or _gated_tiles(rows, outputs)
    out = torch.empty(rows, outputs, dtype=x_TI.dtype, device=x_TI.device)
    columns, low = outputs // tiles.outputs, _Low.of(x_TI, layers)
    _gated[low.programs + triton.cdiv(rows, tiles.rows) * columns,](
        _tiles(x_TI, tiles.rows, tiles.inner), low.x,
        *(_tiles(layer.weight_OI, tiles.outputs, tiles.inner) for layer in layers), *low.a(layers),
        *(layer.weight_OI if layer.b_OR is None else layer.b_OR for layer in layers), low.out, low.signals, out,
        gate.scale, up.scale, rows, inner, columns, out.stride(0), **low.sizes, **_sizes(tiles),
    )  # fmt: skip
    return out


class _Low(NamedTuple):
    """A x: where it goes, and who makes it. A layer without an adapter has its weights in the place of A and of B, and
    a scale of nought."""

    x: TensorDescriptor
    out: Tensor
    signals: Tensor
    programs: int
    sizes: dict[str, int]

    @classmethod
    def of(cls, x_TI: Tensor, layers: list[Adapted]) -> "_Low":
        rows, rank = len(x_TI), max(layer.rank for layer in layers)
        height = 16 if rows <= 64 else 64
        columns = max(LEAST_RANK, triton.next_power_of_2(rank))
        out = torch.empty(len(layers) if rank else 0, rows, columns, dtype=x_TI.dtype, device=x_TI.device)
        programs = triton.cdiv(rows, height) * len(layers) if rank else 0
        sizes = {"RANK": rank, "R": columns, "LM": height, "LK": 128}
        return cls(_tiles(x_TI, height, 128), out, _signals(x_TI.device, threading.get_ident()), programs, sizes)

    def a(self, layers: list[Adapted]) -> list[TensorDescriptor]:
        matrices = [layer.weight_OI if layer.a_RI is None else layer.a_RI for layer in layers]
        return [_tiles(matrix, self.sizes["R"], self.sizes["LK"]) for matrix in matrices]


@functools.cache
def _signals(device: torch.device, thread: int) -> Tensor:
    """What a launch counts by, and leaves at nought. Launches of one thread follow each other."""
    return torch.zeros(2, dtype=torch.int32, device=device)


def _tiles(matrix: Tensor, height: int, width: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [height, width])


def _sizes(tiles: Tiles) -> dict[str, int]:
    sizes = {"BM": tiles.rows, "BN": tiles.outputs, "BK": tiles.inner}
    return {**sizes, "num_warps": tiles.warps, "num_stages": tiles.stages}


# ---- measured on an H200, at the shapes of a model of 8 billion parameters

WIDE = 4096


def _product_tiles(rows: int, inner: int, widths: list[int], parts: bool) -> Tiles:
    if parts:
        long = inner > 8192 and widths[0] % 128 == 0
        tiles = Tiles(64, 128, 64, 4, 4, 5, swapped=True) if long else Tiles(64, TILE, 128, 2, 4, 4)
        return tiles if rows <= 64 else Tiles(128, TILE, 64, 1, 4, 5)
    if rows > 64 and all(width % 128 == 0 for width in widths):
        return Tiles(128, 128, 64, 1, 8, 4)
    return Tiles(64, TILE, 128, 1, 4, 5, swapped=True)


def _gated_tiles(rows: int, outputs: int) -> Tiles:
    return Tiles(128, 128, 64, 1, 8, 4) if rows > 64 and outputs % 128 == 0 else Tiles(64, TILE, 64, 1, 4, 3)
