"""What products of layers with adapters take of a device's shared memory, whatever the rows, widths and ranks."""

from itertools import product

import pytest

from trimtab.rollout.builtin.linear import (
    FEW,
    TILE,
    fit_tiles,
    gated_tiles,
    product_tiles,
    smallest,
    stages_of_low,
)

MEMORIES = H200, A100, CONSUMER = 232_448, 166_912, 101_376
ROWS, RANKS = (1, 64, 65, 128, 129, 512, 1024), (0, 16, 32, 64, 128)
WIDTHS = [64], [128], [256], [4096], [4096, 1024, 1024], [576, 192, 192]


def reachable():
    for rows, rank in product(ROWS, RANKS):
        for inner, widths, parts, exact in product((576, 4096, 14_336), WIDTHS, (False, True), (False, True)):
            yield product_tiles(rows, inner, widths, parts, exact), 1, rank, rows, widths
        for outputs in (64, 1536, 14_336):
            yield gated_tiles(rows, outputs), 2, rank, rows, [outputs]


def compiled_bytes(tiles, weights, rank, rows):
    """What Triton's compiler for sm_90 says it needs: buffers of the steps and up to 120 bytes to wait by; or the
    result when it changes its layout, in the same place."""
    of_a_step = 2 * tiles.inner * (tiles.rows + weights * (tiles.outputs + (rank if rows <= FEW else 0)))
    return max(tiles.stages * of_a_step + 120, 4 * tiles.rows * tiles.outputs)


@pytest.mark.parametrize("memory", MEMORIES)
def test_whatever_is_chosen_fits(memory):
    for tiles, weights, rank, rows, widths in reachable():
        found = fit_tiles(memory, tiles, weights, rank, on_the_way=rows <= FEW)
        assert found is not None and found.stages >= 2
        assert compiled_bytes(found, weights, rank, rows) <= memory
        assert all(width % found.outputs == 0 for width in widths)
        assert fit_tiles(memory, smallest(rows), 2, rank, on_the_way=rows <= FEW) is not None
    for rank in RANKS[1:]:
        assert stages_of_low(rank, memory) >= 2
        assert stages_of_low(rank, memory) * 2 * 128 * (64 + rank) + 120 <= memory


def test_what_was_measured_stays_where_it_fits():
    for tiles, weights, rank, rows, _ in reachable():
        if rank <= 16:
            assert fit_tiles(H200, tiles, weights, rank, on_the_way=rows <= FEW) == tiles
    # 245,848 bytes with five steps.
    few = product_tiles(37, 104, [128, 64, 64], False)
    assert fit_tiles(H200, few, 1, 64, on_the_way=True) == few._replace(stages=4)


def test_what_does_not_fit_at_all_is_told():
    assert fit_tiles(16 * 2**10, product_tiles(1, 4096, [4096], False), 1, 128, on_the_way=True) is None
    assert fit_tiles(CONSUMER, product_tiles(512, 14_336, [4096], True), 1, 0, on_the_way=False).outputs < 256
    assert smallest(1).outputs == TILE
