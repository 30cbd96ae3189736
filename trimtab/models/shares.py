"""How the tokens of a packed row are shared out over the processes that work on it together.

The row is cut into twice as many chunks as there are processes, equally long but for a token, and every process gets
two: the costliest with the cheapest, the next with the last but one, and so on. What a token costs is the number of
tokens that it attends to. So all have about as many tokens and as much work, in a row that is one sequence and in one
that is many. Every process works out all shares by itself, and all come to the same.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.data.batches import Span

Chunk = tuple[int, int]  # its first row, and one past its last


@dataclass(frozen=True)
class Piece:
    """Tokens of one sequence, one after another, that a process works on. They see the sequence up to themselves."""

    first: int  # where they lie among the tokens of the process
    length: int
    span: Span
    end: int  # one past the last of them, counted in the whole sequence with what it borrows

    def keys(self, window: int | None) -> int:
        """How many tokens they attend to, themselves included."""
        return self.end - self._begin(window)

    def key_rows(self, window: int | None) -> np.ndarray:
        """Where these lie in the row."""
        return self.span.rows()[self._begin(window) : self.end]

    def strips(self, longest: int) -> list["Piece"]:
        """The same in pieces of at most so many tokens."""
        begins = range(0, self.length, longest)
        lengths = [min(longest, self.length - begin) for begin in begins]
        start = self.end - self.length
        return [
            Piece(self.first + begin, length, self.span, start + begin + length)
            for begin, length in zip(begins, lengths)
        ]

    def _begin(self, window: int | None) -> int:
        return 0 if window is None else max(0, self.end - self.length - window + 1)


@dataclass(frozen=True)
class RowShares:
    """Of every process the chunks it works on, in the order of the row."""

    chunks: list[list[Chunk]]

    @classmethod
    def of(cls, spans: Sequence[Span], processes: int) -> "RowShares":
        tokens = sum(span.length for span in spans)
        costs = np.ones(tokens, dtype=np.int64)
        for span in spans:
            costs[span.start : span.start + span.length] += np.arange(span.prefix_length, span.whole_length)
        edges = [tokens * i // (2 * processes) for i in range(2 * processes + 1)]
        chunks = list(itertools.pairwise(edges))
        dearest_first = sorted(chunks, key=lambda chunk: -costs[slice(*chunk)].sum())
        return cls([sorted((dearest_first[i], dearest_first[-1 - i])) for i in range(processes)])

    def rows(self, process: int) -> np.ndarray:
        """The tokens of a process, as rows of the whole."""
        return np.concatenate([np.arange(*chunk) for chunk in self.chunks[process]])

    @property
    def counts(self) -> list[int]:
        """Tokens of every process."""
        return [sum(end - begin for begin, end in chunks) for chunks in self.chunks]

    @property
    def longest(self) -> int:
        """What all of them are padded to."""
        return max(self.counts)

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """Of every token of the row: whose it is, and where it lies among theirs."""
        owner_T, place_T = (np.empty(sum(self.counts), dtype=np.int64) for _ in range(2))
        for process, count in enumerate(self.counts):
            owner_T[self.rows(process)] = process
            place_T[self.rows(process)] = np.arange(count)
        return owner_T, place_T

    def pieces(self, spans: Sequence[Span], process: int) -> list[Piece]:
        """What sequences there are in the chunks of a process, in the order of its tokens."""
        pieces, first = [], 0
        for begin, end in self.chunks[process]:
            for span in spans:
                after, until = max(begin, span.start), min(end, span.start + span.length)
                if after < until:
                    end_in_sequence = span.prefix_length + until - span.start
                    pieces.append(Piece(first + after - begin, until - after, span, end_in_sequence))
            first += end - begin
        return pieces
