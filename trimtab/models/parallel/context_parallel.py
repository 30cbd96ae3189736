"""Context parallelism: the processes of a group share one packed row, each with a part of its tokens.

The row is divided into 2 x processes chunks of equal length (up to one token), and every process gets two: the
costliest with the cheapest, the second costliest with the second cheapest, and so on. The cost of a token is the number
of tokens it attends to. So all processes have about the same number of tokens and the same work, for one sequence or
many. Every process computes the whole sharding by itself.

In attention a process has the queries of its own tokens and gathers all keys and values: a piece of a sequence attends
to the sequence up to itself. The backward pass sums the gradients of keys and values and returns them to their owners.
Shared prompts, windows, grouped heads and soft caps work as in a whole row. `stride` key heads are gathered at a time,
the next ones while these are used. Gathered tensors are not saved: the backward pass gathers and attends again. Saved
activations shrink with the number of processes, with or without gradient checkpointing.

After the last layer every process computes log-probs, scores or values from the hidden states of its own tokens. These
are a few numbers per token, and are gathered, so that callers see the whole batch.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from trimtab.data.batches import Span
from trimtab.distributed.process_group import Peers, gather_shards, reduce_scatter_shards, start_gather_shards
from trimtab.models.attention import (
    FILL,
    LayerAttention,
    PackedRow,
    PaddedBlock,
    attend_masked,
    attend_varlen,
    cumulative,
    varlen_applies,
)

STRIP = 256  # queries per call of the dense kernel, whose mask is [strip, keys]
Chunk = tuple[int, int]  # first row, and one past the last
Routers = tuple[Tensor, ...] | None


@dataclass(frozen=True)
class ContextParallel:
    """The processes that share a row, and the number of key heads gathered at a time."""

    peers: Peers
    stride: int


# ---- sharding of a row


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one sequence in one process. They attend to the sequence up to themselves."""

    first: int  # index among the process's tokens
    length: int
    span: Span
    end: int  # one past the last of them, in the whole sequence with its shared prompt

    def keys(self, window: int | None) -> int:
        """Number of tokens they attend to, themselves included."""
        return self.end - self._begin(window)

    def key_rows(self, window: int | None) -> np.ndarray:
        """Row indices of these tokens."""
        return self.span.rows()[self._begin(window) : self.end]

    def strips(self, longest: int) -> list["Piece"]:
        """Split into pieces of at most this many tokens."""
        start = self.end - self.length
        lengths = {begin: min(longest, self.length - begin) for begin in range(0, self.length, longest)}
        return [Piece(self.first + b, length, self.span, start + b + length) for b, length in lengths.items()]

    def _begin(self, window: int | None) -> int:
        return 0 if window is None else max(0, self.end - self.length - window + 1)


