"""Sequences of a packed row as right-padded blocks, for attention that knows nothing of rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trimtab.data.batches import Span


@dataclass
class Block:
    """Sequences of similar length as one right-padded block of SDPA."""

    size: int
    length: int
    slots: Tensor | None  # [size * length] row index of every slot; None: one whole sequence, a plain slice
    real: Tensor | None  # slots that hold a token, and
    rows: Tensor | slice  # their row index
    owned: Tensor | None  # slots whose result is kept: a borrowed token's is kept where it is owned
    repeats: bool  # a row stands in several slots, so its gradients add up


@dataclass
class DenseBlocks:
    blocks: list[Block]
    order: Tensor | None  # from the blocks' owned results to row order; None: they are in order

    @classmethod
    def of(cls, spans: Sequence[Span], device: torch.device) -> "DenseBlocks":
        groups = _similar_lengths([s.whole_length for s in spans])
        blocks = [_block([spans[i] for i in members]) for members in groups]
        if len(blocks) == 1 and blocks[0].slots is None:
            return cls(blocks, None)
        owned_rows = np.concatenate(
            [np.arange(spans[i].start, spans[i].start + spans[i].length) for members in groups for i in members]
        )
        return cls([_moved(block, device) for block in blocks], torch.from_numpy(np.argsort(owned_rows)).to(device))


def _similar_lengths(lengths: list[int], fill: float = 0.8) -> list[list[int]]:
    """Longest first; a group takes lengths of at least `fill` of its longest, so little of a block is padding."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and lengths[i] >= fill * lengths[groups[-1][0]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _block(spans: list[Span]) -> Block:
    size, length = len(spans), max(s.whole_length for s in spans)
    if size == 1 and not spans[0].prefix_length:
        return Block(1, length, None, None, slice(spans[0].start, spans[0].start + length), None, False)
    slots = np.zeros((size, length), dtype=np.int64)
    real = np.zeros((size, length), dtype=bool)
    owned = np.zeros((size, length), dtype=bool)
    for row, span in enumerate(spans):
        slots[row, : span.whole_length] = span.rows()
        real[row, : span.whole_length] = True
        owned[row, span.prefix_length : span.whole_length] = True
    index = {"slots": slots.ravel(), "real": np.flatnonzero(real), "owned": np.flatnonzero(owned), "rows": slots[real]}
    tensors = {name: torch.from_numpy(value) for name, value in index.items()}
    return Block(size, length, repeats=any(s.prefix_length for s in spans), **tensors)


def _moved(block: Block, device: torch.device) -> Block:
    moved = {k: v.to(device, non_blocking=True) for k, v in vars(block).items() if isinstance(v, Tensor)}
    return replace(block, **moved)
