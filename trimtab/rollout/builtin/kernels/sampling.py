"""Drawing at a plain temperature, one for all rows or each row's own, from fp32 logits, reading them once.

The first kernel leaves each stretch of the vocabulary's highest logit and sum of exponentials; the second finds the
stretch that the sequence's own random number falls into, and the token inside it. Same rule as sampler.py, same tokens
but for the rounding of sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

STRETCH = 2048


@triton.jit
def _stretches(
    logits, peaks, sums, vocabulary, row_stride, temperature, heat_stride, STRETCH: tl.constexpr, BY_ROW: tl.constexpr
):
    stretch, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if BY_ROW:
        temperature = tl.load(temperature + row * heat_stride)
    token = stretch * STRETCH + tl.arange(0, STRETCH)
    z = tl.load(logits + row * row_stride + token, token < vocabulary, float("-inf")) / temperature
    peak = tl.max(z, 0)
    place = row * tl.num_programs(0) + stretch
    tl.store(peaks + place, peak)
    # A NaN must reach the result: max() may pass over it, the sum does not. A stretch may be all minus infinity.
    tl.store(sums + place, tl.sum(tl.where(z == float("-inf"), 0.0, tl.exp(z - peak)), 0))


@triton.jit
def _mixed(x):
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _pick(
    logits, peaks, sums, seeds, drawn, tokens, log_probs, vocabulary, row_stride, seeds_stride, drawn_stride,
    temperature, heat_stride, COUNT: tl.constexpr, COUNT_ROUNDED: tl.constexpr, STRETCH: tl.constexpr,
    BY_ROW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if BY_ROW:
        temperature = tl.load(temperature + row * heat_stride)
    stretch = tl.arange(0, COUNT_ROUNDED)
    inside = stretch < COUNT
    peak = tl.load(peaks + row * COUNT + stretch, inside, float("-inf"))
    top = tl.max(peak, 0)
    weight = tl.where(inside, tl.load(sums + row * COUNT + stretch, inside, 0.0) * tl.exp(peak - top), 0.0)
    total = tl.sum(weight, 0)
    seed, position = tl.load(seeds + row * seeds_stride), tl.load(drawn + row * drawn_stride)
    bits = _mixed(_mixed(seed + (position + 1) * -7046029254386353131))
    u = ((bits >> 40) & 0xFFFFFF).to(tl.float32) * (1.0 / 16777216.0)
    target = u * total
    until = tl.cumsum(weight, 0)
    # The first stretch that ends beyond the target; rounding may leave none, then the last with any weight.
    chosen = tl.min(tl.where((until > target) & inside, stretch, COUNT), 0)
    chosen = tl.where(chosen < COUNT, chosen, tl.max(tl.where(weight > 0, stretch, 0), 0))
    target -= tl.sum(tl.where(stretch < chosen, weight, 0.0), 0)

    offset = tl.arange(0, STRETCH)
    token = chosen * STRETCH + offset
    z = tl.load(logits + row * row_stride + token, token < vocabulary, float("-inf")) / temperature
    share = tl.exp(z - top)
    place = tl.min(tl.where(tl.cumsum(share, 0) > target, offset, STRETCH), 0)
    place = tl.where(place < STRETCH, place, tl.max(tl.where(share > 0, offset, 0), 0))
    picked = tl.sum(tl.where(offset == place, z, 0.0), 0)
    tl.store(tokens + row, (chosen * STRETCH + place).to(tl.int64))
    tl.store(log_probs + row, picked - top - tl.log(total))


def draw_plainly(
    logits_BV: Tensor, seeds_B: Tensor, drawn_B: Tensor, temperature: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens, and their log-probs at the temperature; as a tensor, each row's own."""
    rows, vocabulary = logits_BV.shape
    count = triton.cdiv(vocabulary, STRETCH)
    device = logits_BV.device
    peaks, sums = torch.empty(2, rows, count, dtype=torch.float32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    log_probs = torch.empty(rows, dtype=torch.float32, device=device)
    heat = (temperature, temperature.stride(0)) if isinstance(temperature, Tensor) else (temperature, 0)
    by_row = isinstance(temperature, Tensor)
    _stretches[count, rows](
        logits_BV, peaks, sums, vocabulary, logits_BV.stride(0), *heat, STRETCH=STRETCH, BY_ROW=by_row
    )
    _pick[rows,](
        logits_BV, peaks, sums, seeds_B, drawn_B, tokens, log_probs, vocabulary, logits_BV.stride(0),
        seeds_B.stride(0), drawn_B.stride(0), *heat,
        COUNT=count, COUNT_ROUNDED=triton.next_power_of_2(count), STRETCH=STRETCH, BY_ROW=by_row,
    )  # fmt: skip
    return tokens, log_probs
