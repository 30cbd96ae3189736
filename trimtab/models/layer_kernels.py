"""Triton kernels of Llama-like decoder layers, shared by trainer and engine, so that both compute the same bits.

The order of every sum is fixed, whatever the number of rows in a batch:
- products add up the inner dimension in one order, with one accumulator and one rounding;
- attention visits keys in blocks of BLOCK from the sequence's first token. A masked key changes nothing: its weight is
  exactly 0, and the factor of earlier sums exactly 1. The sum of weights is a product with ones, because the order
  inside a product does not depend on the tile, and that of a reduction does;
- other reductions have a tile and a number of warps that depend on the model's widths only.

Every kernel rounds where the Hugging Face module rounds, but for rotary positions.

With programmatic dependent launch (sm_90 and later) a kernel begins while the one before it still runs. It calls `wait`
before it touches what others write, in every program: a kernel that waits for it then also waits for everything that
this one has waited for.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trimtab.distributed.device import overlaps_launches

BLOCK = 64  # keys
LOWEST = -1.0e30  # finite, so that a sequence of masked keys gives no NaN
LOG2_E = 1.4426950408889634
LEAST_DOT = 16  # rows of the smallest matrix product


@triton.jit
def _nothing():
    pass


INTERPRETED = not isinstance(_nothing, triton.JITFunction)


@functools.cache
def shared_memory() -> int:
    """Bytes of shared memory that one program may use."""
    if INTERPRETED:
        return 2**30
    driver = triton.runtime.driver.active
    return driver.utils.get_device_properties(driver.get_current_device())["max_shared_mem"]


# ---- programmatic dependent launch


@triton.jit
def wait(OVERLAPPED: tl.constexpr):
    """Wait for the previous launch, and let the next one begin."""
    if OVERLAPPED:
        gdc_wait()
        gdc_launch_dependents()


def overlapped(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that calls `wait`."""
    return {"OVERLAPPED": True, "launch_pdl": True} if overlaps_launches(device) else {"OVERLAPPED": False}


# ---- norms


def warps_of_norm(width: int) -> int:
    return 4 if width <= 2048 else 8


@triton.jit
def _add_norm(
    new, stream, after, weight, out, epsilon, part,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    kept = column < WIDTH
    gain = tl.load(weight + column, kept, 0.0).to(tl.float32)
    wait(OVERLAPPED)
    x = tl.load(stream + row * WIDTH + column, kept, 0.0)
    if PARTS > 0:
        added = tl.load(new + row * WIDTH + column, kept, 0.0).to(tl.float32)
        for i in tl.static_range(1, PARTS):
            added += tl.load(new + i * part + row * WIDTH + column, kept, 0.0)
        x = (x.to(tl.float32) + added.to(x.dtype).to(tl.float32)).to(x.dtype)
        tl.store(after + row * WIDTH + column, x, kept)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + epsilon)
    normed = (wide * scale).to(x.dtype).to(tl.float32) * gain
    tl.store(out + row * WIDTH + column, normed.to(x.dtype), kept)


