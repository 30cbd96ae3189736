"""Sequences of which some go on from what is in the cache: what their own tokens attend to, once these are stored too.

Two ways to the same numbers:
- in one row (`parts`): attention of sequences of any length, each with its own tokens as queries and all of its places
  as keys; where a device has it;
- block by block (`alike`): those of one length together.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from trimtab.data.batches import Span, sent
from trimtab.models.attention import cumulative

MOST_TOGETHER = 2**16  # tokens whose keys and values are copied at a time, unless one sequence has more


@dataclass
class Part:
    """Sequences that attend in one call (models/varlen.py): keys are the flattened cache's."""

    own: slice  # their tokens in the row
    query_starts: Tensor
    key_starts: Tensor
    key_rows: Tensor
    longest: int


@dataclass
class OnePart:
    """All sequences of a read that may be recorded."""

    part: Part

    @property
    def parts(self) -> list[Part]:
        return [self.part]

    @property
    def alike(self) -> list[tuple[Tensor, Tensor]]:
        raise AssertionError("only where there is attention of sequences of any length")


class Continued:
    def __init__(self, spans: list[Span], places: list[np.ndarray], device: torch.device):
        """All sequences of a row in its order: `spans` of their own tokens there, `places` of the whole ones in the
        cache."""
        self.spans, self.places, self.device = spans, places, device

    @cached_property
    def parts(self) -> list[Part]:
        return [self._part(first, end) for first, end in self._ranges()]

    def _ranges(self) -> Iterator[tuple[int, int]]:
        first, total = 0, 0
        for number, places in enumerate(self.places):
            if number > first and total + len(places) > MOST_TOGETHER:
                yield first, number
                first, total = number, 0
            total += len(places)
        yield first, len(self.places)

    def _part(self, first: int, end: int) -> Part:
        spans, places = self.spans[first:end], self.places[first:end]
        wholes = [len(own) for own in places]
        return Part(
            slice(spans[0].start, spans[-1].start + spans[-1].length),
            sent(cumulative([span.length for span in spans]), self.device),
            sent(cumulative(wholes), self.device),
            sent(torch.from_numpy(np.concatenate(places)), self.device),
            max(wholes),
        )

    @cached_property
    def alike(self) -> list[tuple[Tensor, Tensor]]:
        """Of those that go on: own tokens in the row [S, new], and places of the whole [S, whole]."""
        groups: dict[tuple[int, int], list[tuple[np.ndarray, np.ndarray]]] = {}
        for span, places in zip(self.spans, self.places):
            if len(places) > span.length:
                own = np.arange(span.start, span.start + span.length)
                groups.setdefault((len(own), len(places)), []).append((own, places))
        found = []
        for (_, whole), group in groups.items():
            most = max(1, MOST_TOGETHER // whole)
            for first in range(0, len(group), most):
                own, places = (np.stack(part) for part in zip(*group[first : first + most]))
                found.append((self._tensor(own), self._tensor(places)))
        return found

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)
