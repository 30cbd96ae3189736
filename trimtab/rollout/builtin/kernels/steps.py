"""Both ends of a recorded decode step: what a row of the table says becomes the layers' input, and what was drawn moves
the row on. As operations of their own they would be thirty launches that do next to nothing.

A row of the table (graphs.py): newest token, position, tokens drawn, seed, limit, pages.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _begin(
    table, embedding, cosines, sines, stream, cos, sin, places, lengths, table_row,
    FIRST_PAGE: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    ANGLES: tl.constexpr, ANGLES_ROUNDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    own = table + row * table_row
    over = tl.load(own + 2) >= tl.load(own + 4)
    position = tl.where(over, 0, tl.load(own + 1))
    page = tl.where(over, 0, tl.load(own + FIRST_PAGE + position // SIZE))  # page 0, which nobody reads
    tl.store(places + row, page * SIZE + position % SIZE)
    tl.store(lengths + row, position + 1)
    column = tl.arange(0, COLUMNS)
    kept = column < WIDTH
    embedded = tl.load(embedding + tl.load(own) * WIDTH + column, kept, 0.0)
    tl.store(stream + row * WIDTH + column, embedded, kept)
    column = tl.arange(0, ANGLES_ROUNDED)
    kept = column < ANGLES
    tl.store(cos + row * ANGLES + column, tl.load(cosines + position * ANGLES + column, kept, 0.0), kept)
    tl.store(sin + row * ANGLES + column, tl.load(sines + position * ANGLES + column, kept, 0.0), kept)


class Begun(NamedTuple):
    """The layers' input: the stream, the angles of its positions, where keys go, how many are looked at."""

    stream_BD: Tensor
    angles: tuple[Tensor, Tensor]
    places_B: Tensor
    lengths_B: Tensor


def begun(
    table_BC: Tensor, first_page: int, page_size: int, embedding_VD: Tensor, angles: tuple[Tensor, Tensor]
) -> Begun:
    """`angles`: cosines and sines of every position that can be [P, W]. A row that has drawn what it may works on page
    0 alone."""
    rows, width, turned = len(table_BC), embedding_VD.shape[1], angles[0].shape[1]
    assert table_BC.stride(1) == 1 and embedding_VD.is_contiguous() and all(x.is_contiguous() for x in angles)
    stream = torch.empty(rows, width, dtype=embedding_VD.dtype, device=embedding_VD.device)
    cos, sin = torch.empty(2, rows, turned, dtype=angles[0].dtype, device=stream.device)
    places, lengths = torch.empty(2, rows, dtype=torch.int64, device=stream.device)
    _begin[rows,](
        table_BC, embedding_VD, *angles, stream, cos, sin, places, lengths, table_BC.stride(0),
        FIRST_PAGE=first_page, SIZE=page_size, WIDTH=width, COLUMNS=triton.next_power_of_2(width),
        ANGLES=turned, ANGLES_ROUNDED=triton.next_power_of_2(turned), num_warps=4,
    )  # fmt: skip
    return Begun(stream, (cos, sin), places, lengths)


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


def move_on(
    table_BC: Tensor, tokens_B: Tensor, log_probs_B: Tensor, plain_B: Tensor | None,
    kept_tokens_SB: Tensor, kept_log_probs_KSB: Tensor, stops: Tensor, step: Tensor,
) -> None:  # fmt: skip
    """Keep what was drawn in this step's row, and move the table's rows and the step on; a stop token ends a row.

    `stops`: of all rows [K], or each row's own [B, K], filled up with -1."""
    rows, count = len(table_BC), stops.shape[-1]
    assert table_BC.stride(1) == 1 and kept_tokens_SB.stride(0) == kept_log_probs_KSB.stride(1)
    _move_on[1,](
        table_BC, tokens_B, log_probs_B, log_probs_B if plain_B is None else plain_B, kept_tokens_SB,
        kept_log_probs_KSB, stops if count else tokens_B, step, rows, table_BC.stride(0),
        kept_tokens_SB.stride(0), kept_log_probs_KSB.stride(0), stops.stride(0), STOPS=count, BY_ROW=stops.dim() == 2,
        PLAIN=plain_B is not None,
        BLOCK=min(1024, triton.next_power_of_2(rows)), num_warps=4,
    )  # fmt: skip
