"""int8 kernels: linear layers with int8 weights, converted to half precision in registers and scaled in fp32 at the
end.

    out[m, o] = scale[o] * sum_i code[o, i] * x[m, i] + bias[o]

A code is exact in half precision, so this is exactly the product with the rounded weights. With few rows the time is
that of reading the weights, which are half as many bytes. The weights are the left factor: each number is converted by
one warp and enters the product from its registers.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimtab.distributed.device import kind_of
from trimtab.models.layer_kernels import shared_memory

if TYPE_CHECKING:  # the weights' class calls these kernels
    from trimtab.rollout.builtin.linear import Int8Weight


@triton.jit
def _halves(words, KIND: tl.constexpr, ASM: tl.constexpr):
    """The two codes of every word, over 64."""
    if ASM:
        # A byte u alone in 16 bits is u / 2^133 in bf16, whose numbers are evenly spaced down there; so one product
        # and sum gives (u - 128) / 64, two at a time.
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d;
            mov.b32 c, 0x7F007F00;
            mov.b32 d, 0xC000C000;
            prmt.b32 a, $2, 0, 0x4240;
            prmt.b32 b, $2, 0, 0x4341;
            fma.rn.bf16x2 $0, a, c, d;
            fma.rn.bf16x2 $1, b, c, d;
            }""",
            "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low = (((words & 255).to(tl.float32) - 128) / 64).to(KIND)
        high = ((((words >> 8) & 255).to(tl.float32) - 128) / 64).to(KIND)
    return low, high


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, words1, words2, words3, scales1, scales2, scales3, bias1, bias2, bias3, out,
    rows, half, share, x_row, out_row, out_split, width1, width2,
    BIASED: tl.constexpr, WHOLE: tl.constexpr, ASM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    # Programs that share columns of weights follow each other.
    row, column, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = column * BN
    words, scales, bias, begin = words1, scales1, bias1, 0
    if first >= width1 + width2:
        words, scales, bias, begin = words3, scales3, bias3, width1 + width2
    elif first >= width1:
        words, scales, bias, begin = words2, scales2, bias2, width1
    m = row * BM + tl.arange(0, BM)
    n = first - begin + tl.arange(0, BN)
    k = split * share + tl.arange(0, BK)
    left = words + n.to(tl.int64)[:, None] * half + k[None, :]
    right = x + m.to(tl.int64)[:, None] * x_row + k[None, :]
    total = tl.zeros([BN, BM], tl.float32)
    for start in range(0, share, BK):
        inside = (m < rows)[:, None]
        if WHOLE:
            w = tl.load(left + start)
        else:
            inside &= (k + start < half)[None, :]
            w = tl.load(left + start, (k + start < half)[None, :], 0)
        a = tl.load(right + start, inside, 0.0)
        b = tl.load(right + half + start, inside, 0.0)
        low, high = _halves(w, a.dtype, ASM)
        total = tl.dot(low, tl.trans(a), total)
        total = tl.dot(high, tl.trans(b), total)
    total *= tl.load(scales + n)[:, None] * 64
    if BIASED:
        total += tl.where(split == 0, tl.load(bias + n).to(tl.float32), 0.0)[:, None]
    place = out + split * out_split + m.to(tl.int64)[:, None] * out_row + (first + tl.arange(0, BN))[None, :]
    tl.store(place, tl.trans(total).to(out.dtype.element_ty), (m < rows)[:, None])