def fused_add_rms_norm(new: Tensor | None, stream_TD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """Adds `new` (if any) to the residual stream in place; returns the stream's RMS norm. `new`: [T, D], or parts of
    its sum in fp32 [parts, T, D]."""
    return _add_rms_norm(new, stream_TD, stream_TD, weight_D, epsilon)


def add_rms_norm(new_TD: Tensor | None, stream_TD: Tensor, weight_D: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The same with a new stream; returns both."""
    after = stream_TD if new_TD is None else torch.empty_like(stream_TD)
    return after, _add_rms_norm(new_TD, stream_TD, after, weight_D, epsilon)


def _add_rms_norm(new: Tensor | None, stream_TD: Tensor, after_TD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    width = stream_TD.shape[-1]
    out = torch.empty_like(stream_TD)
    parts = 0 if new is None else len(new) if new.ndim == 3 else 1
    _add_norm[stream_TD.shape[0],](
        stream_TD if new is None else new, stream_TD, after_TD, weight_D, out, epsilon, stream_TD.numel(),
        WIDTH=width, COLUMNS=triton.next_power_of_2(width), PARTS=parts,
        num_warps=warps_of_norm(width), **overlapped(stream_TD.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _norm_backward(
    grad, more, stream, weight, grad_stream, grad_weight, epsilon, rows,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, MORE: tl.constexpr, LEARNS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)
    kept = column < WIDTH
    gain = tl.load(weight + column, kept, 0.0).to(tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        place = tl.cast(row, tl.int64) * WIDTH + column
        x = tl.load(stream + place, kept, 0.0).to(tl.float32)
        g = tl.load(grad + place, kept, 0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon)
        x *= scale
        if LEARNS:
            total += g * x.to(stream.dtype.element_ty).to(tl.float32)
        g *= gain
        back = scale * (g - x * (tl.sum(g * x, 0) / WIDTH))
        if MORE:
            back += tl.load(more + place, kept, 0.0).to(tl.float32)
        tl.store(grad_stream + place, back.to(grad_stream.dtype.element_ty), kept)
    if LEARNS:
        tl.store(grad_weight + tl.program_id(0) * WIDTH + column, total, kept)


def norm_backward(
    grad_TD: Tensor, more_TD: Tensor | None, stream_TD: Tensor, weight_D: Tensor, epsilon: float, *, learns: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the stream (with `more_TD` added) and of the weight."""
    rows, width = stream_TD.shape
    programs = min(rows, 1056)  # eight for each processor of an H200
    back = torch.empty_like(stream_TD)
    sums = torch.empty(programs, width, dtype=torch.float32, device=back.device) if learns else back
    _norm_backward[programs,](
        grad_TD, grad_TD if more_TD is None else more_TD, stream_TD, weight_D, back, sums, epsilon, rows,
        WIDTH=width, COLUMNS=triton.next_power_of_2(width), MORE=more_TD is not None, LEARNS=learns,
        num_warps=warps_of_norm(width),
    )  # fmt: skip
    return back, sums.sum(0).to(weight_D.dtype) if learns else None


# ---- rotary positions


@triton.jit
def rotated(x1, x2, cos1, sin1, cos2, sin2):
    """In fp32, where products of half-precision numbers are exact: so it does not matter which of them the compiler
    joins with the sum. (The Hugging Face modules round the products, too.)"""
    return x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2


@triton.jit
def _head_normed(x1, x2, weight1, weight2, epsilon, WIDTH: tl.constexpr):
    wide1, wide2 = x1.to(tl.float32), x2.to(tl.float32)
    scale = tl.rsqrt((tl.sum(wide1 * wide1, 1) + tl.sum(wide2 * wide2, 1)) / WIDTH + epsilon)[:, None]
    low = (wide1 * scale).to(x1.dtype).to(tl.float32) * weight1[None, :]
    high = (wide2 * scale).to(x1.dtype).to(tl.float32) * weight2[None, :]
    return low.to(x1.dtype), high.to(x1.dtype)


@triton.jit
def _turn_heads(
    given, turned, norm, column, angles, epsilon,
    HEADS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Norm (if the model has it), rotate and store the heads of one token; returns both halves."""
    head, inside = tl.arange(0, ROWS), column < HALF
    kept = (head < HEADS)[:, None] & inside[None, :]
    place = head[:, None] * 2 * HALF + column[None, :]
    x1, x2 = tl.load(given + place, kept, 0.0), tl.load(given + place + HALF, kept, 0.0)
    if NORM:
        weight1 = tl.load(norm + column, inside, 0.0).to(tl.float32)
        weight2 = tl.load(norm + HALF + column, inside, 0.0).to(tl.float32)
        x1, x2 = _head_normed(x1, x2, weight1, weight2, epsilon, 2 * HALF)
    cos1, sin1, cos2, sin2 = angles
    x1, x2 = rotated(x1.to(tl.float32), x2.to(tl.float32), cos1, sin1, cos2, sin2)
    tl.store(turned + place, x1, kept)
    tl.store(turned + place + HALF, x2, kept)
    return x1, x2


@triton.jit
def _rotate_and_store(
    query, key, value, turned_query, turned_key, cos, sin, query_norm, key_norm, keys, values, slot_mapping, epsilon,
    query_row, key_row, value_row, turned_query_row, turned_key_row, page_stride, token_stride, head_stride,
    QUERIES: tl.constexpr, QUERY_ROWS: tl.constexpr, HEADS: tl.constexpr, HEAD_ROWS: tl.constexpr,
    HALF: tl.constexpr, COLUMNS: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr,
    STORED: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    inside = column < HALF
    cos1 = tl.load(cos + row * 2 * HALF + column, inside, 0.0).to(tl.float32)[None, :]
    cos2 = tl.load(cos + row * 2 * HALF + HALF + column, inside, 0.0).to(tl.float32)[None, :]
    sin1 = tl.load(sin + row * 2 * HALF + column, inside, 0.0).to(tl.float32)[None, :]
    sin2 = tl.load(sin + row * 2 * HALF + HALF + column, inside, 0.0).to(tl.float32)[None, :]

    angles = cos1, sin1, cos2, sin2
    place, turned = query + row * query_row, turned_query + row * turned_query_row
    _turn_heads(place, turned, query_norm, column, angles, epsilon, QUERIES, QUERY_ROWS, HALF, NORM)
    place, turned = key + row * key_row, turned_key + row * turned_key_row
    x1, x2 = _turn_heads(place, turned, key_norm, column, angles, epsilon, HEADS, HEAD_ROWS, HALF, NORM)
    if STORED:
        head = tl.arange(0, HEAD_ROWS)
        kept = (head < HEADS)[:, None] & inside[None, :]
        token = tl.load(slot_mapping + row)
        target = (token // PAGE) * page_stride + (token % PAGE) * token_stride + head[:, None] * head_stride
        target = target + column[None, :]
        tl.store(keys + target, x1, kept)
        tl.store(keys + target + HALF, x2, kept)
        place = value + row * value_row + head[:, None] * 2 * HALF + column[None, :]
        tl.store(values + target, tl.load(place, kept, 0.0), kept)
        tl.store(values + target + HALF, tl.load(place + HALF, kept, 0.0), kept)


def rope_and_cache(
    query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor,
    keys: Tensor, values: Tensor, slot_mapping_T: Tensor, head_norms: tuple[Tensor, Tensor, float] | None = None,
) -> None:  # fmt: skip
    """Rotary positions in place (after head norms, if the model has them); stores keys and values in one layer's KV
    cache."""
    assert keys.stride() == values.stride() and keys.stride(3) == 1
    given = query_THD, key_THD, value_THD, query_THD, key_THD, cos_TD, sin_TD
    _rotate(*given, keys, values, slot_mapping_T, head_norms, stored=True)


def rotate(
    query_TX: Tensor, key_TX: Tensor, cos_TD: Tensor, sin_TD: Tensor, head_norms: tuple[Tensor, Tensor, float] | None
) -> tuple[Tensor, Tensor]:
    """The same for training: new tensors [T, heads, D], and nothing is stored."""
    query, key = (x.unflatten(1, (-1, cos_TD.shape[1])) for x in (query_TX, key_TX))
    made = torch.empty_like(query), torch.empty_like(key)
    _rotate(query, key, key, *made, cos_TD, sin_TD, key[None], key, cos_TD, head_norms, stored=False)
    return made


def _rotate(
    query: Tensor, key: Tensor, value: Tensor, turned_query: Tensor, turned_key: Tensor, cos: Tensor, sin: Tensor,
    keys: Tensor, values: Tensor, slot_mapping: Tensor, head_norms: tuple[Tensor, Tensor, float] | None,
    *, stored: bool,
) -> None:  # fmt: skip
    tokens, queries, width = query.shape
    heads = key.shape[1]
    query_norm, key_norm, epsilon = head_norms or (cos, cos, 0.0)
    _rotate_and_store[tokens,](
        query, key, value, turned_query, turned_key, cos, sin, query_norm, key_norm, keys, values, slot_mapping,
        epsilon, *(x.stride(0) for x in (query, key, value, turned_query, turned_key)), *keys.stride()[:3],
        QUERIES=queries, QUERY_ROWS=triton.next_power_of_2(queries), HEADS=heads,
        HEAD_ROWS=triton.next_power_of_2(heads), HALF=width // 2, COLUMNS=triton.next_power_of_2(width // 2),
        PAGE=keys.shape[1] if stored else 1, NORM=head_norms is not None, STORED=stored, num_warps=4,
    )  # fmt: skip


@triton.jit
def _turned_back(x1, x2, cos1, sin1, cos2, sin2):
    return x1 * cos1 + x2 * sin2, x2 * cos2 - x1 * sin1


@triton.jit(do_not_specialize=["rows"])
def _rotate_backward(
    grad, before, cos, sin, norm, out, grad_norm, epsilon, rows,
    grad_row, grad_head, before_row,
    HEADS: tl.constexpr, HEAD_ROWS: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr,
    NORM: tl.constexpr, LEARNS: tl.constexpr,
):  # fmt: skip
    head, column = tl.arange(0, HEAD_ROWS), tl.arange(0, COLUMNS)
    inside = column < HALF
    kept = (head < HEADS)[:, None] & inside[None, :]
    own = head[:, None] * 2 * HALF + column[None, :]
    kind = out.dtype.element_ty
    if NORM:
        gain1 = tl.load(norm + column, inside, 0.0).to(tl.float32)[None, :]
        gain2 = tl.load(norm + HALF + column, inside, 0.0).to(tl.float32)[None, :]
        total1, total2 = tl.zeros([COLUMNS], tl.float32), tl.zeros([COLUMNS], tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        wide = tl.cast(row, tl.int64)
        angle = wide * 2 * HALF + column
        cos1 = tl.load(cos + angle, inside, 0.0).to(tl.float32)[None, :]
        cos2 = tl.load(cos + angle + HALF, inside, 0.0).to(tl.float32)[None, :]
        sin1 = tl.load(sin + angle, inside, 0.0).to(tl.float32)[None, :]
        sin2 = tl.load(sin + angle + HALF, inside, 0.0).to(tl.float32)[None, :]
        place = grad + wide * grad_row + head[:, None] * grad_head + column[None, :]
        g1, g2 = tl.load(place, kept, 0.0).to(tl.float32), tl.load(place + HALF, kept, 0.0).to(tl.float32)
        g1, g2 = _turned_back(g1, g2, cos1, sin1, cos2, sin2)
        if NORM:
            x1 = tl.load(before + wide * before_row + own, kept, 0.0).to(tl.float32)
            x2 = tl.load(before + wide * before_row + own + HALF, kept, 0.0).to(tl.float32)
            scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / (2 * HALF) + epsilon)[:, None]
            x1, x2 = x1 * scale, x2 * scale
            if LEARNS:
                total1 += tl.sum(g1 * x1.to(kind).to(tl.float32), 0)
                total2 += tl.sum(g2 * x2.to(kind).to(tl.float32), 0)
            g1, g2 = g1 * gain1, g2 * gain2
            mean = ((tl.sum(g1 * x1, 1) + tl.sum(g2 * x2, 1)) / (2 * HALF))[:, None]
            g1, g2 = scale * (g1 - x1 * mean), scale * (g2 - x2 * mean)
        target = out + wide * HEADS * 2 * HALF + own
        tl.store(target, g1.to(kind), kept)
        tl.store(target + HALF, g2.to(kind), kept)
    if NORM and LEARNS:
        place = grad_norm + tl.program_id(0) * 2 * HALF + column
        tl.store(place, total1, inside)
        tl.store(place + HALF, total2, inside)


def rotate_backward(
    grad_THW: Tensor,
    before_TX: Tensor,
    cos_TW: Tensor,
    sin_TW: Tensor,
    norm: tuple[Tensor, float] | None,
    learns: bool,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the projection [T, heads * W] and of its head norm's weight."""
    rows, heads, width = grad_THW.shape
    assert grad_THW.stride(2) == 1
    programs = min(rows, 16_896)
    out = torch.empty(rows, heads * width, dtype=grad_THW.dtype, device=grad_THW.device)
    sums = torch.empty(programs, width, dtype=torch.float32, device=out.device) if learns else out
    _rotate_backward[programs,](
        grad_THW, before_TX, cos_TW, sin_TW, out if norm is None else norm[0], out, sums,
        0.0 if norm is None else norm[1], rows, grad_THW.stride(0), grad_THW.stride(1), before_TX.stride(0),
        HEADS=heads, HEAD_ROWS=triton.next_power_of_2(heads), HALF=width // 2,
        COLUMNS=triton.next_power_of_2(width // 2), NORM=norm is not None, LEARNS=learns, num_warps=4,
    )  # fmt: skip
    return out, sums.sum(0) if learns else None


# ---- gates


@triton.jit
def _gate(gate, up, out, gate_row, up_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = column < WIDTH
    g = tl.load(gate + row * gate_row + column, kept, 0.0)
    u = tl.load(up + row * up_row + column, kept, 0.0)
    wide = g.to(tl.float32)
    opened = (wide * tl.sigmoid(wide)).to(g.dtype).to(tl.float32)
    tl.store(out + row * WIDTH + column, (opened * u.to(tl.float32)).to(g.dtype), kept)


def gated(gate_TD: Tensor, up_TD: Tensor) -> Tensor:
    """silu(gate) * up."""
    tokens, width = gate_TD.shape
    out = torch.empty(tokens, width, dtype=gate_TD.dtype, device=gate_TD.device)
    _gate[tokens, triton.cdiv(width, 1024)](
        gate_TD, up_TD, out, gate_TD.stride(0), up_TD.stride(0), WIDTH=width, BLOCK=1024, num_warps=4
    )
    return out


@triton.jit
def _gate_backward(grad, gate, up, grad_gate, grad_up, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept, place = column < WIDTH, row * WIDTH + column
    d = tl.load(grad + place, kept, 0.0).to(tl.float32)
    g = tl.load(gate + place, kept, 0.0).to(tl.float32)
    u = tl.load(up + place, kept, 0.0).to(tl.float32)
    kind = grad_gate.dtype.element_ty
    share = tl.sigmoid(g)
    tl.store(grad_up + place, (d * (g * share).to(kind).to(tl.float32)).to(kind), kept)
    tl.store(grad_gate + place, (d * u * share * (1 + g * (1 - share))).to(kind), kept)


def gate_backward(grad_TD: Tensor, gate_TD: Tensor, up_TD: Tensor) -> tuple[Tensor, Tensor]:
    tokens, width = gate_TD.shape
    grad_gate, grad_up = torch.empty_like(gate_TD), torch.empty_like(up_TD)
    _gate_backward[tokens, triton.cdiv(width, 1024)](
        grad_TD, gate_TD, up_TD, grad_gate, grad_up, WIDTH=width, BLOCK=1024, num_warps=4
    )
    return grad_gate, grad_up


# ---- attention


@triton.jit
def attend_block(
    q, k, v, seen, scale, softcap, peak, total, mixed,
    BLOCK: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The running softmax after one more block of keys. `scale` and `softcap` include log2(e)."""
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if CAPPED:
        score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)
    score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, 1))
    fade = tl.exp2(peak - higher)
    weight = tl.exp2(score - higher[:, None]).to(v.dtype)
    ones = tl.full([BLOCK, 16], 1.0, v.dtype)
    total = total * fade + tl.max(tl.dot(weight, ones, input_precision=PRECISION), 1)
    mixed = tl.dot(weight, v, mixed * fade[:, None], input_precision=PRECISION)
    return higher, total, mixed


@triton.jit(do_not_specialize=["tokens"])
def _attend(
    query, key, value, out, log_sums, query_starts, key_starts, scale, window, tokens,
    query_row, query_head, key_row, key_head, value_row, value_head,
    GROUP: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, WINDOWED: tl.constexpr, LOWEST: tl.constexpr, LEARNS: tl.constexpr,
):  # fmt: skip
    # The last queries of a sequence have the most keys, so they begin first.
    tile, head, sequence = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, first = tl.load(query_starts + sequence), tile * ROWS
    queries = tl.load(query_starts + sequence + 1) - begin
    if first < queries:
        key_begin = tl.load(key_starts + sequence)
        keys = tl.load(key_starts + sequence + 1) - key_begin
        row, column = first + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
        inside = (column < WIDTH)[None, :]
        live = (row < queries)[:, None]
        place = (begin + row).to(tl.int64)
        q = tl.load(query + place[:, None] * query_row + head * query_head + column[None, :], live & inside, 0.0)
        position = keys - queries + row
        peak = tl.full([ROWS], LOWEST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, COLUMNS], tl.float32)
        key += head // GROUP * key_head
        value += head // GROUP * value_head
        end = tl.minimum(keys, keys - queries + first + ROWS)
        start = 0
        if WINDOWED:
            start = tl.maximum(keys - queries + first - window + 1, 0) // BLOCK * BLOCK
        for at in range(start, end, BLOCK):
            token = at + tl.arange(0, BLOCK)
            there = (key_begin + token).to(tl.int64)[:, None]
            known = (token < keys)[:, None] & inside
            k = tl.load(key + there * key_row + column[None, :], known, 0.0)
            v = tl.load(value + there * value_row + column[None, :], known, 0.0)
            seen = token[None, :] <= position[:, None]
            if WINDOWED:
                seen = seen & (token[None, :] > position[:, None] - window)
            peak, total, mixed = attend_block(q, k, v, seen, scale, 0.0, peak, total, mixed, BLOCK, False, "tf32")
        target = out + (place[:, None] * HEADS + head) * WIDTH + column[None, :]
        tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), live & inside)
        if LEARNS:
            sums = (peak + tl.log2(total)) * 0.6931471805599453
            tl.store(log_sums + head.to(tl.int64) * tokens + begin + row, sums, row < queries)


def attend_rows(
    query_THD: Tensor, key_KHD: Tensor, value_KHD: Tensor, query_starts: Tensor, key_starts: Tensor,
    longest: int, scale: float, window: int | None, *, learns: bool, rows: int = 64, warps: int = 4, stages: int = 2,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal attention of concatenated sequences, whose queries are the last of their keys, and the log-sum-exp of
    every query [heads, T] in the layout of torch's flash attention."""
    tokens, heads, width = query_THD.shape
    assert query_THD.stride(2) == key_KHD.stride(2) == value_KHD.stride(2) == 1
    out = torch.empty(tokens, heads, width, dtype=query_THD.dtype, device=query_THD.device)
    sums = torch.empty(heads, tokens, dtype=torch.float32, device=out.device) if learns else out
    _attend[triton.cdiv(min(longest, tokens), rows), heads, len(query_starts) - 1](
        query_THD, key_KHD, value_KHD, out, sums, query_starts, key_starts, scale * LOG2_E, window or 0, tokens,
        *query_THD.stride()[:2], *key_KHD.stride()[:2], *value_KHD.stride()[:2],
        GROUP=heads // key_KHD.shape[1], HEADS=heads, WIDTH=width,
        COLUMNS=max(LEAST_DOT, triton.next_power_of_2(width)), ROWS=rows, BLOCK=BLOCK, WINDOWED=window is not None,
        LOWEST=LOWEST, LEARNS=learns, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, sums


# ---- products


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, bias, out, rows, inner, outputs, x_row, BIASED: tl.constexpr, ONTO: tl.constexpr, WHOLE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    left = x + m.to(tl.int64)[:, None] * x_row + k[None, :]
    right = weight + n.to(tl.int64)[:, None] * inner + k[None, :]
    live, known = (m < rows)[:, None], n < outputs
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, inner, BK):
        inside = (k + start < inner)[None, :]
        a = tl.load(left + start, live & inside, 0.0)
        b = tl.load(right + start, inside if WHOLE else known[:, None] & inside, 0.0)
        total = tl.dot(a, tl.trans(b), total)
    if BIASED:
        total += tl.load(bias + n, known, 0.0)[None, :].to(tl.float32)
    place, kept = out + m.to(tl.int64)[:, None] * outputs + n[None, :], live & known[None, :]
    if ONTO:  # rounded first, as by a product and a sum
        total = total.to(out.dtype.element_ty).to(tl.float32) + tl.load(place, kept, 0.0).to(tl.float32)
    tl.store(place, total.to(out.dtype.element_ty), kept)


def product(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype, *, onto: Tensor | None = None
) -> Tensor:
    """x W^T + b in one order of sums, for any number of rows; added to `onto`, if given."""
    rows, inner = x_TI.shape
    outputs = len(weight_OI)
    assert x_TI.stride(1) == 1 and weight_OI.is_contiguous() and (onto is None or onto.is_contiguous())
    out = torch.empty(rows, outputs, dtype=dtype, device=x_TI.device) if onto is None else onto
    if outputs <= 64 and rows > 64:
        height, width, step, warps, stages = 64, max(LEAST_DOT, triton.next_power_of_2(outputs)), 128, 4, 4
    elif rows <= 64:
        height, width, step, warps, stages = min(64, max(16, triton.next_power_of_2(rows))), 32, 128, 4, 4
    elif triton.cdiv(rows, 64) * triton.cdiv(outputs, 64) <= 132:  # processors of an H200
        height, width, step, warps, stages = 64, 64, 128, 4, 4
    elif triton.cdiv(rows, 64) * triton.cdiv(outputs, 128) <= 132:
        height, width, step, warps, stages = 64, 128, 64, 4, 6
    else:
        height, width, step, warps, stages = 128, 128, 64, 8, 3
    step = min(step, max(LEAST_DOT, triton.next_power_of_2(inner)))
    _product[triton.cdiv(rows, height), triton.cdiv(outputs, width)](
        x_TI, weight_OI, weight_OI if bias_O is None else bias_O, out, rows, inner, outputs, x_TI.stride(0),
        BIASED=bias_O is not None, ONTO=onto is not None, WHOLE=outputs % width == 0, BM=height, BN=width, BK=step,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
