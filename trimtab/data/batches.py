"""The record that a micro-batch is: token sequences one after another, without padding.

A sequence may borrow its beginning from one before it (several answers to one prompt): the prompt's tokens then stand
in the row once, and the later sequences own only what comes after them.
"""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
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
    trained_N: Tensor  # row index of every trained token: counted here, since a device must be waited for
    spans: list[Span]
    extra: dict[str, Tensor] = field(default_factory=dict)  # what a task adds: labels, margins, reference log-probs
    beside: "TokenBatch | None" = None  # other sequences that a task looks at together with these
    weight: float = 1.0  # 0: takes part where all processes must, and counts for nothing
    routes_TLK: Tensor | None = None  # experts that a mixture's layers use instead of their own choices

    @classmethod
    def of(cls, examples: Sequence[Example], shared: Sequence[int] | None = None, **extra: Tensor) -> Self:
        """`shared[i]`: how many first tokens sequence i borrows, which i - 1 has too; none of them is trained."""
        lengths = np.array([len(tokens) for tokens, _ in examples])
        borrowed = np.zeros_like(lengths) if shared is None else np.array(shared)
        ids, trained = (
            np.concatenate([example[column][first:] for example, first in zip(examples, borrowed)]) for column in (0, 1)
        )
        return cls.of_row(ids, trained, lengths - borrowed, borrowed, **extra)

    @classmethod
    def of_row(
        cls, ids: np.ndarray, trained: np.ndarray, lengths: np.ndarray, borrowed: np.ndarray, **extra: Tensor
    ) -> Self:
        """From the tokens as they lie in the row: `lengths` of their own has every sequence, after `borrowed` ones of
        the sequence before."""
        _check_lenders(lengths, borrowed)
        starts, borrows = lengths.cumsum() - lengths, borrowed > 0
        sequences = np.arange(len(lengths))
        # One that borrows does so from the last that does not.
        prefixes = np.where(borrows, starts[np.maximum.accumulate(np.where(borrows, 0, sequences))], 0)
        owners = np.repeat(sequences, lengths)
        places = np.arange(len(owners))
        positions = places - np.repeat(starts - borrowed, lengths)
        previous, trained = places - 1, np.array(trained, dtype=bool)
        own = lengths > 0
        previous[starts[own]] = np.where(borrows, prefixes + borrowed - 1, 0)[own]
        trained[starts[own & ~borrows]] = False  # nothing predicts the first token
        columns = [np.asarray(ids, dtype=np.int64), positions, trained, previous, owners, np.flatnonzero(trained)]
        ids_T, positions_T, trained_T, previous_T, owners_T, trained_N = (torch.from_numpy(c) for c in columns)
        spans = [Span(*span) for span in zip(*(column.tolist() for column in (starts, lengths, prefixes, borrowed)))]
        return cls(ids_T, positions_T, trained_T, previous_T, owners_T, trained_N, spans, extra)

    @property
    def targets_N(self) -> Tensor:
        return self.ids_T[self.trained_N]

    @property
    def predictors_N(self) -> Tensor:
        """The position before each trained token: the one whose hidden state predicts it."""
        return self.previous_T[self.trained_N]

    @property
    def owners_N(self) -> Tensor:
        """Which sequence each trained token belongs to."""
        return self.owners_T[self.trained_N]

    @property
    def last_S(self) -> Tensor:
        """Row index of every sequence's last token."""
        last_S = torch.tensor([s.start + s.length - 1 for s in self.spans])
        return sent(last_S, self.ids_T.device)

    @property
    def tokens(self) -> int:
        return len(self.ids_T)

    @property
    def trained_tokens(self) -> int:
        return len(self.trained_N)

    def sequence(self, index: int) -> Tensor:
        """All ids of one sequence, borrowed ones included."""
        return self.ids_T[torch.from_numpy(self.spans[index].rows()).to(self.ids_T.device)]

    def separate(self) -> Self:
        """The same sequences, none of which borrows: the tokens that it borrowed are its own, and are not trained."""
        rows = np.concatenate([span.rows() for span in self.spans])
        own = np.concatenate([np.arange(span.whole_length) >= span.prefix_length for span in self.spans])
        ids, trained = self.ids_T.cpu().numpy()[rows], self.trained_T.cpu().numpy()[rows] & own
        lengths = np.array([span.whole_length for span in self.spans])
        whole = self.of_row(ids, trained, lengths, np.zeros_like(lengths)).to(self.ids_T.device)
        routes_TLK = None if self.routes_TLK is None else self.routes_TLK[torch.from_numpy(rows)]
        return replace(whole, extra=self.extra, beside=self.beside, weight=self.weight, routes_TLK=routes_TLK)

    def to(self, device: torch.device) -> Self:
        """Without waiting for the device."""
        tensors = {
            field.name: sent(getattr(self, field.name), device)
            for field in fields(self)
            if isinstance(getattr(self, field.name), Tensor)
        }
        extra = {name: sent(value, device) for name, value in self.extra.items()}
        beside = None if self.beside is None else self.beside.to(device)
        return replace(self, extra=extra, beside=beside, **tensors)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """To a device, which need not be waited for: out of ordinary memory a copy begins when all work before it is done,
    and only then does the host go on."""
    if tensor.device.type == "cpu" and can_pin(device.type):
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@functools.cache
def can_pin(kind: str) -> bool:
    """Whether devices of this kind can read memory that stays where it is."""
    if kind in ("cpu", "meta"):
        return False
    try:
        return torch.zeros(1).pin_memory().is_pinned()
    except (RuntimeError, NotImplementedError):
        return False


