"""Paged attention: one new token of each sequence against its pages of the KV cache.

A program takes one KV head of one sequence with all query heads that share it, and loops over the pages inside the
window with an online softmax. Few long sequences are split so that the device is full; a second kernel combines the
parts. In the trainer's fused layers the sum has one order, so exact sampling needs one part (`splits`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimtab.models.layer_kernels import BLOCK, LEAST_DOT, LOG2_E, LOWEST, attend_block, overlapped, wait

PROGRAMS_TO_FILL_A_DEVICE = 512


@triton.jit
def _of_values(place, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr):
    """Where the values of a head lie, from where its keys do."""
    if WIDTH != VALUE_WIDTH:
        place = place // WIDTH * VALUE_WIDTH
    return place


@triton.jit(do_not_specialize=["table_row"])
def _decode(
    query, keys, values, tables, lengths, sinks, out, peaks, sums,
    query_row, query_head, page_stride, token_stride, head_stride, table_row, out_row, out_head,
    scale, softcap, window,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, VALUE_COLUMNS: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, CHUNKED: tl.constexpr,
    SINKS: tl.constexpr, PRECISION: tl.constexpr, OVERLAPPED: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    # KV heads are neighbours in the launch order: they read the same pages at the same time.
    head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    first = 0
    if WINDOWED:
        first = tl.maximum(length - window, 0)
        if CHUNKED:
            first = (length - 1) // window * window
    begin, last = first // BLOCK, (length + BLOCK - 1) // BLOCK
    share = (last - begin + SPLITS - 1) // SPLITS
    begin += split * share
    end = tl.minimum(last, begin + share)

    member, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (column < WIDTH)[None, :]
    value_column = tl.arange(0, VALUE_COLUMNS)
    value_inside = (value_column < VALUE_WIDTH)[None, :]
    table = tables + row.to(tl.int64) * table_row
    token = begin * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(table + tl.minimum(token, length - 1) // PAGE).to(tl.int64)
    wait(OVERLAPPED)
    heads = head * GROUP + member
    kept = (member < GROUP)[:, None] & inside
    q = tl.load(query + row.to(tl.int64) * query_row + heads[:, None] * query_head + column[None, :], kept, 0.0)
    peak = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:  # one more key, with the value 0, in the first part
        sink = tl.load(sinks + heads, member < GROUP, 0.0).to(tl.float32) * 1.4426950408889634
        peak = tl.where(split == 0, sink, peak)
        total = tl.where(split == 0, total + 1.0, total)
    mixed = tl.zeros([ROWS, VALUE_COLUMNS], tl.float32)
    for block in range(begin, end):
        token = block * BLOCK + tl.arange(0, BLOCK)
        live = token < length
        place = page * page_stride + (token % PAGE) * token_stride + head * head_stride
        page = tl.load(table + tl.minimum(token + BLOCK, length - 1) // PAGE).to(tl.int64)  # the next block's
        k = tl.load(keys + place[:, None] + column[None, :], live[:, None] & inside, 0.0)
        value_place = _of_values(place, WIDTH, VALUE_WIDTH)
        v = tl.load(values + value_place[:, None] + value_column[None, :], live[:, None] & value_inside, 0.0)
        seen = live
        if WINDOWED:
            seen = seen & (token >= first)
        peak, total, mixed = attend_block(
            q, k, v, seen[None, :], scale, softcap, peak, total, mixed, BLOCK, CAPPED, PRECISION
        )
    target = row.to(tl.int64) * out_row + heads[:, None] * out_head + split * VALUE_WIDTH + value_column[None, :]
    if SPLITS == 1:
        mixed = mixed / total[:, None]
    else:
        part = (row * tl.num_programs(0) * GROUP + heads) * SPLITS + split
        tl.store(peaks + part, peak, member < GROUP)
        tl.store(sums + part, total, member < GROUP)
    tl.store(out + target, mixed.to(out.dtype.element_ty), (member < GROUP)[:, None] & value_inside)


@triton.jit
def _together(parts, peaks, sums, out, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    split, column = tl.arange(0, SPLITS), tl.arange(0, COLUMNS)
    kept = (column < WIDTH)[None, :]
    peak = tl.load(peaks + place * SPLITS + split)
    weight = tl.exp2(peak - tl.max(peak, 0))
    total = tl.sum(weight * tl.load(sums + place * SPLITS + split), 0)
    mixed = tl.load(parts + (place * SPLITS + split[:, None]) * WIDTH + column[None, :], kept, 0.0)
    mixed = tl.sum(mixed * weight[:, None], 0) / total
    tl.store(out + place * WIDTH + column, mixed.to(out.dtype.element_ty), column < WIDTH)


def paged_attention(
    query_BHD: Tensor,
    keys: Tensor,
    values: Tensor,
    tables_BP: Tensor,
    lengths_B: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    sinks: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """`keys`, `values`: one layer's [pages, tokens a page, heads, width], whose widths may differ; `lengths_B`: of the
    sequences, 1 or more; `chunk`: instead of a window; `sinks`: a score for each query head."""
    rows, heads, width = query_BHD.shape
    kv_heads, page, value_width = keys.shape[2], keys.shape[1], values.shape[3]
    assert query_BHD.stride(2) == keys.stride(3) == values.stride(3) == 1
    assert [n * value_width for n in keys.stride()[:3]] == [n * width for n in values.stride()[:3]]
    half = query_BHD.dtype != torch.float32
    if splits is None:
        splits = _splits(rows * kv_heads)
    out = torch.empty(rows, heads, value_width, dtype=query_BHD.dtype, device=query_BHD.device)
    parts, peaks, sums = out, out, out
    if splits > 1:
        parts = torch.empty(rows, heads, splits * value_width, dtype=torch.float32, device=out.device)
        peaks, sums = torch.empty(2, rows, heads, splits, dtype=torch.float32, device=out.device)
    group = heads // kv_heads
    columns, value_columns = (max(LEAST_DOT, triton.next_power_of_2(n)) for n in (width, value_width))
    # In half precision the blocks of the trainer's attention; never more than 16 KiB of keys, or of values, at once.
    block = BLOCK if half else min(BLOCK, 2**14 // (max(columns, value_columns) * keys.element_size()))
    _decode[kv_heads, rows, splits](
        query_BHD, keys, values, tables_BP, lengths_B, query_BHD if sinks is None else sinks, parts, peaks, sums,
        query_BHD.stride(0), query_BHD.stride(1), keys.stride(0), keys.stride(1), keys.stride(2), tables_BP.stride(0),
        parts.stride(0), parts.stride(1), scale * LOG2_E, (softcap or 0.0) * LOG2_E, chunk or window or 0,
        GROUP=group, ROWS=max(LEAST_DOT, triton.next_power_of_2(group)), WIDTH=width,
        COLUMNS=columns, VALUE_WIDTH=value_width, VALUE_COLUMNS=value_columns, PAGE=page, BLOCK=block, SPLITS=splits,
        CAPPED=softcap is not None, WINDOWED=(chunk or window) is not None, CHUNKED=chunk is not None,
        SINKS=sinks is not None,
        PRECISION="tf32" if half else "ieee", LOWEST=LOWEST,
        num_warps=2, num_stages=3 if columns <= 64 else 2, **overlapped(query_BHD.device),
    )  # fmt: skip
    if splits > 1:
        _together[rows * heads,](parts, peaks, sums, out, WIDTH=value_width, COLUMNS=value_columns, SPLITS=splits)
    return out


def _splits(programs: int) -> int:
    splits = 1
    while splits < 16 and programs * splits * 2 <= PROGRAMS_TO_FILL_A_DEVICE:
        splits *= 2
    return splits
