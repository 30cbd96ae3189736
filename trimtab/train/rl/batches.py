"""What an update of the policy learns from: micro-batches of answers and of text, and how they travel.

Answers bring columns of their drawn tokens in `extra` (advantages_N, sampled_N and others); text has its tokens alone.
A process is sent a *slice*: the tokens of all its passes as they will lie in their rows. It makes the micro-batches
itself, one at a time.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from trimtab.data.batches import Example, TokenBatch


class AnswerBatch(TokenBatch):
    """Sampled answers after their prompts."""


class TextBatch(TokenBatch):
    """Text that is learnt beside the answers (PTX)."""


@dataclass
class Slice:
    ids_T: Tensor  # int32
    trained_T: Tensor
    lengths_S: Tensor  # tokens that a sequence has of its own
    borrowed_S: Tensor  # tokens that it borrows from the one before
    samples: list[int]  # how many sequences each pass has
    weights: list[float]  # what each pass counts: 1 or 0
    columns: dict[str, Tensor] = field(default_factory=dict)  # over the trained tokens

    batch_class: ClassVar[type[TokenBatch]]

    def batches(self) -> Iterator[TokenBatch]:
        """The micro-batches, one after another."""
        ids, trained = self.ids_T.numpy(), self.trained_T.numpy()
        lengths, borrowed = self.lengths_S.numpy(), self.borrowed_S.numpy()
        places = zip(*(_slices(counts) for counts in (self.samples, self.tokens, self.trained)))
        for (sequences, row, among), weight in zip(places, self.weights):
            extra = {name: column[among] for name, column in self.columns.items()}
            batch = self.batch_class.of_row(ids[row], trained[row], lengths[sequences], borrowed[sequences], **extra)
            batch.weight = weight
            yield batch

    @property
    def tokens(self) -> list[int]:
        """How many each pass has in its row."""
        return _sums(self.lengths_S, self.samples)

    @property
    def trained(self) -> list[int]:
        """How many of them are trained."""
        return _sums(self.trained_T, self.tokens)


class AnswerSlice(Slice):
    batch_class = AnswerBatch


class TextSlice(Slice):
    batch_class = TextBatch

    @classmethod
    def of(cls, passes: Sequence[Sequence[Example]], weights: list[float]) -> "TextSlice":
        examples = [example for part in passes for example in part]
        lengths_S = torch.tensor([len(ids) for ids, _ in examples])
        trained = np.concatenate([mask for _, mask in examples])
        trained[(lengths_S.cumsum(0) - lengths_S).numpy()] = False  # nothing predicts the first token
        ids_T = torch.from_numpy(np.concatenate([ids for ids, _ in examples]).astype(np.int32))
        counts = [len(part) for part in passes]
        return cls(ids_T, torch.from_numpy(trained), lengths_S, torch.zeros_like(lengths_S), counts, weights)


def _slices(counts: list[int]) -> list[slice]:
    return [slice(start, end) for start, end in itertools.pairwise(itertools.accumulate(counts, initial=0))]


def _sums(values: Tensor, counts: list[int]) -> list[int]:
    """Of the first so many, the next so many, and so on; never of none."""
    starts = [part.start for part in _slices(counts)]
    return np.add.reduceat(values.numpy(), starts, dtype=np.int64).tolist()


def batches_of(slices: Sequence[Slice]) -> Iterator[TokenBatch]:
    for part in slices:
        yield from part.batches()
