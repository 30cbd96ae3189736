"""The record that a micro-batch is: samples one after another, without padding."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass
class TokenBatch:
    """T tokens of several samples. `trained` marks the tokens to be predicted, never a sample's first."""

    ids_T: Tensor
    positions_T: Tensor
    trained_T: Tensor
    lengths: list[int]

    @classmethod
    def of(cls, examples: list[tuple[np.ndarray, np.ndarray]]) -> "TokenBatch":
        """From (ids, trained) pairs."""
        lengths = [len(ids) for ids, _ in examples]
        trained = [np.asarray(mask, dtype=bool).copy() for _, mask in examples]
        for mask in trained:
            mask[:1] = False  # nothing predicts the first token
        return cls(
            torch.from_numpy(np.concatenate([np.asarray(ids, dtype=np.int64) for ids, _ in examples])),
            torch.cat([torch.arange(n) for n in lengths]),
            torch.from_numpy(np.concatenate(trained)),
            lengths,
        )

    @property
    def targets_N(self) -> Tensor:
        return self.ids_T[self.trained_T]

    @property
    def predictors_N(self) -> Tensor:
        """The position before each trained token: the one whose hidden state predicts it."""
        return self.trained_T.nonzero()[:, 0] - 1

    @property
    def owners_N(self) -> Tensor:
        """Which sample of the batch each trained token belongs to."""
        lengths = torch.tensor(self.lengths, device=self.ids_T.device)
        return torch.arange(len(self.lengths), device=self.ids_T.device).repeat_interleave(lengths)[self.trained_T]

    @property
    def tokens(self) -> int:
        return len(self.ids_T)

    @property
    def trained_tokens(self) -> int:
        return int(self.trained_T.sum())

    def to(self, device: torch.device) -> "TokenBatch":
        move = (x.to(device, non_blocking=True) for x in (self.ids_T, self.positions_T, self.trained_T))
        return TokenBatch(*move, self.lengths)
