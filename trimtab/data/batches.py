"""The record that a micro-batch is: token sequences one after another, without padding.

A sequence may borrow its beginning from one before it (several answers to one prompt): the prompt's tokens then stand
in the row once, and the later sequences own only what comes after them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

Example = tuple[np.ndarray, np.ndarray]  # (ids, trained)


@dataclass(frozen=True)
class Span:
    """Where a sequence lies in the row: `length` tokens of its own, after `prefix_length` borrowed ones."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0

    @property
    def whole_length(self) -> int:
        return self.prefix_length + self.length

    def rows(self) -> np.ndarray:
        """Row index of each of its tokens, the borrowed ones first."""
        borrowed = np.arange(self.prefix_start, self.prefix_start + self.prefix_length)
        return np.concatenate([borrowed, np.arange(self.start, self.start + self.length)])


@dataclass
class TokenBatch:
    """T tokens of several sequences. `trained` marks the tokens to be predicted, never a sequence's first."""

    ids_T: Tensor
    positions_T: Tensor
    trained_T: Tensor
    previous_T: Tensor  # row index of the token before, in the same sequence; 0 for a first one
    owners_T: Tensor  # which sequence a token belongs to
    spans: list[Span]
    extra: dict[str, Tensor] = field(default_factory=dict)  # what a task adds: labels, margins, reference log-probs
    beside: "TokenBatch | None" = None  # other sequences that a task looks at together with these
    weight: float = 1.0  # 0: takes part where all processes must, and counts for nothing

    @classmethod
    def of(cls, examples: Sequence[Example], shared: Sequence[int] | None = None, **extra: Tensor) -> Self:
        """`shared[i]`: how many first tokens sequence i borrows, which i - 1 has too; none of them is trained."""
        spans: list[Span] = []
        ids, positions, trained, previous = [], [], [], []
        start = 0
        for i, (tokens, mask) in enumerate(examples):
            borrowed = shared[i] if shared is not None else 0
            length = len(tokens) - borrowed
            span = Span(start, length, _lender(spans[-1], borrowed) if borrowed else 0, borrowed)
            own = np.array(mask[borrowed:], dtype=bool)
            if not borrowed:
                own[:1] = False  # nothing predicts the first token
            before = np.arange(start - 1, start + length - 1)
            before[:1] = span.prefix_start + borrowed - 1 if borrowed else 0
            spans.append(span)
            ids.append(np.asarray(tokens[borrowed:], dtype=np.int64))
            positions.append(np.arange(borrowed, borrowed + length))
            trained.append(own)
            previous.append(before)
            start += length
        owners = np.repeat(np.arange(len(spans)), [s.length for s in spans])
        columns = (*(np.concatenate(c) for c in (ids, positions, trained, previous)), owners)
        ids_T, positions_T, trained_T, previous_T, owners_T = (torch.from_numpy(column) for column in columns)
        return cls(ids_T, positions_T, trained_T, previous_T, owners_T, spans, extra)

    @property
    def targets_N(self) -> Tensor:
        return self.ids_T[self.trained_T]

    @property
    def predictors_N(self) -> Tensor:
        """The position before each trained token: the one whose hidden state predicts it."""
        return self.previous_T[self.trained_T]

    @property
    def owners_N(self) -> Tensor:
        """Which sequence each trained token belongs to."""
        return self.owners_T[self.trained_T]

    @property
    def last_S(self) -> Tensor:
        """Row index of every sequence's last token."""
        return torch.tensor([s.start + s.length - 1 for s in self.spans], device=self.ids_T.device)

    @property
    def tokens(self) -> int:
        return len(self.ids_T)

    @property
    def trained_tokens(self) -> int:
        return int(self.trained_T.sum())

    def sequence(self, index: int) -> Tensor:
        """All ids of one sequence, borrowed ones included."""
        return self.ids_T[torch.from_numpy(self.spans[index].rows()).to(self.ids_T.device)]

    def to(self, device: torch.device) -> Self:
        tensors = {
            field.name: getattr(self, field.name).to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(getattr(self, field.name), Tensor)
        }
        extra = {name: value.to(device) for name, value in self.extra.items()}
        beside = None if self.beside is None else self.beside.to(device)
        return replace(self, extra=extra, beside=beside, **tensors)


def _lender(before: Span, borrowed: int) -> int:
    """Where the tokens lie that a sequence shares with the one before: that one may have borrowed them itself."""
    assert borrowed == before.prefix_length if before.prefix_length else borrowed <= before.length
    return before.prefix_start if before.prefix_length else before.start
