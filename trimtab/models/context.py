"""Hidden states of a row that several processes work on together, and what is read off them.

Every process has the hidden states of its own tokens only, and reads off what it can: log-probs, scores, values. These
are a few numbers a token and are gathered, so that whoever uses them sees the whole batch and need not know.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.distributed.peers import Peers
from trimtab.distributed.portions import gather_portions
from trimtab.models.context_attention import SharedRow

Routers = tuple[Tensor, ...] | None


@dataclass
class Located:
    """Which of some tokens of a row are here, and where all of them are among what is gathered."""

    here: Tensor
    places_N: Tensor
    most: int  # tokens that one process has
    peers: Peers

    @classmethod
    def of(cls, row: SharedRow, rows_N: Tensor) -> "Located":
        peers, owner_N = row.context.peers, row.owner_T[rows_N]
        counts = torch.bincount(owner_N, minlength=peers.size)
        by_owner = owner_N.argsort(stable=True)
        within = torch.empty_like(owner_N)
        first = counts.cumsum(0) - counts
        within[by_owner] = torch.arange(len(owner_N), device=owner_N.device) - first[owner_N[by_owner]]
        most = max(1, int(counts.max()))
        return cls((owner_N == peers.rank).nonzero()[:, 0], owner_N * most + within, most, peers)


@dataclass
class ReadStates:
    """Hidden states [N, D] of the tokens that were asked for: all of them, or those that are here."""

    states_ND: Tensor
    routers: Routers  # of the row's tokens, or of those that are here
    located: Located | None = None

    def own(self, values_N: Tensor) -> Tensor:
        """What belongs to the hidden states, of values for all tokens that were asked for."""
        return values_N if self.located is None else values_N.index_select(0, self.located.here)

    def whole(self, values: Tensor) -> Tensor:
        """Values [N, ...] of all, from those of the hidden states."""
        return values if self.located is None else _Whole.apply(values, self.located)


class _Whole(torch.autograd.Function):
    """All processes go on alike with what is gathered: each takes its own part of the gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, located: Located) -> Tensor:
        ctx.located = located
        padded = values.new_zeros(located.most, *values.shape[1:])
        padded[: len(values)] = values
        return gather_portions(padded, located.peers).index_select(0, located.places_N)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.index_select(0, ctx.located.here), None