@triton.jit(do_not_specialize=["rows"])
def _gated(
    x, gate, up, gate_scales, up_scales, out, rows, half, x_row, out_row,
    WHOLE: tl.constexpr, ASM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0), tl.program_id(1)
    m = row * BM + tl.arange(0, BM)
    n = column * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    places = n.to(tl.int64)[:, None] * half + k[None, :]
    right = x + m.to(tl.int64)[:, None] * x_row + k[None, :]
    g, u = tl.zeros([BN, BM], tl.float32), tl.zeros([BN, BM], tl.float32)
    for start in range(0, half, BK):
        inside = (m < rows)[:, None]
        if WHOLE:
            w, v = tl.load(gate + places + start), tl.load(up + places + start)
        else:
            inside &= (k + start < half)[None, :]
            w = tl.load(gate + places + start, (k + start < half)[None, :], 0)
            v = tl.load(up + places + start, (k + start < half)[None, :], 0)
        a = tl.load(right + start, inside, 0.0)
        b = tl.load(right + half + start, inside, 0.0)
        low, high = _halves(w, a.dtype, ASM)
        g = tl.dot(low, tl.trans(a), g)
        g = tl.dot(high, tl.trans(b), g)
        low, high = _halves(v, a.dtype, ASM)
        u = tl.dot(low, tl.trans(a), u)
        u = tl.dot(high, tl.trans(b), u)
    kind = out.dtype.element_ty
    g = (g * (tl.load(gate_scales + n)[:, None] * 64)).to(kind).to(tl.float32)
    u = (u * (tl.load(up_scales + n)[:, None] * 64)).to(kind).to(tl.float32)
    opened = (g * tl.sigmoid(g)).to(kind).to(tl.float32)
    place = out + m.to(tl.int64)[:, None] * out_row + n[None, :]
    tl.store(place, tl.trans((opened * u).to(kind)), (m < rows)[:, None])


