"""Attention over a packed row whose tokens are shared out over processes (models/shares.py).

Every process has the queries of its own tokens, gathers the keys and values of all, and attends: a piece of a sequence
sees the sequence up to itself, whoever worked that out. The backward pass gives the gradients of keys and values back
to their owners, added up. So borrowed prompts, windows, grouped heads and soft caps are what they are in a whole row.

`stride` heads of keys are gathered at a time, the next ones while these are worked with, and nothing that was gathered
is kept: the backward pass gathers and attends once more. What is kept falls with the number of processes, with gradient
checkpointing and without.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from trimtab.data.batches import Span
from trimtab.distributed.peers import Peers
from trimtab.distributed.portions import begin_gathering, sum_portions
from trimtab.models.attention import Pad, attend_seen, cumulative
from trimtab.models.shares import Piece, RowShares
from trimtab.models.varlen import attend_varlen, varlen_applies

STRIP = 256  # queries that a dense kernel takes at a time: the mask of a strip is as long as its keys
FILL = 0.8  # share of a block's queries and of its keys that each of its pieces has at least


@dataclass(frozen=True)
class Context:
    """The processes that work on a row together, and how many heads of keys they gather at a time."""

    peers: Peers
    stride: int


@dataclass
class Manner:
    """How one layer attends."""

    scale: float
    window: int | None
    softcap: float | None


@dataclass
class Strips:
    """Pieces of similar length as one right-padded block. The keys that a query sees end with itself, so what is padded
    after the last ones is seen by padded queries alone."""

    pieces: list[Piece]
    window: int | None
    device: torch.device

    def attend(self, query: Tensor, key: Tensor, value: Tensor, manner: Manner) -> tuple[Tensor, Tensor]:
        """[queries, heads, D] of the pieces' tokens, and where these lie among those of the process."""
        q = self._block(query, self._queries)
        k, v = (self._block(x, self._keys) for x in (key, value))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = attend_seen(q, k, v, self._seen, manner.scale, manner.softcap)
        out = out.transpose(1, 2).flatten(0, 1)
        _, real, rows, _ = self._queries
        return out.index_select(0, real), rows

    def _block(self, x: Tensor, index: tuple[Tensor, Tensor, Tensor, bool]) -> Tensor:
        slots, real, rows, repeats = index
        if len(self.pieces) == 1 and not self.pieces[0].span.prefix_length:
            return x[int(rows[0]) : int(rows[0]) + len(rows)][None]
        return Pad.apply(x, slots, real, rows, repeats).view(len(self.pieces), -1, *x.shape[1:])

    @cached_property
    def _queries(self) -> tuple[Tensor, Tensor, Tensor, bool]:
        return self._index([np.arange(piece.first, piece.first + piece.length) for piece in self.pieces])

    @cached_property
    def _keys(self) -> tuple[Tensor, Tensor, Tensor, bool]:
        return self._index([piece.key_rows(self.window) for piece in self.pieces])

    def _index(self, rows: list[np.ndarray]) -> tuple[Tensor, Tensor, Tensor, bool]:
        """The row of every slot, the slots that are real, their rows, and whether a row stands in several of them."""
        slots = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        real = np.zeros(slots.shape, dtype=bool)
        for i, filled in enumerate(rows):
            slots[i, : len(filled)], real[i, : len(filled)] = filled, True
        flat = np.concatenate(rows)
        index = (torch.from_numpy(x).to(self.device) for x in (slots.ravel(), np.flatnonzero(real), flat))
        return (*index, len(np.unique(flat)) < len(flat))

    @property
    def _seen(self) -> Tensor:
        """[1 or pieces, 1, queries, keys]"""
        counts = [piece.keys(self.window) for piece in self.pieces]
        before = np.array([keys - piece.length for keys, piece in zip(counts, self.pieces)])
        if (before == before[0]).all():
            before = before[:1]
        queries, keys = max(piece.length for piece in self.pieces), max(counts)
        position = torch.from_numpy(np.minimum(before[:, None] + np.arange(queries), keys - 1)).to(self.device)
        distance = position[:, None, :, None] - torch.arange(keys, device=self.device)
        return (distance >= 0) if self.window is None else (distance >= 0) & (distance < self.window)


def strips_of(pieces: list[Piece], window: int | None, device: torch.device) -> list[Strips]:
    """Strips of similar length together, so that little of a block is padding."""
    strips = [strip for piece in pieces for strip in piece.strips(STRIP)]
    blocks: list[list[Piece]] = []
    for strip in sorted(strips, key=lambda strip: (-strip.length, -strip.keys(window), strip.first)):
        largest = blocks[-1][0] if blocks else None
        if largest and strip.length >= FILL * largest.length and _alike(strip.keys(window), largest.keys(window)):
            blocks[-1].append(strip)
        else:
            blocks.append([strip])
    return [Strips(block, window, device) for block in blocks]


def _alike(first: int, second: int) -> bool:
    return min(first, second) >= FILL * max(first, second)


@dataclass
class Varlen:
    """The same pieces for the kernel that takes sequences of any length."""

    query_starts: Tensor
    key_starts: Tensor
    key_rows: Tensor | None
    longest: int

    @classmethod
    def of(cls, pieces: list[Piece], window: int | None, device: torch.device) -> "Varlen":
        counts = [piece.keys(window) for piece in pieces]
        query_starts, key_starts = cumulative([piece.length for piece in pieces]), cumulative(counts)
        key_rows = torch.from_numpy(np.concatenate([piece.key_rows(window) for piece in pieces]))
        return cls(query_starts.to(device), key_starts.to(device), key_rows.to(device), max(counts))


