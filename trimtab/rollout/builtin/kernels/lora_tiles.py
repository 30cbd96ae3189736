"""Tile sizes of the LoRA kernels, and which of them fit into a device's shared memory."""

from typing import NamedTuple


class LoraTiles(NamedTuple):
    """Tile sizes: rows, outputs and inputs of one step; parts of the inner dimension."""

    rows: int
    outputs: int
    inner: int
    splits: int
    warps: int
    stages: int
    swapped: bool = False
    """The weights are the left factor."""


TILE = 64  # outputs
WIDE = 2048  # inputs
FEW, MANY = 64, 512  # rows
MARGIN = 2**10  # bytes of shared memory; what steps wait by takes 120


def fit_tiles(memory: int, tiles: LoraTiles, weights: int, height: int, *, on_the_way: bool) -> LoraTiles | None:
    """Fewer stages, then smaller tiles, until they fit into shared memory; None if two stages of the smallest do not
    fit. After the loop its memory is reused for A x and B, and for the result."""
    while True:
        lines = tiles.rows + weights * (tiles.outputs + (height if on_the_way else 0))
        after = max(2 * height * (tiles.rows + weights * tiles.outputs), 4 * tiles.rows * tiles.outputs)
        stages = min(tiles.stages, (memory - MARGIN) // (2 * tiles.inner * lines))
        if stages >= min(2, tiles.stages) and after <= memory - MARGIN:
            return tiles._replace(stages=stages)
        if tiles.outputs > TILE:
            tiles = tiles._replace(outputs=tiles.outputs // 2)
        elif tiles.inner > 32:
            tiles = tiles._replace(inner=tiles.inner // 2)
        else:
            return None


def stages_of_low(height: int, memory: int) -> int:
    return max(1, min(4, (memory - MARGIN) // (2 * 128 * (64 + height))))


def smallest(rows: int) -> LoraTiles:
    """Of all tiles for this many rows, the ones with the least memory."""
    return LoraTiles(64 if rows <= FEW else 128, TILE, 32, 1, 4, 2)


# ---- measured on an H200, at the shapes of a model of 8 billion parameters


def product_tiles(rows: int, inner: int, widths: list[int], parts: bool) -> LoraTiles:
    whole = next(size for size in (256, 128, TILE) if all(width % size == 0 for width in widths))
    long = parts and inner > 8192
    if rows <= FEW and not parts:
        return LoraTiles(64, TILE, 128, 1, 4, 5, swapped=True)
    if rows <= FEW and long and whole > TILE:
        return LoraTiles(64, 128, 64, 4, 4, 5, swapped=True)
    if rows <= FEW:
        return LoraTiles(64, TILE, 128, 2, 4, 4, swapped=True)
    if long and whole == 256:
        return LoraTiles(128, 256, 64, 4, 8, 4)
    if parts or whole == TILE:
        return LoraTiles(128, TILE, 128, 1, 4, 4, swapped=True)
    return LoraTiles(128, TILE, 64, 1, 4, 6) if rows <= 128 else LoraTiles(128, 128, 64, 1, 8, 5)


def gated_tiles(rows: int, outputs: int) -> LoraTiles:
    return LoraTiles(64, TILE, 64, 1, 4, 4) if rows <= FEW or outputs % 128 else LoraTiles(128, 128, 64, 1, 8, 4)
