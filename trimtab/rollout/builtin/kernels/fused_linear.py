"""Fused linear kernels: QKV with rotary positions and KV store, gate and up with SiLU, split-K for small batches.

Separate launches for q, k and v would leave most of the device idle up to a few hundred rows; a packed copy of the
weights would have to be updated after every optimizer step.

With few rows, time is spent reading weights and waiting for other launches. So elementwise work after a product happens
in its registers: rotary positions and the KV store after q, k and v; the gate. Outputs too few to fill the device are
computed as partial sums, which the next norm adds in order. Many steps of the inner dimension are in flight at once,
and a launch overlaps with the previous one (models/layer_kernels.py).
"""

from itertools import pairwise
from typing import NamedTuple, TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from trimtab.models.layer_kernels import overlapped, rotated, shared_memory, wait


@triton.jit(do_not_specialize=["rows"])
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


@triton.jit(do_not_specialize=["rows"])
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
    """Whether these are plain half-precision Linear modules, all with or without bias, whose widths are whole tiles."""
    return all(
        "forward" not in vars(module)  # int8 replaces it
        and is_plain(module, x_TD)
        and module.out_features % TILE == 0
        and (module.bias is None) == (modules[0].bias is None)
        for module in modules
    )


def is_plain(module: nn.Module, x_TD: Tensor) -> TypeGuard[nn.Linear]:
    """Whether kernels may read the module's weights. With tensor parallelism its hooks would have to be called."""
    return (
        type(module) is nn.Linear
        and not (module._forward_pre_hooks or module._forward_hooks)
        and x_TD.dtype in (torch.bfloat16, torch.float16)
        and module.weight.dtype == x_TD.dtype
        and module.weight.is_contiguous()
        and module.in_features % 8 == 0
    )


def merged_linear(x_TD: Tensor, modules: list[nn.Module]) -> Tensor:
    """The concatenated outputs of three Linear modules, for many rows: at 256 to 1,024 of them `small_batch_linears`
    takes 1.1 to 1.6 times as long on an H200."""
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


# ---- few rows


@triton.jit
def _few_rows_product(
    x, weight, row, line_N, begin, share, rows, inner, x_row,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr, SWAPPED: tl.constexpr,
):  # fmt: skip
    """The product of rows of x and lines of the weight, given by their offsets [BM, BN]."""
    k = begin + tl.arange(0, BK)
    left = weight + line_N[:, None] + k[None, :]
    right = x + row.to(tl.int64)[:, None] * x_row + k[None, :]
    live = (row < rows)[:, None]
    total = tl.zeros([BN, BM] if SWAPPED else [BM, BN], tl.float32)
    for start in range(0, share, BK):
        if WHOLE:
            w, a = tl.load(left + start), tl.load(right + start, live, 0.0)
        else:
            inside = (k + start < inner)[None, :]
            w, a = tl.load(left + start, inside, 0.0), tl.load(right + start, live & inside, 0.0)
        total = tl.dot(w, tl.trans(a), total) if SWAPPED else tl.dot(a, tl.trans(w), total)
    return tl.trans(total) if SWAPPED else total


