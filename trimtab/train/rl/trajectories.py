"""Token sequences of an RL run: a prompt, and after it tokens of the model and of the world, in any order.

An answer is the simplest one: the model drew everything after the prompt. In a conversation with tools or users the
world speaks between the model's turns. S sequences lie one after another in flat columns over all their T tokens;
columns over the N tokens that the model drew itself (`drawn_T`) have nothing of prompts and world.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from trimtab.train.rl.batches import AnswerSlice


@dataclass
class Trajectories:
    ids_T: Tensor  # int32
    drawn_T: Tensor
    prompt_lengths_S: Tensor
    sequence_lengths_S: Tensor  # of prompt and all that follows

    def __len__(self) -> int:
        return len(self.sequence_lengths_S)

    def prompt(self, i: int) -> list[int]:
        start = int(self.offsets_S[i])
        return self.ids_T[start : start + int(self.prompt_lengths_S[i])].tolist()

    def response(self, i: int) -> list[int]:
        """Everything after the prompt."""
        return self._response(i).tolist()

    def response_bytes(self, i: int) -> bytes:
        """The same of equal responses, and of no others."""
        return self._response(i).tobytes()

    def _response(self, i: int) -> np.ndarray:
        return self.ids_T.numpy()[self._responses[i]]

    def drawn(self, i: int) -> Tensor:
        """Which tokens of the response the model drew."""
        start, length = int(self.offsets_S[i]), int(self.sequence_lengths_S[i])
        return self.drawn_T[start + int(self.prompt_lengths_S[i]) : start + length]

    # ---- where things lie

    @cached_property
    def _responses(self) -> list[slice]:
        return runs(self.offsets_S + self.prompt_lengths_S, self.sequence_lengths_S - self.prompt_lengths_S)

    @cached_property
    def offsets_S(self) -> Tensor:
        """Where in the columns over all tokens a sequence begins."""
        return self.sequence_lengths_S.cumsum(0) - self.sequence_lengths_S

    @cached_property
    def lengths_S(self) -> Tensor:
        """How many tokens the model drew."""
        return totals(self.drawn_T, self.sequence_lengths_S)

    @cached_property
    def starts_S(self) -> Tensor:
        """Where in the columns over drawn tokens those of a sequence begin."""
        return self.lengths_S.cumsum(0) - self.lengths_S

    @cached_property
    def owners_N(self) -> Tensor:
        """Which sample a drawn token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths_S)

    @cached_property
    def remaining_N(self) -> Tensor:
        """How many drawn tokens of the same sample follow."""
        last_N = torch.repeat_interleave(self.starts_S + self.lengths_S - 1, self.lengths_S)
        return last_N.sub_(torch.arange(len(last_N)))

    def tokens_of(self, samples: Sequence[int]) -> Tensor:
        """Where the drawn tokens of these samples lie in the columns over them, in the samples' order."""
        places = torch.arange(len(self.owners_N))
        return joined(places, self.drawn_of(torch.as_tensor(samples, dtype=torch.int64)))

    def drawn_of(self, samples: Tensor) -> list[slice]:
        """The same places, as runs."""
        return runs(self.starts_S[samples], self.lengths_S[samples])

    # ---- how they are cut into passes

    @cached_property
    def prompts(self) -> list[int]:
        """A number of each sample's prompt, the same for equal prompts."""
        known: dict[bytes, int] = {}
        ids = self.ids_T.numpy()
        spans = zip(self.offsets_S.tolist(), self.prompt_lengths_S.tolist())
        return [known.setdefault(ids[start : start + length].tobytes(), len(known)) for start, length in spans]

    @cached_property
    def costs(self) -> list[tuple[int, int, int]]:
        """Of each sample: which prompt it has, the tokens of that, and those that follow."""
        after = (self.sequence_lengths_S - self.prompt_lengths_S).tolist()
        return list(zip(self.prompts, self.prompt_lengths_S.tolist(), after))

    def slice(self, passes: Sequence[Sequence[int] | None], *columns: str) -> AnswerSlice:
        """The passes of one process, with these columns of their drawn tokens. Samples that have the prompt of the one
        before share its tokens. None: with fewer samples than processes, one takes part with a sample that counts for
        nothing."""
        samples = [i for part in passes for i in part or [0]]
        counts = [len(part or [0]) for part in passes]
        chosen = torch.tensor(samples)
        prompts_S = torch.tensor(self.prompts)[chosen]
        shares_S = torch.zeros(len(samples), dtype=torch.bool)
        shares_S[1:] = prompts_S[1:] == prompts_S[:-1]
        shares_S[torch.tensor([0, *counts[:-1]]).cumsum(0)] = False  # a pass's first
        borrowed_S = torch.where(shares_S, self.prompt_lengths_S[chosen], 0)
        lengths_S = self.sequence_lengths_S[chosen] - borrowed_S
        rows, drawn = runs(self.offsets_S[chosen] + borrowed_S, lengths_S), self.drawn_of(chosen)
        return AnswerSlice(
            joined(self.ids_T, rows),
            joined(self.drawn_T, rows),
            lengths_S,
            borrowed_S,
            counts,
            [0.0 if part is None else 1.0 for part in passes],
            {name: joined(getattr(self, name), drawn) for name in columns},
        )


def totals(values: Tensor, lengths_S: Tensor) -> Tensor:
    """How many of the first so many, of the next so many, and so on, are true; of none, none."""
    found_S, some_S = torch.zeros_like(lengths_S), lengths_S > 0
    starts = (lengths_S.cumsum(0) - lengths_S)[some_S].numpy()
    if len(starts):
        found_S[some_S] = torch.from_numpy(np.add.reduceat(values.numpy(), starts, dtype=np.int64))
    return found_S


def runs(starts_S: Tensor, lengths_S: Tensor) -> list[slice]:
    return [slice(*ends) for ends in zip(starts_S.tolist(), (starts_S + lengths_S).tolist())]


def joined(column: Tensor, runs: list[slice]) -> Tensor:
    """These runs of a column, one after another."""
    values = column.numpy()
    return torch.from_numpy(np.concatenate([values[run] for run in runs])) if runs else column[:0]
