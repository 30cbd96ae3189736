"""Gradient accumulation over the micro-batches of one optimizer step.

Supervised jobs, RL trainers and `trimtab.Learner` share it. A micro-batch gives its term of the step's loss, already
divided by counts over the whole step (`Totals`): micro-batch size, packing and process count change results by rounding
only. The Learner's terms are sums, which its `optim_step` divides.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.algos.group_rewards import answer_sums
from trimtab.algos.supervised_losses import load_balancing_loss
from trimtab.data.batches import TokenBatch
from trimtab.distributed.fsdp import sync_gradients
from trimtab.distributed.mesh import Mesh
from trimtab.models.packed import PackedModel

Totals = dict[str, float]
"""Counts over the whole step: the denominators of its means."""


@dataclass
class LossTerm:
    """One micro-batch's part of the step. Loss and figures are already divided by totals, so parts are summed."""

    loss: Tensor
    figures: dict[str, Any]  # without gradients

    def add_to(self, sums: dict[str, Any], weight: float) -> None:
        for name, value in self.figures.items():
            sums[name] = sums.get(name, 0.0) + value * weight


def accumulate(
    model: PackedModel, mesh: Mesh, batches: Iterable[TokenBatch], count: int, share: Callable[[TokenBatch], LossTerm]
) -> dict[str, Any]:
    """Add the gradients of `count` micro-batches to the accumulated ones; returns the sums of their figures here.

    Each batch is taken after the backward pass of the one before. A sharded model sums gradients over its processes in
    the last backward pass.
    """
    figures: dict[str, Any] = {}
    for place, batch in enumerate(batches, start=1):
        sync_gradients(model, place == count)
        found = share(batch)
        # FSDP averages gradients over processes, but loss terms are summed: hence the factor.
        (found.loss * (batch.weight * mesh.gradients.size)).backward()
        found.add_to(figures, batch.weight)
    return figures


def balance_loss_term(model: PackedModel, router_logits: Any, batch: TokenBatch, tokens: float) -> Tensor:
    """The experts' load-balancing loss of a micro-batch, weighted by its share of the step's `tokens`."""
    balance = load_balancing_loss(router_logits, model.config.num_experts_per_tok, model.sum_over_row)
    return balance * (batch.tokens / tokens)


def sums_by_sequence(values_N: Tensor, batch: TokenBatch) -> Tensor:
    """Sum of the trained tokens' values in every sequence [S]."""
    return answer_sums(values_N, batch.owners_N, len(batch.spans))


def counts_by_sequence(batch: TokenBatch) -> Tensor:
    """Trained tokens in every sequence [S], as floats."""
    owners_N = batch.owners_N
    return sums_by_sequence(torch.ones(len(owners_N), device=owners_N.device), batch)  # no device sync
