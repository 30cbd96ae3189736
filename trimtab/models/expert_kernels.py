"""Triton kernels of mixtures of experts, shared by trainer and engine: routing, and products of each expert's tokens.

A token's result does not depend on the other tokens: every sum over a product's inner dimension has one order (as in
layer_kernels.py), and the outputs of a token's experts are added in the order of their weights, in fp32.

A *slot* is one of the K experts of one token: slot t * K + j is the j-th expert of token t. Slots are sorted by expert
(`order_S`), so that the tokens of an expert are consecutive rows, the e-th expert's from starts_E[e] on. Which row a
slot gets changes nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimtab.models.layer_kernels import LEAST_DOT


@triton.jit
def _route(
    logits, weights, experts,
    EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, NORM: tl.constexpr,
    GIVEN: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    x = tl.load(logits + row * EXPERTS + column, column < EXPERTS, float("-inf")).to(tl.float32)
    x = tl.exp(x - tl.max(x, 0))
    left = x / tl.sum(x, 0)
    slot = tl.arange(0, SLOTS)
    chosen, share = tl.zeros_like(slot), tl.zeros_like(slot).to(tl.float32)
    total = 0.0
    for j in tl.static_range(K):
        if GIVEN:
            expert = tl.load(experts + row * K + j)
            best = tl.max(tl.where(column == expert, left, -1.0), 0)
        else:
            best = tl.max(left, 0)
            expert = tl.min(tl.where(left == best, column, COLUMNS), 0)
        chosen = tl.where(slot == j, expert, chosen)
        share = tl.where(slot == j, best, share)
        total += best
        left = tl.where(column == expert, -1.0, left)
    if NORM:
        share = share / total
    tl.store(weights + row * K + slot, share.to(weights.dtype.element_ty), slot < K)
    tl.store(experts + row * K + slot, chosen, slot < K)


def route(
    logits_TE: Tensor, k: int, normed: bool, dtype: torch.dtype, given_TK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weights [T, K] and numbers [T, K] of the K most likely experts, or of those that are given; `normed`: weights sum
    to 1."""
    tokens, experts = logits_TE.shape
    weights = torch.empty(tokens, k, dtype=dtype, device=logits_TE.device)
    chosen = torch.empty_like(weights, dtype=torch.int32) if given_TK is None else given_TK.int().contiguous()
    _route[tokens,](
        logits_TE.contiguous(), weights, chosen,
        EXPERTS=experts, COLUMNS=triton.next_power_of_2(experts), K=k,
        SLOTS=max(2, triton.next_power_of_2(k)), NORM=normed, GIVEN=given_TK is not None,
        num_warps=1,
    )  # fmt: skip
    return weights, chosen