@dataclass(frozen=True)
class RowSharding:
    """The chunks of every process, in the order of the row."""

    chunks: list[list[Chunk]]

    @classmethod
    def of(cls, spans: Sequence[Span], processes: int) -> "RowSharding":
        tokens = sum(span.length for span in spans)
        costs = np.ones(tokens, dtype=np.int64)
        for span in spans:
            costs[span.start : span.start + span.length] += np.arange(span.prefix_length, span.whole_length)
        edges = [tokens * i // (2 * processes) for i in range(2 * processes + 1)]
        chunks = list(itertools.pairwise(edges))
        dearest_first = sorted(chunks, key=lambda chunk: -costs[slice(*chunk)].sum())
        return cls([sorted((dearest_first[i], dearest_first[-1 - i])) for i in range(processes)])

    def rows(self, process: int) -> np.ndarray:
        """Row indices of a process's tokens."""
        return np.concatenate([np.arange(*chunk) for chunk in self.chunks[process]])

    @property
    def counts(self) -> list[int]:
        """Number of tokens of every process."""
        return [sum(end - begin for begin, end in chunks) for chunks in self.chunks]

    @property
    def longest(self) -> int:
        """The length to which all are padded."""
        return max(self.counts)

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """For every token of the row: its process, and its index among that process's tokens."""
        owner_T, place_T = (np.empty(sum(self.counts), dtype=np.int64) for _ in range(2))
        for process, count in enumerate(self.counts):
            owner_T[self.rows(process)] = process
            place_T[self.rows(process)] = np.arange(count)
        return owner_T, place_T

    def pieces(self, spans: Sequence[Span], process: int) -> list[Piece]:
        """The sequences in the chunks of a process, in the order of its tokens."""
        pieces, first = [], 0
        for begin, end in self.chunks[process]:
            for span in spans:
                after, until = max(begin, span.start), min(end, span.start + span.length)
                if after < until:
                    end_in_sequence = span.prefix_length + until - span.start
                    pieces.append(Piece(first + after - begin, until - after, span, end_in_sequence))
            first += end - begin
        return pieces


# ---- attention


class AttentionBlocks:
    """Pieces of similar length as one right-padded block. A query's keys end with itself, so only padded queries attend
    to padded keys."""

    def __init__(self, pieces: list[Piece], window: int | None, device: torch.device):
        self.pieces, self.window, self.device = pieces, window, device
        keys = [piece.key_rows(window) for piece in pieces]
        flat = np.concatenate(keys)
        self.queries = PaddedBlock.of([np.arange(p.first, p.first + p.length) for p in pieces], False, device)
        self.keys = PaddedBlock.of(keys, len(np.unique(flat)) < len(flat), device)
        self._first_key = int(flat[0])

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> tuple[Tensor, Tensor]:
        """Attention output [queries, heads, D] of the pieces' tokens, and their indices among the process's tokens."""
        piece = self.pieces[0]
        if len(self.pieces) == 1 and not piece.span.prefix_length:
            q = query[piece.first : piece.first + piece.length][None]
            k, v = (x[self._first_key : self._first_key + len(self.keys.rows)][None] for x in (key, value))
        else:
            q = self.queries.gather(query)
            k, v = (self.keys.gather(x) for x in (key, value))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = attend_masked(q, k, v, self._seen(), layer.scale, layer.softcap).transpose(1, 2).flatten(0, 1)
        return out.index_select(0, self.queries.real), self.queries.rows

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


def _strips(pieces: list[Piece], window: int | None, device: torch.device) -> list[AttentionBlocks]:
    """Blocks of strips of similar length, so that little of a block is padding."""
    strips = [strip for piece in pieces for strip in piece.strips(STRIP)]
    blocks: list[list[Piece]] = []
    for strip in sorted(strips, key=lambda strip: (-strip.length, -strip.keys(window), strip.first)):
        if blocks and strip.length >= FILL * blocks[-1][0].length:
            few, many = sorted((strip.keys(window), blocks[-1][0].keys(window)))
            if few >= FILL * many:
                blocks[-1].append(strip)
                continue
        blocks.append([strip])
    return [AttentionBlocks(block, window, device) for block in blocks]


def _varlen(pieces: list[Piece], window: int | None, device: torch.device) -> PackedRow:
    """The pieces as a row for the variable-length kernel."""
    lengths, counts = [piece.length for piece in pieces], [piece.keys(window) for piece in pieces]
    rows = torch.from_numpy(np.concatenate([piece.key_rows(window) for piece in pieces]))
    query_starts, key_starts, key_rows = (x.to(device) for x in (cumulative(lengths), cumulative(counts), rows))
    return PackedRow(query_starts, key_starts, key_rows, tokens=sum(lengths), longest=max(counts))


class ContextRow:
    """This process's part of a packed row, prepared once for all layers."""

    def __init__(self, spans: list[Span], context: ContextParallel, device: torch.device):
        peers = context.peers
        self.context, self.device = context, device
        shares = RowSharding.of(spans, peers.size)
        self.tokens, self.padded = shares.counts[peers.rank], shares.longest
        self.pieces = shares.pieces(spans, peers.rank)
        self.longest_sequence = max(span.whole_length for span in spans)
        rows = pad(torch.from_numpy(shares.rows(peers.rank)), (0, self.padded - self.tokens))
        owner_T, place_T = shares.places()
        self.rows = rows.to(device)  # row indices of this process's tokens, padded with index 0
        self.owner_T = torch.from_numpy(owner_T).to(device)
        self.place_T = torch.from_numpy(place_T).to(device)
        self._order_T = self.owner_T * self.padded + self.place_T  # index of each token of the row in a gathered tensor
        self._prepared: dict[tuple[Any, int | None], Any] = {}  # by window, which differs between layers

    def attend(self, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> Tensor:
        """query [1, heads, tokens, D] in, [1, tokens, heads, D] out."""
        layer = LayerAttention.of(arguments, query, self.longest_sequence)
        assert query.shape[2] == self.padded and not layer.dropout and layer.sinks is layer.chunk is None
        q, k, v = (x.transpose(1, 2)[0] for x in (query, key, value))  # [tokens, heads, D]
        return _Attention.apply(q, k, v, self, layer)[None]

    def attend_gathered(self, query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
        """Attention of own queries to gathered keys, in the order of the row, for a few heads."""
        if not self.pieces:
            return query.new_zeros(*query.shape[:2], value.shape[-1])
        if varlen_applies(query, value, layer):
            pieces = self._prepare(_varlen, layer.window)
            out = attend_varlen(query[: self.tokens], key, value, pieces, layer.scale, layer.window)
        else:
            blocks = self._prepare(_strips, layer.window)
            results, rows = zip(*(block.attend(query, key, value, layer) for block in blocks))
            out = torch.cat(results).index_select(0, torch.cat(rows).argsort())
        return pad(out, (0, 0, 0, 0, 0, self.padded - self.tokens))

    def _prepare(self, how: Callable, window: int | None) -> Any:
        if (how, window) not in self._prepared:
            self._prepared[how, window] = how(self.pieces, window, self.device)
        return self._prepared[how, window]

    def gather(self, key: Tensor, value: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Gather keys and values of all tokens in the order of the row, some heads at a time. The next heads are
        gathered while the caller uses these."""

        def start(heads: slice) -> Callable[[], Tensor]:
            return start_gather_shards(torch.cat([key[:, heads], value[:, heads]], -1), self.context.peers)

        stride = self.context.stride
        heads = [slice(i, i + stride) for i in range(0, key.shape[1], stride)]
        coming = start(heads[0])
        for some, following in zip(heads, [*heads[1:], None]):
            both = coming().index_select(0, self._order_T)
            if following is not None:
                coming = start(following)
            keys, values = both.split([key.shape[-1], value.shape[-1]], -1)
            del both
            yield some, keys, values

    def give_back(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """Sum gradients of keys and values over all processes; returns those of this process's tokens."""
        both = torch.cat([keys, values], -1)
        parts = both.new_zeros(self.context.peers.size * self.padded, *both.shape[1:])
        own = reduce_scatter_shards(parts.index_copy_(0, self._order_T, both), self.context.peers)
        return own.split([keys.shape[-1], values.shape[-1]], -1)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, row, layer):
        ctx.save_for_backward(query, key, value)
        ctx.row, ctx.layer = row, layer
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        for some, keys, values in row.gather(key, value):
            query_heads = _query_heads(some, query, key)
            out[:, query_heads] = row.attend_gathered(query[:, query_heads], keys, values, layer)
        return out

    @staticmethod
    def backward(ctx, gradient):
        query, key, value = ctx.saved_tensors
        of_query, of_key, of_value = (torch.zeros_like(x) for x in (query, key, value))
        for some, keys, values in ctx.row.gather(key, value):
            query_heads = _query_heads(some, query, key)
            inputs = [x.detach().requires_grad_() for x in (query[:, query_heads], keys, values)]
            with torch.enable_grad():
                out = ctx.row.attend_gathered(*inputs, ctx.layer)
            if out.requires_grad:
                found = torch.autograd.grad(out, inputs, gradient[:, query_heads])
            else:  # this process has only padding
                found = tuple(map(torch.zeros_like, inputs))
            of_query[:, query_heads] = found[0]
            of_key[:, some], of_value[:, some] = ctx.row.give_back(*found[1:])
        return of_query, of_key, of_value, None, None


def _query_heads(heads: slice, query: Tensor, key: Tensor) -> slice:
    """The query heads that use these key heads."""
    groups = query.shape[1] // key.shape[1]
    return slice(heads.start * groups, heads.stop * groups)


# ---- hidden states


@dataclass
class TokenLocations:
    """Which of the requested tokens are in this process, and the index of each in a gathered tensor."""

    here: Tensor
    places_N: Tensor
    most: int  # largest number of requested tokens in one process
    peers: Peers

    @classmethod
    def of(cls, row: ContextRow, rows_N: Tensor) -> "TokenLocations":
        peers, owner_N = row.context.peers, row.owner_T[rows_N]
        counts = torch.bincount(owner_N, minlength=peers.size)
        by_owner = owner_N.argsort(stable=True)
        within = torch.empty_like(owner_N)
        first = counts.cumsum(0) - counts
        within[by_owner] = torch.arange(len(owner_N), device=owner_N.device) - first[owner_N[by_owner]]
        most = max(1, int(counts.max()))
        return cls((owner_N == peers.rank).nonzero()[:, 0], owner_N * most + within, most, peers)

    def gather(self, values: Tensor) -> Tensor:
        """Values [N, ...] of all requested tokens, from those of each process's."""
        return _GatherTokens.apply(values, self)


class _GatherTokens(torch.autograd.Function):
    """Gathers values. All processes continue equally, so each takes its own part of the gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, located: TokenLocations) -> Tensor:
        ctx.located = located
        padded = values.new_zeros(located.most, *values.shape[1:])
        padded[: len(values)] = values
        return gather_shards(padded, located.peers).index_select(0, located.places_N)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.index_select(0, ctx.located.here), None