@triton.jit
def _unpacked(words, out, outputs, half, ASM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    inside = (n < outputs)[:, None] & (k < half)[None, :]
    w = tl.load(words + n.to(tl.int64)[:, None] * half + k[None, :], inside, 0)
    low, high = _halves(w, out.dtype.element_ty, ASM)
    place = out + n.to(tl.int64)[:, None] * (2 * half) + k[None, :]
    tl.store(place, low * 64, inside)
    tl.store(place + half, high * 64, inside)


@triton.jit
def _added(parts, out, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * count + place, place < count, 0.0)
    tl.store(out + place, total.to(out.dtype.element_ty), place < count)


class Int8Tiles(NamedTuple):
    """Tile sizes: rows, outputs and words of one step; parts of the inner dimension."""

    rows: int
    outputs: int
    words: int
    splits: int
    warps: int
    stages: int


TILE = 64  # outputs
DTYPES = torch.bfloat16, torch.float16
MOST_ROWS = 1024  # beyond, unpacking is little beside the product itself


def can_multiply(x_TI: Tensor, weights: list["Int8Weight"]) -> bool:
    """Not too many rows in half precision, weights alike in bias, of widths that make whole tiles."""
    return (
        x_TI.dtype in DTYPES
        and len(x_TI) <= MOST_ROWS
        and x_TI.stride(1) == 1
        and all(
            len(weight.words_OJ) % TILE == 0
            and weight.inner % 32 == 0
            and (weight.bias_O is None) == (weights[0].bias_O is None)
            for weight in weights
        )
    )


def int8_product(
    x_TI: Tensor, weights: list["Int8Weight"], *, parts: bool = False, tiles: Int8Tiles | None = None
) -> Tensor:
    """Outputs of one weight, or of three side by side [T, O]; with `parts` partial sums in fp32 [splits, T, O], if one
    sum would leave most of the device idle."""
    rows, inner = x_TI.shape
    joined = weights * 3 if len(weights) == 1 else weights
    widths = [len(weight.words_OJ) for weight in weights]
    half, total, biased = inner // 2, sum(widths), weights[0].bias_O is not None
    tiles = tiles or _product_tiles(rows, half, widths, parts)
    share = triton.cdiv(triton.cdiv(half, tiles.splits), tiles.words) * tiles.words
    dtype = x_TI.dtype if tiles.splits == 1 else torch.float32
    out = torch.empty(tiles.splits, rows, total, dtype=dtype, device=x_TI.device)
    _product[triton.cdiv(rows, tiles.rows), total // tiles.outputs, tiles.splits](
        x_TI, *(w.words_OJ for w in joined), *(w.scales_O for w in joined),
        *((w.bias_O if biased else w.scales_O) for w in joined), out,
        rows, half, share, x_TI.stride(0), out.stride(1), out.stride(0), widths[0], sum(widths[1:2]),
        BIASED=biased, WHOLE=share * tiles.splits == half, ASM=_in_ptx(x_TI),
        BM=tiles.rows, BN=tiles.outputs, BK=tiles.words, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out if tiles.splits > 1 else out[0]


def int8_gated(x_TI: Tensor, gate: "Int8Weight", up: "Int8Weight", *, tiles: Int8Tiles | None = None) -> Tensor:
    """silu(gate(x)) * up(x), of weights without bias."""
    rows, inner = x_TI.shape
    outputs, half = len(gate.words_OJ), inner // 2
    tiles = tiles or _fitting(Int8Tiles(_height(rows), TILE, *((128, 1, 4, 3) if rows <= 64 else (32, 1, 4, 4))), 2)
    out = torch.empty(rows, outputs, dtype=x_TI.dtype, device=x_TI.device)
    _gated[triton.cdiv(rows, tiles.rows), outputs // tiles.outputs](
        x_TI, gate.words_OJ, up.words_OJ, gate.scales_O, up.scales_O, out,
        rows, half, x_TI.stride(0), out.stride(0), WHOLE=half % tiles.words == 0, ASM=_in_ptx(x_TI),
        BM=tiles.rows, BN=tiles.outputs, BK=tiles.words, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def added(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of parts [splits, T, O]; a tensor [T, O] is returned as it is."""
    if parts.ndim == 2:
        return parts
    out = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    _added[triton.cdiv(out.numel(), 1024),](parts, out, out.numel(), PARTS=len(parts), BLOCK=1024)
    return out


def dequantize_int8(weight: "Int8Weight", dtype: torch.dtype) -> Tensor:
    """Its codes [O, I]."""
    outputs, half = weight.words_OJ.shape
    out = torch.empty(outputs, 2 * half, dtype=dtype, device=weight.words_OJ.device)
    _unpacked[triton.cdiv(half, 512), triton.cdiv(outputs, 16)](
        weight.words_OJ, out, outputs, half, ASM=_in_ptx(out), BN=16, BK=512, num_warps=4
    )
    return out[:, : weight.inner]


# ---- measured on an H200, at the shapes of models of 1.7 and 8 billion parameters


def _product_tiles(rows: int, half: int, widths: list[int], parts: bool) -> Int8Tiles:
    large = rows > 128 and all(width % 128 == 0 for width in widths)
    outputs, warps = (128, 8) if large else (TILE, 4)
    if parts or rows > 128:
        words, stages = 64, 5 if rows <= 16 else 4 if rows <= 64 else 3
    else:
        words, stages = (128, 4) if rows <= 64 else (32, 4)
    splits, programs = 1, triton.cdiv(rows, _height(rows)) * sum(widths) // outputs
    most = 8 if rows <= 64 else 4
    while parts and splits < most and programs * splits * 2 <= (128 if large else 256) and half >= 2 * splits * words:
        splits *= 2
    return _fitting(Int8Tiles(_height(rows), outputs, words, splits, warps, stages), 1)


def _height(rows: int) -> int:
    return min(128, max(16, triton.next_power_of_2(rows)))


def _fitting(tiles: Int8Tiles, weights: int) -> Int8Tiles:
    """Shorter steps, on devices with less shared memory."""
    words = tiles.words
    while words > 32 and 2 * words * (weights * tiles.outputs + 2 * tiles.rows) * tiles.stages > shared_memory():
        words //= 2
    return tiles._replace(words=words)


def _in_ptx(out: Tensor) -> bool:
    """Whether the instructions in _halves are the device's own, and give this dtype."""
    return out.dtype == torch.bfloat16 and kind_of(out.device).ptx