class SharedRow:
    """The share of this process in a packed row, prepared once and used by every layer."""

    def __init__(self, spans: list[Span], context: Context, device: torch.device):
        peers = context.peers
        self.context, self.device = context, device
        shares = RowShares.of(spans, peers.size)
        self.tokens, self.padded = shares.counts[peers.rank], shares.longest
        self.pieces = shares.pieces(spans, peers.rank)
        self.longest_sequence = max(span.whole_length for span in spans)
        rows = pad(torch.from_numpy(shares.rows(peers.rank)), (0, self.padded - self.tokens))
        owner_T, place_T = shares.places()
        self.rows = rows.to(device)  # of the whole row, those that this process works on; padded with the first
        self.owner_T = torch.from_numpy(owner_T).to(device)
        self.place_T = torch.from_numpy(place_T).to(device)
        self._order_T = self.owner_T * self.padded + self.place_T  # where a token lies among all that are gathered
        self._prepared: dict[tuple[str, int | None], Any] = {}  # windows differ between layers

    def attend(self, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> Tensor:
        """query [1, heads, tokens, D] in, [1, tokens, heads, D] out."""
        assert query.shape[2] == self.padded and not arguments.get("dropout")
        window = arguments.get("sliding_window")
        if window is not None and window >= self.longest_sequence:
            window = None
        scale = arguments.get("scaling") or query.shape[-1] ** -0.5
        manner = Manner(scale, window, arguments.get("softcap"))
        q, k, v = (x.transpose(1, 2)[0] for x in (query, key, value))  # [tokens, heads, D]
        return _Attention.apply(q, k, v, self, manner)[None]

    # ---- a few heads

    def attend_gathered(self, query: Tensor, key: Tensor, value: Tensor, manner: Manner) -> Tensor:
        """Own queries to the keys of all, which are in the order of the row."""
        if not self.pieces:
            return query.new_zeros(*query.shape[:2], value.shape[-1])
        if varlen_applies(query, value, manner.softcap, 0.0):
            pieces = self._prepare(Varlen.of, manner.window)
            own = query[: self.tokens]
            out = attend_varlen(own, key, value, pieces, manner.scale, manner.window)
        else:
            blocks = self._prepare(strips_of, manner.window)
            results, rows = zip(*(block.attend(query, key, value, manner) for block in blocks))
            out = torch.cat(results).index_select(0, torch.cat(rows).argsort())
        return pad(out, (0, 0, 0, 0, 0, self.padded - self.tokens))

    def _prepare(self, how: Any, window: int | None) -> Any:
        made = (how.__qualname__, window)
        if made not in self._prepared:
            self._prepared[made] = how(self.pieces, window, self.device)
        return self._prepared[made]

    def gather(self, key: Tensor, value: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Keys and values of all tokens in the order of the row, some heads at a time. The next ones are on their way
        while these are worked with."""
        stride = self.context.stride
        heads = [slice(i, i + stride) for i in range(0, key.shape[1], stride)]
        coming = self._begin(key, value, heads[0])
        for some, following in zip(heads, [*heads[1:], None]):
            both = coming().index_select(0, self._order_T)
            if following is not None:
                coming = self._begin(key, value, following)
            keys, values = both.split([key.shape[-1], value.shape[-1]], -1)
            del both
            yield some, keys, values

    def _begin(self, key: Tensor, value: Tensor, heads: slice) -> Callable[[], Tensor]:
        return begin_gathering(torch.cat([key[:, heads], value[:, heads]], -1), self.context.peers)

    def give_back(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """Of own tokens the sums of what all processes have."""
        both = torch.cat([keys, values], -1)
        parts = both.new_zeros(self.context.peers.size * self.padded, *both.shape[1:])
        own = sum_portions(parts.index_copy_(0, self._order_T, both), self.context.peers)
        return own.split([keys.shape[-1], values.shape[-1]], -1)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, row, manner):
        ctx.save_for_backward(query, key, value)
        ctx.row, ctx.manner = row, manner
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        for some, keys, values in row.gather(key, value):
            reading = _readers(some, query, key)
            out[:, reading] = row.attend_gathered(query[:, reading], keys, values, manner)
        return out

    @staticmethod
    def backward(ctx, gradient):
        query, key, value = ctx.saved_tensors
        of_query, of_key, of_value = (torch.zeros_like(x) for x in (query, key, value))
        for some, keys, values in ctx.row.gather(key, value):
            reading = _readers(some, query, key)
            inputs = [x.detach().requires_grad_() for x in (query[:, reading], keys, values)]
            with torch.enable_grad():
                out = ctx.row.attend_gathered(*inputs, ctx.manner)
            if out.requires_grad:
                found = torch.autograd.grad(out, inputs, gradient[:, reading])
            else:  # nothing but padding here
                found = tuple(map(torch.zeros_like, inputs))
            of_query[:, reading] = found[0]
            of_key[:, some], of_value[:, some] = ctx.row.give_back(*found[1:])
        return of_query, of_key, of_value, None, None


def _readers(heads: slice, query: Tensor, key: Tensor) -> slice:
    """The heads of queries that read these heads of keys."""
    groups = query.shape[1] // key.shape[1]
    return slice(heads.start * groups, heads.stop * groups)
