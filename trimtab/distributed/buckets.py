"""Tensors packed into buckets of bytes: a few large messages instead of one a tensor."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BUCKET = 64 * 2**20  # bytes
ALIGNMENT = 16
Described = tuple[str, str, tuple[int, ...]]  # name, type, shape


@dataclass(frozen=True)
class Piece:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # in the bucket

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Part:
    """What travels in one bucket."""

    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return self.pieces[-1].start + _aligned(self.pieces[-1].bytes)


def described(tensors: Iterable[tuple[str, Tensor]]) -> list[Described]:
    return [(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors]


def parts(tensors: Sequence[Described], bucket: int = BUCKET) -> list[Part]:
    """In their order; a tensor larger than a bucket travels alone."""
    found: list[list[Piece]] = []
    end = 0
    for name, dtype, shape in tensors:
        piece = Piece(name, getattr(torch, dtype), shape, end)
        if not found or end + piece.bytes > bucket:
            found.append([])
            piece = Piece(name, piece.dtype, shape, 0)
        found[-1].append(piece)
        end = piece.start + _aligned(piece.bytes)
    return [Part(tuple(pieces)) for pieces in found]


def packed(tensors: Iterable[tuple[str, Tensor]], parts: Sequence[Part], device: torch.device) -> Iterator[Tensor]:
    """The buckets of tensors that come in the order of the parts, one at a time."""
    coming = iter(tensors)
    for part in parts:
        bucket = torch.empty(part.size, dtype=torch.uint8, device=device)
        for piece in part.pieces:
            name, tensor = next(coming)
            assert (name, tensor.dtype, tuple(tensor.shape)) == (piece.name, piece.dtype, piece.shape), name
            bucket[piece.start : piece.start + piece.bytes].view(piece.dtype).copy_(tensor.detach().reshape(-1))
        yield bucket
    assert next(coming, None) is None, "more tensors than were described"


def opened(bucket: Tensor, part: Part) -> Iterator[tuple[str, Tensor]]:
    for piece in part.pieces:
        yield piece.name, bucket[piece.start : piece.start + piece.bytes].view(piece.dtype).view(piece.shape)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