@triton.jit
def _halves(total, BM: tl.constexpr, BN: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(total, [BM, 2, BN // 2]), [0, 2, 1]))


@triton.jit(do_not_specialize=["rows"])
def _few_rows_gated(
    x, gate, out, up_offset: tl.int64, rows, inner, x_row, out_row,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr, SWAPPED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):  # fmt: skip
    # Programs that share columns of weights follow each other. Half of the lines are the gate's, half up's.
    HALF: tl.constexpr = BN // 2
    row, line, column = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN), tl.program_id(1) * HALF
    line_N = (column + line % HALF).to(tl.int64) * inner + (line // HALF).to(tl.int64) * up_offset
    wait(OVERLAPPED)
    g, u = _halves(
        _few_rows_product(x, gate, row, line_N, 0, inner, rows, inner, x_row, BM, BN, BK, WHOLE, SWAPPED), BM, BN
    )
    kind: tl.constexpr = out.dtype.element_ty
    g = g.to(kind).to(tl.float32)
    opened = (g * tl.sigmoid(g)).to(kind).to(tl.float32) * u.to(kind).to(tl.float32)
    place = out + row.to(tl.int64)[:, None] * out_row + (column + tl.arange(0, HALF))[None, :]
    tl.store(place, opened.to(kind), (row < rows)[:, None])


@triton.jit(do_not_specialize=["rows"])
def _few_rows_joined(
    x, weight, bias, out, offset2: tl.int64, offset3: tl.int64, offset4: tl.int64,
    bias_offset2: tl.int64, bias_offset3: tl.int64, bias_offset4: tl.int64, rows, inner, x_row,
    N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, N4: tl.constexpr, BIASED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr, SWAPPED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):  # fmt: skip
    # A tile may have lines of several weights. The outputs of each weight are contiguous.
    row, line = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    last = tl.minimum(line, N1 + N2 + N3 + N4 - 1)
    second, third, fourth = last >= N1, last >= N1 + N2, last >= N1 + N2 + N3
    line_N = last.to(tl.int64) * inner + second.to(tl.int64) * offset2
    line_N += third.to(tl.int64) * offset3 + fourth.to(tl.int64) * offset4
    begin = tl.where(fourth, N1 + N2 + N3, tl.where(third, N1 + N2, tl.where(second, N1, 0)))
    width = tl.where(fourth, N4, tl.where(third, N3, tl.where(second, N2, N1)))
    wait(OVERLAPPED)
    total = _few_rows_product(x, weight, row, line_N, 0, inner, rows, inner, x_row, BM, BN, BK, WHOLE, SWAPPED)
    if BIASED:
        own = last.to(tl.int64) + second.to(tl.int64) * bias_offset2
        own += third.to(tl.int64) * bias_offset3 + fourth.to(tl.int64) * bias_offset4
        total += tl.load(bias + own)[None, :].to(tl.float32)
    place = (begin * rows + last - begin)[None, :] + row[:, None] * width[None, :]
    place = tl.max_contiguous(tl.multiple_of(place, [1, 16]), [1, 16])  # as widths are multiples of 16
    tl.store(out + place, total.to(out.dtype.element_ty), (row < rows)[:, None] & (line == last)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _few_rows_heads(
    x, weight1, weight2, weight3, bias1, bias2, bias3, cos, sin, query_norm, key_norm, out, keys, values, slot_mapping,
    epsilon, rows, inner, x_row, out_row, page_stride, token_stride, head_stride,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, BIASED: tl.constexpr,
    NORMED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr,
    SWAPPED: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    # As many columns of a head's first half as of its second: rotation mixes one with the other.
    PART: tl.constexpr = BN // 2
    head, piece = tl.program_id(1) // (HALF // PART), tl.program_id(1) % (HALF // PART)
    weight, bias, norm, own = weight1, bias1, query_norm, head
    if head >= QUERIES + HEADS:
        weight, bias, own = weight3, bias3, head - QUERIES - HEADS
    elif head >= QUERIES:
        weight, bias, norm, own = weight2, bias2, key_norm, head - QUERIES
    row, line = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)
    line_N = (own * 2 * HALF + piece * PART + line % PART + line // PART * HALF).to(tl.int64) * inner
    wait(OVERLAPPED)
    total = _few_rows_product(x, weight, row, line_N, 0, inner, rows, inner, x_row, BM, BN, BK, WHOLE, SWAPPED)
    low, high = _halves(total, BM, BN)
    column = piece * PART + tl.arange(0, PART)
    if BIASED:
        low += tl.load(bias + own * 2 * HALF + column)[None, :].to(tl.float32)
        high += tl.load(bias + own * 2 * HALF + HALF + column)[None, :].to(tl.float32)
    kind: tl.constexpr = out.dtype.element_ty
    low, high = low.to(kind).to(tl.float32), high.to(kind).to(tl.float32)
    live = (row < rows)[:, None]
    if head < QUERIES + HEADS:
        if NORMED:
            scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + epsilon)[:, None]
            low = (low * scale).to(kind).to(tl.float32) * tl.load(norm + column)[None, :].to(tl.float32)
            high = (high * scale).to(kind).to(tl.float32) * tl.load(norm + HALF + column)[None, :].to(tl.float32)
            low, high = low.to(kind).to(tl.float32), high.to(kind).to(tl.float32)
        angle = row[:, None] * 2 * HALF + column[None, :]
        cos1, sin1 = tl.load(cos + angle, live, 0.0).to(tl.float32), tl.load(sin + angle, live, 0.0).to(tl.float32)
        angle += HALF
        cos2, sin2 = tl.load(cos + angle, live, 0.0).to(tl.float32), tl.load(sin + angle, live, 0.0).to(tl.float32)
        low, high = rotated(low, high, cos1, sin1, cos2, sin2)
    place = out + row.to(tl.int64)[:, None] * out_row + (head * 2 * HALF + column)[None, :]
    tl.store(place, low.to(kind), live)
    tl.store(place + HALF, high.to(kind), live)
    if head >= QUERIES:
        token = tl.load(slot_mapping + row, row < rows, 0)
        target = (token // PAGE) * page_stride + (token % PAGE) * token_stride + own * head_stride
        target = target[:, None] + column[None, :]
        if head >= QUERIES + HEADS:
            tl.store(values + target, low.to(kind), live)
            tl.store(values + target + HALF, high.to(kind), live)
        else:
            tl.store(keys + target, low.to(kind), live)
            tl.store(keys + target + HALF, high.to(kind), live)


@triton.jit(do_not_specialize=["rows"])
def _few_rows_parts(
    x, weight, out, rows, inner, share, x_row, out_row, out_part,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr, SWAPPED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(2)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    wait(OVERLAPPED)
    line_N = column.to(tl.int64) * inner
    total = _few_rows_product(
        x, weight, row, line_N, part * share, share, rows, inner, x_row, BM, BN, BK, WHOLE, SWAPPED
    )
    place = out + part * out_part + row.to(tl.int64)[:, None] * out_row + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), (row < rows)[:, None])


class LinearTiles(NamedTuple):
    """Tile sizes: rows, lines of weights and inner numbers of one step; number of parts of the inner dimension."""

    rows: int
    lines: int
    inner: int
    parts: int
    stages: int
    swapped: bool
    """Whether the weights are the left factor, whose tiles are at least 64 high."""

    def launch(self, inner: int, share: int, device: torch.device) -> dict[str, int | bool]:
        bytes_of_a_step = 2 * (self.rows + self.lines) * self.inner
        stages = max(2, min(self.stages, (shared_memory() - 2**14) // bytes_of_a_step))
        return {
            "BM": self.rows, "BN": self.lines, "BK": self.inner, "SWAPPED": self.swapped,
            "WHOLE": share * self.parts == inner and share % self.inner == 0,
            "num_warps": 4, "num_stages": stages, **overlapped(device),
        }  # fmt: skip


MOST_ROWS = 64  # of gated products and of split-K; above, tiles for many rows are faster
MOST_ROWS_OF_HEADS = 1024  # of models narrower than WIDE
WIDE = 4096


def few_rows_apply(x_TD: Tensor, modules: list[nn.Module], most: int = MOST_ROWS) -> bool:
    """Whether the small-batch kernels apply: few rows, and modules that can be joined."""
    return has_few_rows(x_TD, most) and can_join(x_TD, modules)


def has_few_rows(x_TD: Tensor, most: int = MOST_ROWS) -> bool:
    return len(x_TD) <= most and x_TD.stride(1) == 1 and x_TD.shape[1] % 16 == 0


def few_rows_heads_apply(x_TD: Tensor, modules: list[nn.Module], width: int) -> bool:
    most = MOST_ROWS_OF_HEADS if x_TD.shape[1] < WIDE else MOST_ROWS
    return width in (64, 128) and few_rows_apply(x_TD, modules, most)


def small_batch_qkv_rope(
    x_TD: Tensor, modules: list[nn.Linear], angles: tuple[Tensor, Tensor], keys: Tensor, values: Tensor,
    slot_mapping_T: Tensor, head_norms: tuple[Tensor, Tensor, float] | None = None, tiles: LinearTiles | None = None,
) -> Tensor:  # fmt: skip
    """q, k and v concatenated, with rotary positions (after head norms, if the model has them); stores keys and values
    in one layer's KV cache."""
    (rows, inner), width = x_TD.shape, angles[0].shape[1]
    counts = [module.out_features // width for module in modules]
    assert keys.stride() == values.stride() and keys.stride(3) == 1 and counts[1] == counts[2]
    weights, biases = [m.weight for m in modules], [m.bias for m in modules]
    out = torch.empty(rows, sum(counts) * width, dtype=x_TD.dtype, device=x_TD.device)
    query_norm, key_norm, epsilon = head_norms or (*angles, 0.0)
    tiles = tiles or _tiles_of_heads(rows, sum(counts), width if head_norms else TILE, width)
    _few_rows_heads[triton.cdiv(rows, tiles.rows), sum(counts) * width // tiles.lines](
        x_TD, *weights, *(weights if biases[0] is None else biases), *angles, query_norm, key_norm, out, keys, values,
        slot_mapping_T, epsilon, rows, inner, x_TD.stride(0), out.stride(0), *keys.stride()[:3],
        QUERIES=counts[0], HEADS=counts[1], HALF=width // 2, PAGE=keys.shape[1], BIASED=biases[0] is not None,
        NORMED=head_norms is not None, **tiles.launch(inner, inner, x_TD.device),
    )  # fmt: skip
    return out


def small_batch_gate_up(x_TD: Tensor, gate: nn.Linear, up: nn.Linear, tiles: LinearTiles | None = None) -> Tensor:
    """silu(gate(x)) * up(x), of modules without bias."""
    rows, inner = x_TD.shape
    out = torch.empty(rows, gate.out_features, dtype=x_TD.dtype, device=x_TD.device)
    distance = up.weight.data_ptr() - gate.weight.data_ptr()
    tiles = tiles or _tiles_of_gated(rows, gate.out_features)
    _few_rows_gated[triton.cdiv(rows, tiles.rows), 2 * gate.out_features // tiles.lines](
        x_TD, gate.weight, out, distance // x_TD.element_size(), rows, inner, x_TD.stride(0), out.stride(0),
        **tiles.launch(inner, inner, x_TD.device),
    )  # fmt: skip
    return out


def small_batch_linears(x_TD: Tensor, modules: list[nn.Linear], tiles: LinearTiles | None = None) -> list[Tensor]:
    """The outputs of up to four modules, all with or without bias, whose widths are multiples of 16."""
    (rows, inner), widths, missing = x_TD.shape, [module.out_features for module in modules], 4 - len(modules)
    weights, biases = [module.weight for module in modules], [m.bias for m in modules if m.bias is not None]
    out = torch.empty(rows * sum(widths), dtype=x_TD.dtype, device=x_TD.device)
    offsets = _offsets(weights, inner) + [0] * missing + (_offsets(biases, 1) + [0] * missing if biases else [0] * 3)
    tiles = tiles or _tiles_of_joined(rows)
    _few_rows_joined[triton.cdiv(rows, tiles.rows), triton.cdiv(sum(widths), tiles.lines)](
        x_TD, weights[0], (biases or weights)[0], out, *offsets, rows, inner, x_TD.stride(0), *widths, *[0] * missing,
        BIASED=bool(biases), **tiles.launch(inner, inner, x_TD.device),
    )  # fmt: skip
    parts = out.split([rows * width for width in widths])
    return [part.view(rows, width) for part, width in zip(parts, widths)]


def _offsets(tensors: list[Tensor], inner: int) -> list[int]:
    """How far each tensor begins behind the end of the previous one, in elements."""
    size = tensors[0].element_size()
    return [(b.data_ptr() - a.data_ptr()) // size - len(a) * inner for a, b in pairwise(tensors)]


def small_batch_split_k(
    x_TD: Tensor, module: nn.Linear, tiles: LinearTiles | None = None, *, exact: bool = False
) -> Tensor:
    """Partial sums of the module's output, in fp32 [parts, T, O]; `exact`: in one part, as the trainer's sum."""
    rows, inner = x_TD.shape
    tiles = tiles or (_tiles_of_one_part if exact else _tiles_of_parts)(rows, inner, module.out_features)
    share = triton.cdiv(triton.cdiv(inner, tiles.parts), tiles.inner) * tiles.inner
    out = torch.empty(tiles.parts, rows, module.out_features, dtype=torch.float32, device=x_TD.device)
    _few_rows_parts[triton.cdiv(rows, tiles.rows), module.out_features // tiles.lines, tiles.parts](
        x_TD, module.weight, out, rows, inner, share, x_TD.stride(0), out.stride(1), out.stride(0),
        **tiles.launch(inner, share, x_TD.device),
    )  # fmt: skip
    return out


# ---- measured on an H200, at the shapes of models of 360 million, 1.7 and 8 billion parameters

PROCESSORS = 132


def _height(rows: int) -> int:
    return min(64, max(16, triton.next_power_of_2(rows)))


def _tiles_of_heads(rows: int, heads: int, least_lines: int, width: int) -> LinearTiles:
    lines, height = max(TILE, least_lines), _height(rows)
    if rows > 64:
        return LinearTiles(64, lines, 64, 1, 5, swapped=False)
    while height > 16 and 2 * heads * width // lines * triton.cdiv(rows, height) <= PROCESSORS:
        height //= 2
    return LinearTiles(height, lines, 64, 1, 8, swapped=True)


def _tiles_of_gated(rows: int, outputs: int) -> LinearTiles:
    programs = 2 * outputs // 128 * triton.cdiv(rows, 64)
    lines, stages = 128 if programs >= PROCESSORS - 4 else TILE, 4 if programs > PROCESSORS else 6  # two on a processor
    return LinearTiles(_height(rows), lines, 64, 1, stages, swapped=True)


def _tiles_of_joined(rows: int) -> LinearTiles:
    return LinearTiles(_height(rows), TILE, 64, 1, 6, swapped=True)


def _tiles_of_parts(rows: int, inner: int, outputs: int) -> LinearTiles:
    height, count = _height(rows), 1
    while count < 4 and 2 * count * outputs // TILE * triton.cdiv(rows, height) <= PROCESSORS:
        count *= 2
    while height > 16 and 2 * count * outputs // TILE * triton.cdiv(rows, height) <= PROCESSORS:
        height //= 2
    step = 128 if inner % (128 * count) == 0 else 64
    return LinearTiles(height, TILE, step, count, 8, swapped=True)


def _tiles_of_one_part(rows: int, inner: int, outputs: int) -> LinearTiles:
    height, lines = _height(rows), TILE
    while lines > 16 and outputs // lines * triton.cdiv(rows, height) < PROCESSORS - 4:
        lines //= 2
    step = next((size for size in (256, 128) if inner % size == 0), 64)
    return LinearTiles(height, lines, step, 1, 8, swapped=False)