def _check_lenders(lengths: np.ndarray, borrowed: np.ndarray) -> None:
    """What a sequence borrows the one before owns, or has borrowed itself."""
    here, before = borrowed[1:], borrowed[:-1]
    fits = (here == 0) | (here == before) | ((before == 0) & (here <= lengths[:-1]))
    assert fits.all() and not borrowed[:1].any()


# ---- Cut the samples of one optimiser step into micro-batches. The step itself is never changed.


def pack(lengths: list[int], budget: int) -> list[list[int]]:
    """First-fit-decreasing bin packing: indices in bins of at most `budget` tokens (a longer sample is alone)."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for b, free in enumerate(room):
            if lengths[i] <= free:
                bins[b].append(i)
                room[b] -= lengths[i]
                break
        else:
            bins.append([i])
            room.append(budget - lengths[i])
    return bins


def chunk(lengths: list[int], count: int) -> list[list[int]]:
    """Micro-batches of `count` samples. Neighbours in length go together, so that little is lost to padding."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return [order[begin : begin + count] for begin in range(0, len(order), count)]


# ---- Which samples form optimiser step k: a pure function of (seed, k), so a resumed run needs only the step number.


@dataclass
class SampleOrder:
    """Every epoch is a fresh permutation, cut into steps of `batch_size`; the last step of an epoch may be smaller."""

    samples: int
    batch_size: int
    epochs: int
    seed: int
    most: int | None = None
    """Stop after this many steps."""
    shuffled: bool = True
    """Else every epoch has the samples in the order of the data."""
    multiple: int = 1
    """An epoch leaves out the last samples of its permutation that do not fill a multiple of this number."""

    @property
    def samples_per_epoch(self) -> int:
        return self.samples - self.samples % self.multiple

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples_per_epoch // self.batch_size)

    @property
    def steps(self) -> int:
        every = self.steps_per_epoch * self.epochs
        return every if self.most is None else min(every, self.most)

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def ends_epoch(self, step: int) -> bool:
        return (step + 1) % self.steps_per_epoch == 0

    def step_samples(self, step: int) -> list[int]:
        epoch, index = divmod(step, self.steps_per_epoch)
        order = self._permutation(epoch)[: self.samples_per_epoch]
        return order[index * self.batch_size : (index + 1) * self.batch_size].tolist()

    def _permutation(self, epoch: int) -> np.ndarray:
        if not self.shuffled:
            return np.arange(self.samples)
        if self._cache.get("epoch") != epoch:
            self._cache.update(epoch=epoch, order=np.random.default_rng([self.seed, epoch]).permutation(self.samples))
        return self._cache["order"]

    @cached_property
    def _cache(self) -> dict:
        return {}

    def fingerprint(self, content: str) -> str:
        """Identifies data and order together: the content's own hash and everything the order depends on."""
        key = f"{content}/{self.samples}/{self.batch_size}/{self.seed}"
        if not self.shuffled or self.multiple > 1:
            key += f"/{self.shuffled}/{self.multiple}"
        return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
