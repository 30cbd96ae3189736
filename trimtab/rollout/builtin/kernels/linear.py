"""Matrix products that share their input, in one launch and from the modules' own weights.

A launch for each of q, k and v would leave most of the device idle at a few hundred rows; a packed copy of the weights
would have to follow every optimiser step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, nn


@triton.jit
def _joined(
    x, weight1, weight2, weight3, bias1, bias2, bias3, out, rows, inner, x_row, out_row,
    N1: tl.constexpr, N2: tl.constexpr, BIASED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    # Programs that share columns of weights follow each other.
    column, row = tl.program_id(1), tl.program_id(0)
    first = column * BN
    weight, bias, begin = weight1, bias1, 0
    if first >= N1 + N2:
        weight, bias, begin = weight3, bias3, N1 + N2
    elif first >= N1:
        weight, bias, begin = weight2, bias2, N1
    m = row * BM + tl.arange(0, BM)
    n = first - begin + tl.arange(0, BN)
    k = tl.arange(0, BK)
    left = x + m.to(tl.int64)[:, None] * x_row + k[None, :]
    right = weight + n.to(tl.int64)[:, None] * inner + k[None, :]
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, inner, BK):
        a = tl.load(left + start, (m < rows)[:, None] & (k + start < inner)[None, :], 0.0)
        b = tl.load(right + start, (k + start < inner)[None, :], 0.0)
        total = tl.dot(a, tl.trans(b), total)
    if BIASED:
        total += tl.load(bias + n)[None, :].to(tl.float32)
    place = out + m.to(tl.int64)[:, None] * out_row + (first + tl.arange(0, BN))[None, :]
    tl.store(place, total.to(out.dtype.element_ty), (m < rows)[:, None])


@triton.jit
def _gated(
    x, gate, up, out, rows, inner, x_row, out_row, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    column, row = tl.program_id(1), tl.program_id(0)
    m = row * BM + tl.arange(0, BM)
    n = column * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    left = x + m.to(tl.int64)[:, None] * x_row + k[None, :]
    places = n.to(tl.int64)[:, None] * inner + k[None, :]
    g, u = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
    for start in range(0, inner, BK):
        inside = (k + start < inner)[None, :]
        a = tl.load(left + start, (m < rows)[:, None] & inside, 0.0)
        g = tl.dot(a, tl.trans(tl.load(gate + places + start, inside, 0.0)), g)
        u = tl.dot(a, tl.trans(tl.load(up + places + start, inside, 0.0)), u)
    kind = out.dtype.element_ty
    g = g.to(kind).to(tl.float32)
    opened = (g * tl.sigmoid(g)).to(kind).to(tl.float32)
    place = out + m.to(tl.int64)[:, None] * out_row + n[None, :]
    tl.store(place, (opened * u.to(kind).to(tl.float32)).to(kind), (m < rows)[:, None])


TILE = 64  # columns of one program, and of one step along the inner dimension
PROGRAMS_OF_LARGE_TILES = 200  # enough to fill the device with tiles of 128 rows


def can_join(x_TD: Tensor, modules: list[nn.Module]) -> bool:
    """Plain half-precision Linear modules, alike in bias, of widths that make whole tiles."""
    return x_TD.dtype in (torch.bfloat16, torch.float16) and all(
        type(module) is nn.Linear
        and "forward" not in vars(module)  # int8 replaces it
        and module.weight.dtype == x_TD.dtype
        and module.weight.is_contiguous()
        and module.out_features % TILE == 0
        and module.in_features % 8 == 0
        and (module.bias is None) == (modules[0].bias is None)
        for module in modules
    )


def joined_linear(x_TD: Tensor, modules: list[nn.Module]) -> Tensor:
    """The outputs of three Linear modules side by side."""
    rows, inner = x_TD.shape
    weights, biases = [m.weight for m in modules], [m.bias for m in modules]
    widths = [len(w) for w in weights]
    out = torch.empty(rows, sum(widths), dtype=x_TD.dtype, device=x_TD.device)
    _joined[triton.cdiv(rows, 64), sum(widths) // TILE](
        x_TD, *weights, *(weights if biases[0] is None else biases), out, rows, inner, x_TD.stride(0), out.stride(0),
        N1=widths[0], N2=widths[1], BIASED=biases[0] is not None, BM=64, BN=TILE, BK=TILE, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


def gated_linear(x_TD: Tensor, gate: nn.Linear, up: nn.Linear) -> Tensor:
    """silu(gate(x)) * up(x), of modules without bias."""
    rows, inner = x_TD.shape
    out = torch.empty(rows, gate.out_features, dtype=x_TD.dtype, device=x_TD.device)
    columns = gate.out_features // TILE
    large = triton.cdiv(rows, 128) * columns >= PROGRAMS_OF_LARGE_TILES
    height, warps = (128, 8) if large else (64, 4)
    _gated[triton.cdiv(rows, height), columns](
        x_TD, gate.weight, up.weight, out, rows, inner, x_TD.stride(0), out.stride(0),
        BM=height, BN=TILE, BK=TILE, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return out