@triton.jit(do_not_specialize=["slots"])
def _sort(chosen, order, starts, slots, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    place = 0
    for at in range(0, slots, BLOCK):  # how many have experts before this one
        slot = at + tl.arange(0, BLOCK)
        place += tl.sum((tl.load(chosen + slot, slot < slots, 2**30) < expert).to(tl.int32), 0)
    tl.store(starts + expert, place)
    for at in range(0, slots, BLOCK):
        slot = at + tl.arange(0, BLOCK)
        own = tl.load(chosen + slot, slot < slots, 2**30) == expert
        count = tl.cumsum(own.to(tl.int32), 0)
        tl.store(order + place + count - 1, slot, own)
        place += tl.max(count, 0)


def sort_slots(chosen_TK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(slots in the order of their experts [S], first row of each expert and the end [E + 1])"""
    slots = chosen_TK.numel()
    order = torch.empty(slots, dtype=torch.int32, device=chosen_TK.device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=chosen_TK.device)
    _sort[experts + 1,](chosen_TK, order, starts, slots, BLOCK=1024, num_warps=4)
    return order, starts


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _grouped_product(
    x, weight, out, order, starts, inner, x_row,
    EXPERTS: tl.constexpr, EXPERT_ROWS: tl.constexpr, OUTPUTS: tl.constexpr, K: tl.constexpr,
    GATHERED: tl.constexpr, SCATTERED: tl.constexpr, GATED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    e = tl.arange(0, EXPERT_ROWS)
    begin = tl.load(starts + e, e < EXPERTS, 0)
    tiles = (tl.load(starts + e + 1, e < EXPERTS, 0) - begin + BM - 1) // BM
    last = tl.cumsum(tiles, 0)
    expert = tl.sum(tl.where((last <= tile) & (e < EXPERTS), 1, 0), 0)
    if expert < EXPERTS:
        own = e == expert
        first = tl.sum(tl.where(own, begin, 0), 0) + (tile - tl.sum(tl.where(own, last - tiles, 0), 0)) * BM
        end = tl.load(starts + expert + 1)
        m = first + tl.arange(0, BM)
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        live, there = m < end, n < OUTPUTS
        slot = m.to(tl.int64)
        if GATHERED or SCATTERED:
            slot = tl.load(order + m, live, 0).to(tl.int64)
        source = slot // K if GATHERED else m.to(tl.int64)
        left = x + source[:, None] * x_row + k[None, :]
        height = 2 * OUTPUTS if GATED else OUTPUTS
        right = weight + (expert.to(tl.int64) * height + n)[:, None] * inner + k[None, :]
        total = tl.zeros([BM, BN], tl.float32)
        other = tl.zeros([BM, BN], tl.float32)
        for start in range(0, inner, BK):
            inside = (k + start < inner)[None, :]
            a = tl.load(left + start, live[:, None] & inside, 0.0)
            b = tl.load(right + start, there[:, None] & inside, 0.0)
            total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
            if GATED:
                b = tl.load(right + OUTPUTS * inner + start, there[:, None] & inside, 0.0)
                other = tl.dot(a, tl.trans(b), other, input_precision=PRECISION)
        kind = out.dtype.element_ty
        if GATED:  # rounded as by the gate's kernel
            opened = _silu(total.to(kind).to(tl.float32)).to(kind).to(tl.float32)
            total = opened * other.to(kind).to(tl.float32)
        target = slot if SCATTERED else m.to(tl.int64)
        tl.store(out + target[:, None] * OUTPUTS + n[None, :], total.to(kind), live[:, None] & there[None, :])


def grouped_product(
    x: Tensor, weight_EOI: Tensor, order_S: Tensor, starts_E: Tensor, *,
    k: int = 1, gathered: bool = False, scattered: bool = False, gated: bool = False,
) -> Tensor:  # fmt: skip
    """Each expert's product of its rows, in one order of sums. `gathered`: `x` has tokens [T, I] instead of sorted
    slots [S, I]; `scattered`: results [S, O] are in the order of slots instead of sorted; `gated`: silu(gate) * up of
    the two halves of the weights."""
    slots, experts = len(order_S), len(weight_EOI)
    outputs, inner = weight_EOI.shape[1] // (2 if gated else 1), weight_EOI.shape[2]
    assert x.stride(1) == 1 and weight_EOI.is_contiguous()
    out = torch.empty(slots, outputs, dtype=x.dtype, device=x.device)
    each = slots / experts
    if each <= 64:
        height, width, step, warps, stages = (16 if each <= 8 else 32 if each <= 24 else 64), 64, 128, 4, 3
    else:
        height, width, step, warps, stages = 128, 128, 64, 8, 3
    width = width // 2 if gated else width
    step = min(step, max(LEAST_DOT, triton.next_power_of_2(inner)))
    tiles = slots // height + min(experts, slots)  # at most: each expert may have one that is not full
    _grouped_product[tiles, triton.cdiv(outputs, width)](
        x, weight_EOI, out, order_S, starts_E, inner, x.stride(0),
        EXPERTS=experts, EXPERT_ROWS=triton.next_power_of_2(experts), OUTPUTS=outputs, K=k,
        GATHERED=gathered, SCATTERED=scattered, GATED=gated, BM=height, BN=width, BK=step,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


@triton.jit
def _combine(
    slots, weights, rows, out, WIDTH: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr
):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = column < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K):
        slot = token * K + j
        row = slot if WEIGHTED else tl.load(rows + slot).to(tl.int64)
        value = tl.load(slots + row * WIDTH + column, kept, 0.0).to(tl.float32)
        if WEIGHTED:
            # A rounding of its own: whether a compiler fuses the product with the sum must not matter.
            value = (value * tl.load(weights + slot).to(tl.float32)).to(slots.dtype.element_ty).to(tl.float32)
        total += value
    tl.store(out + token * WIDTH + column, total.to(out.dtype.element_ty), kept)


def combine(slots_SD: Tensor, weights_TK: Tensor) -> Tensor:
    """Weighted sums over the experts of each token [T, D]; slots are not sorted."""
    return _combined(slots_SD, weights_TK, weights_TK, weighted=True)


def sum_of_slots(rows_SD: Tensor, order_S: Tensor, k: int) -> Tensor:
    """Sums over the slots of each token [T, D], from sorted rows."""
    place = torch.empty_like(order_S)
    place[order_S] = torch.arange(len(order_S), dtype=order_S.dtype, device=order_S.device)
    return _combined(rows_SD, rows_SD, place.view(-1, k), weighted=False)


def _combined(slots_SD: Tensor, weights: Tensor, rows_TK: Tensor, *, weighted: bool) -> Tensor:
    (tokens, k), width = rows_TK.shape, slots_SD.shape[1]
    out = torch.empty(tokens, width, dtype=slots_SD.dtype, device=slots_SD.device)
    _combine[tokens, triton.cdiv(width, 1024)](
        slots_SD, weights, rows_TK, out, WIDTH=width, K=k, BLOCK=1024, WEIGHTED=weighted, num_warps=4
    )
    return out


@triton.jit
def _experts_gate_backward(
    grad, gate_up, weights, order, grad_gate_up, weighted, grad_weights,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    kept = column < WIDTH
    slot = tl.load(order + row)
    share = tl.load(weights + slot).to(tl.float32)
    d = tl.load(grad + row * WIDTH + column, kept, 0.0).to(tl.float32)
    g = tl.load(gate_up + row * 2 * WIDTH + column, kept, 0.0).to(tl.float32)
    u = tl.load(gate_up + row * 2 * WIDTH + WIDTH + column, kept, 0.0).to(tl.float32)
    kind = weighted.dtype.element_ty
    opening = tl.sigmoid(g)
    opened = (g * opening).to(kind).to(tl.float32)
    inside = (opened * u).to(kind).to(tl.float32)
    tl.store(grad_weights + slot, tl.sum(d * inside, 0))
    tl.store(weighted + row * WIDTH + column, (share * inside).to(kind), kept)
    d = d * share
    place = grad_gate_up + row * 2 * WIDTH + column
    tl.store(place, (d * u * opening * (1 + g * (1 - opening))).to(kind), kept)
    tl.store(place + WIDTH, (d * opened).to(kind), kept)


def experts_gate_backward(
    grad_SI: Tensor, gate_up_SX: Tensor, weights_TK: Tensor, order_S: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient of each slot's gated values before its weight: gradients of gate and up, weighted gated values
    (both in sorted rows), and the gradient of the weights [T, K] in fp32."""
    slots, width = grad_SI.shape
    grad_gate_up, weighted = torch.empty_like(gate_up_SX), torch.empty_like(grad_SI)
    grad_weights = torch.empty(weights_TK.shape, dtype=torch.float32, device=grad_SI.device)
    _experts_gate_backward[slots,](
        grad_SI, gate_up_SX, weights_TK, order_S, grad_gate_up, weighted, grad_weights,
        WIDTH=width, COLUMNS=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return grad_gate_up, weighted, grad_weights
