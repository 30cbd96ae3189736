"""Kernels at both ends of a captured decode step: inputs of the layers, sampling, and the advance of the table.

As separate operations, inputs and advance would be thirty tiny launches. A row of the table (cuda_graphs.py): newest
token, position, number of sampled tokens, seed, limit, pages. Sampling with only a temperature reads fp32 logits once:
the first kernel computes maximum and sum of exponentials of each stretch of the vocabulary, the second finds the
stretch and the token for the sequence's random number. The rule is that of sampler.py, and so are the tokens, up to
rounding of sums.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimtab.models.lm_head_kernels import OF_STRETCHES, STRETCH, joined, shaped, stretches


@triton.jit
def _begin(
    table, embedding, cosines, sines, stream, cos, sin, slot_mapping, lengths, table_row,
    FIRST_PAGE: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    ANGLES: tl.constexpr, ANGLES_ROUNDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    own = table + row * table_row
    over = tl.load(own + 2) >= tl.load(own + 4)
    position = tl.where(over, 0, tl.load(own + 1))
    page = tl.where(over, 0, tl.load(own + FIRST_PAGE + position // SIZE))  # page 0, which is never read
    tl.store(slot_mapping + row, page * SIZE + position % SIZE)
    tl.store(lengths + row, position + 1)
    column = tl.arange(0, COLUMNS)
    kept = column < WIDTH
    embedded = tl.load(embedding + tl.load(own) * WIDTH + column, kept, 0.0)
    tl.store(stream + row * WIDTH + column, embedded, kept)
    column = tl.arange(0, ANGLES_ROUNDED)
    kept = column < ANGLES
    tl.store(cos + row * ANGLES + column, tl.load(cosines + position * ANGLES + column, kept, 0.0), kept)
    tl.store(sin + row * ANGLES + column, tl.load(sines + position * ANGLES + column, kept, 0.0), kept)


class DecodeInputs(NamedTuple):
    """Inputs of the layers: residual stream, rotary angles, positions of new keys in the cache, sequence lengths."""

    stream_BD: Tensor
    angles: tuple[Tensor, Tensor]
    slot_mapping_B: Tensor
    lengths_B: Tensor


def decode_inputs(
    table_BC: Tensor, first_page: int, page_size: int, embedding_VD: Tensor, angles: tuple[Tensor, Tensor]
) -> DecodeInputs:
    """`angles`: cosines and sines of all positions [P, W]. A row at its limit uses page 0 only."""
    rows, width, turned = len(table_BC), embedding_VD.shape[1], angles[0].shape[1]
    assert table_BC.stride(1) == 1 and embedding_VD.is_contiguous() and all(x.is_contiguous() for x in angles)
    stream = torch.empty(rows, width, dtype=embedding_VD.dtype, device=embedding_VD.device)
    cos, sin = torch.empty(2, rows, turned, dtype=angles[0].dtype, device=stream.device)
    slot_mapping, lengths = torch.empty(2, rows, dtype=torch.int64, device=stream.device)
    _begin[rows,](
        table_BC, embedding_VD, *angles, stream, cos, sin, slot_mapping, lengths, table_BC.stride(0),
        FIRST_PAGE=first_page, SIZE=page_size, WIDTH=width, COLUMNS=triton.next_power_of_2(width),
        ANGLES=turned, ANGLES_ROUNDED=triton.next_power_of_2(turned), num_warps=4,
    )  # fmt: skip
    return DecodeInputs(stream, (cos, sin), slot_mapping, lengths)


@triton.jit
def _move_on(
    table, tokens, log_probs, plain, kept_tokens, kept_log_probs, stops, step, rows, table_row, kept_row, kept_kind,
    stops_row, STOPS: tl.constexpr, BY_ROW: tl.constexpr, PLAIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program, so that the step is counted when all its rows have read it.
    at = tl.load(step)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        live = row < rows
        token = tl.load(tokens + row, live, 0)
        tl.store(kept_tokens + at * kept_row + row, token, live)
        tl.store(kept_log_probs + at * kept_row + row, tl.load(log_probs + row, live, 0.0), live)
        if PLAIN:
            tl.store(kept_log_probs + kept_kind + at * kept_row + row, tl.load(plain + row, live, 0.0), live)
        own = table + row.to(tl.int64) * table_row
        tl.store(own, token, live)
        tl.store(own + 1, tl.load(own + 1, live, 0) + 1, live)
        tl.store(own + 2, tl.load(own + 2, live, 0) + 1, live)
        ended = token < 0
        for i in range(STOPS):
            if BY_ROW:
                ended = ended | (token == tl.load(stops + row * stops_row + i, live, -1))
            else:
                ended = ended | (token == tl.load(stops + i))
        tl.store(own + 4, tl.zeros([BLOCK], tl.int64), live & ended)
    tl.debug_barrier()
    tl.store(step, at + 1)


def advance_step(
    table_BC: Tensor, tokens_B: Tensor, log_probs_B: Tensor, plain_B: Tensor | None,
    kept_tokens_SB: Tensor, kept_log_probs_KSB: Tensor, stops: Tensor, step: Tensor,
) -> None:  # fmt: skip
    """Store this step's tokens and log-probs, and advance the table's rows and the step; a stop token ends a row.

    `stops`: of all rows [K], or of each row [B, K], padded by -1."""
    rows, count = len(table_BC), stops.shape[-1]
    assert table_BC.stride(1) == 1 and kept_tokens_SB.stride(0) == kept_log_probs_KSB.stride(1)
    _move_on[1,](
        table_BC, tokens_B, log_probs_B, log_probs_B if plain_B is None else plain_B, kept_tokens_SB,
        kept_log_probs_KSB, stops if count else tokens_B, step, rows, table_BC.stride(0),
        kept_tokens_SB.stride(0), kept_log_probs_KSB.stride(0), stops.stride(0), STOPS=count, BY_ROW=stops.dim() == 2,
        PLAIN=plain_B is not None,
        BLOCK=min(1024, triton.next_power_of_2(rows)), num_warps=4,
    )  # fmt: skip


# ---- sampling with only a temperature


@triton.jit
def _mixed(x):
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit(do_not_specialize_on_alignment=OF_STRETCHES)
def _pick(
    logits, peaks, sums, seeds, drawn, tokens, log_probs, vocabulary, row_stride, seeds_stride, drawn_stride,
    scale, softcap, temperature, heat_stride, SHAPED: tl.constexpr, CAPPED: tl.constexpr, BY_ROW: tl.constexpr,
    COUNT: tl.constexpr, COUNT_ROUNDED: tl.constexpr, STRETCH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if BY_ROW:
        temperature = tl.load(temperature + row * heat_stride)
    top, weight = joined(peaks, sums, row, COUNT, COUNT_ROUNDED)
    total, stretch = tl.sum(weight, 0), tl.arange(0, COUNT_ROUNDED)
    seed, position = tl.load(seeds + row * seeds_stride), tl.load(drawn + row * drawn_stride)
    bits = _mixed(_mixed(seed + (position + 1) * -7046029254386353131))
    u = ((bits >> 40) & 0xFFFFFF).to(tl.float32) * (1.0 / 16777216.0)
    target = u * total
    until = tl.cumsum(weight, 0)
    # The first stretch that ends beyond the target; rounding may leave none, then the last with any weight.
    chosen = tl.min(tl.where((until > target) & (stretch < COUNT), stretch, COUNT), 0)
    chosen = tl.where(chosen < COUNT, chosen, tl.max(tl.where(weight > 0, stretch, 0), 0))
    target -= tl.sum(tl.where(stretch < chosen, weight, 0.0), 0)

    offset = tl.arange(0, STRETCH)
    token = chosen * STRETCH + offset
    inside = token < vocabulary
    z = shaped(tl.load(logits + row * row_stride + token, inside, 0.0), scale, softcap, temperature, SHAPED, CAPPED)
    z = tl.where(inside, z, float("-inf"))
    share = tl.exp(z - top)
    place = tl.min(tl.where(tl.cumsum(share, 0) > target, offset, STRETCH), 0)
    place = tl.where(place < STRETCH, place, tl.max(tl.where(share > 0, offset, 0), 0))
    picked = tl.sum(tl.where(offset == place, z, 0.0), 0)
    tl.store(tokens + row, (chosen * STRETCH + place).to(tl.int64))
    tl.store(log_probs + row, picked - (top + tl.log(total)))


def sample_temperature_only(
    logits_BV: Tensor, seeds_B: Tensor, drawn_B: Tensor, temperature: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probs at the temperature, which may be a tensor of one for each row. The log-probs are those
    of `lm_head.read_logits`, bit for bit."""
    rows, vocabulary = logits_BV.shape
    (peaks, sums, _), shape, switches = stretches(logits_BV, 1.0, None, temperature)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits_BV.device)
    log_probs = torch.empty(rows, dtype=torch.float32, device=logits_BV.device)
    _pick[rows,](
        logits_BV, peaks, sums, seeds_B, drawn_B, tokens, log_probs, vocabulary, logits_BV.stride(0),
        seeds_B.stride(0), drawn_B.stride(0), *shape, **switches, STRETCH=STRETCH, num_warps=4,
    )  # fmt: skip
    return tokens, log_probs
