"""Kernels between the linear layers: RMSNorm, rotary positions with KV store, SiLU-and-multiply; dependent launches.

Every kernel rounds where the Hugging Face module rounds, so that also in half precision the numbers are the trainer's
but for the order of sums.

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


# ---- norms, rotary positions, gates


@triton.jit
def _add_norm(
    new, stream, weight, out, epsilon, part, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
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
        tl.store(stream + row * WIDTH + column, x, kept)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + epsilon)
    normed = (wide * scale).to(x.dtype).to(tl.float32) * gain
    tl.store(out + row * WIDTH + column, normed.to(x.dtype), kept)


def fused_add_rms_norm(new: Tensor | None, stream_TD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """Adds `new` (if any) to the residual stream in place; returns the stream's RMS norm. `new`: [T, D], or parts of
    its sum in fp32 [parts, T, D]."""
    width = stream_TD.shape[-1]
    out = torch.empty_like(stream_TD)
    parts = 0 if new is None else len(new) if new.ndim == 3 else 1
    _add_norm[stream_TD.shape[0],](
        stream_TD if new is None else new, stream_TD, weight_D, out, epsilon, stream_TD.numel(),
        WIDTH=width, COLUMNS=triton.next_power_of_2(width), PARTS=parts,
        num_warps=4 if width <= 2048 and parts <= 1 else 8, **overlapped(stream_TD.device),
    )  # fmt: skip
    return out


@triton.jit
def _rotated(x1, x2, cos1, sin1, cos2, sin2):
    kind = x1.dtype
    low = (x1.to(tl.float32) * cos1).to(kind).to(tl.float32) - (x2.to(tl.float32) * sin1).to(kind).to(tl.float32)
    high = (x2.to(tl.float32) * cos2).to(kind).to(tl.float32) + (x1.to(tl.float32) * sin2).to(kind).to(tl.float32)
    return low.to(kind), high.to(kind)


@triton.jit
def _head_normed(x1, x2, weight1, weight2, epsilon, WIDTH: tl.constexpr):
    wide1, wide2 = x1.to(tl.float32), x2.to(tl.float32)
    scale = tl.rsqrt((tl.sum(wide1 * wide1, 1) + tl.sum(wide2 * wide2, 1)) / WIDTH + epsilon)[:, None]
    low = (wide1 * scale).to(x1.dtype).to(tl.float32) * weight1[None, :]
    high = (wide2 * scale).to(x1.dtype).to(tl.float32) * weight2[None, :]
    return low.to(x1.dtype), high.to(x1.dtype)


@triton.jit
def _rotate_and_store(
    query, key, value, cos, sin, query_norm, key_norm, keys, values, slot_mapping, epsilon,
    query_row, key_row, value_row, page_stride, token_stride, head_stride,
    QUERIES: tl.constexpr, QUERY_ROWS: tl.constexpr, HEADS: tl.constexpr, HEAD_ROWS: tl.constexpr,
    HALF: tl.constexpr, COLUMNS: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    inside = column < HALF
    cos1 = tl.load(cos + row * 2 * HALF + column, inside, 0.0).to(tl.float32)[None, :]
    cos2 = tl.load(cos + row * 2 * HALF + HALF + column, inside, 0.0).to(tl.float32)[None, :]
    sin1 = tl.load(sin + row * 2 * HALF + column, inside, 0.0).to(tl.float32)[None, :]
    sin2 = tl.load(sin + row * 2 * HALF + HALF + column, inside, 0.0).to(tl.float32)[None, :]

    head = tl.arange(0, QUERY_ROWS)
    kept = (head < QUERIES)[:, None] & inside[None, :]
    place = query + row * query_row + head[:, None] * 2 * HALF + column[None, :]
    x1, x2 = tl.load(place, kept, 0.0), tl.load(place + HALF, kept, 0.0)
    if NORM:
        weight1 = tl.load(query_norm + column, inside, 0.0).to(tl.float32)
        weight2 = tl.load(query_norm + HALF + column, inside, 0.0).to(tl.float32)
        x1, x2 = _head_normed(x1, x2, weight1, weight2, epsilon, 2 * HALF)
    x1, x2 = _rotated(x1, x2, cos1, sin1, cos2, sin2)
    tl.store(place, x1, kept)
    tl.store(place + HALF, x2, kept)

    head = tl.arange(0, HEAD_ROWS)
    kept = (head < HEADS)[:, None] & inside[None, :]
    place = key + row * key_row + head[:, None] * 2 * HALF + column[None, :]
    x1, x2 = tl.load(place, kept, 0.0), tl.load(place + HALF, kept, 0.0)
    if NORM:
        weight1 = tl.load(key_norm + column, inside, 0.0).to(tl.float32)
        weight2 = tl.load(key_norm + HALF + column, inside, 0.0).to(tl.float32)
        x1, x2 = _head_normed(x1, x2, weight1, weight2, epsilon, 2 * HALF)
    x1, x2 = _rotated(x1, x2, cos1, sin1, cos2, sin2)
    tl.store(place, x1, kept)
    tl.store(place + HALF, x2, kept)
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
    tokens, queries, width = query_THD.shape
    heads = key_THD.shape[1]
    assert keys.stride() == values.stride() and keys.stride(3) == 1
    query_norm, key_norm, epsilon = head_norms or (cos_TD, cos_TD, 0.0)
    _rotate_and_store[tokens,](
        query_THD, key_THD, value_THD, cos_TD, sin_TD, query_norm, key_norm, keys, values, slot_mapping_T, epsilon,
        query_THD.stride(0), key_THD.stride(0), value_THD.stride(0), *keys.stride()[:3],
        QUERIES=queries, QUERY_ROWS=triton.next_power_of_2(queries), HEADS=heads,
        HEAD_ROWS=triton.next_power_of_2(heads), HALF=width // 2, COLUMNS=triton.next_power_of_2(width // 2),
        PAGE=keys.shape[1], NORM=head_norms is not None, num_warps=4,
    )  # fmt: skip


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
