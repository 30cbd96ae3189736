"""One optimizer step: gradient accumulation over its micro-batches, and recovery from out-of-memory.

Supervised jobs, RL trainers and `trimtab.Learner` share it. A micro-batch gives its term of the step's loss, already
divided by counts over the whole step (`Totals`): micro-batch size, packing and process count change results by rounding
only. The Learner's terms are sums, which its `optim_step` divides.

So a run that meets a step too large for the device repeats it with smaller micro-batches. The size found is a
`MicroBatchLimit`, which checkpoints store: a resumed run uses the same micro-batches as the run before it. With several
processes, one that runs out of memory leaves the others in the middle of a collective. All abort it, copy their parts
of the optimizer state to main memory, rebuild their sharded models and continue.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from trimtab.algos.group_rewards import answer_sums
from trimtab.algos.supervised_losses import load_balancing_loss
from trimtab.data.batches import TokenBatch
from trimtab.distributed.device import is_out_of_memory
from trimtab.distributed.fsdp import sync_gradients
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.process_group import abort_collectives, abort_reason
from trimtab.distributed.random_state import random_state, restore_random_state
from trimtab.errors import OutOfMemory, RunFailed
from trimtab.models.packed import PackedModel
from trimtab.train.optimizer import Optimizer

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


# ---- out of memory

Result = TypeVar("Result")

MEMORY_FLAGS = "--gradient_checkpointing, --bf16, --lora_rank or --adam_offload needs less memory"


class RebuildModels(Exception):
    """Micro-batches of several processes were too large: process groups and sharded models must be rebuilt."""


class ChecksTooLarge(RebuildModels):
    """The same for the checks before the first step: the run begins anew without them."""


class InsufficientMemory(RunFailed):
    """Out of memory where smaller micro-batches would not help. The run's state is intact and can be saved."""


@dataclass
class MicroBatchLimit:
    """Upper bounds on one micro-batch found by running out of memory; None: the options' values apply."""

    tokens: int | None = None
    samples: int | None = None

    def of_tokens(self, budget: int) -> int:
        return budget if self.tokens is None else min(budget, self.tokens)

    def of_samples(self, count: int) -> int:
        return count if self.samples is None else min(count, self.samples)

    def halve(self, passes: Sequence[tuple[int, int]], *, by_tokens: bool) -> bool:
        """Set the limit to half of the largest micro-batch (tokens, samples). False: none has more than one sample."""
        if not (divisible := [(tokens, samples) for tokens, samples in passes if samples > 1]):
            return False
        tokens, samples = (max(column) for column in zip(*divisible))
        if by_tokens:
            self.tokens = tokens // 2
        else:
            self.samples = samples // 2
        return True

    def __str__(self) -> str:
        parts = [f"{value:,} {name}" for name, value in vars(self).items() if value is not None]
        return " and ".join(parts)

    def columns(self) -> dict[str, int]:
        """Columns for the step's row of metrics."""
        return {f"pass_{name}": value for name, value in vars(self).items() if value is not None}


def retry_smaller(attempt: Callable[[], Result], shrink: Callable[[str], None]) -> Result:
    """Call `attempt` until it succeeds; each time it runs out of memory, call `shrink` with the reason first."""
    while True:
        try:
            return attempt()
        except OutOfMemory as error:
            why = str(error)
        shrink(why)  # outside of `except`, where the traceback no longer keeps the attempt's tensors alive


def undo_step(optimizer: Optimizer) -> Callable[[], None]:
    """A function that undoes the step begun now: it clears the gradients and restores the random state."""
    random_before = random_state()

    def undo() -> None:
        optimizer.clear_gradients()
        restore_random_state(random_before)

    return undo


@contextmanager
def memory_guard(undo: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Turn out-of-memory inside, in this process or in a peer, into OutOfMemory in all of them, after calling
    `undo`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            why = str(error).partition("\n")[0]
            abort_collectives(why)
        elif (reason := abort_reason()) is not None:
            why = reason
        else:
            raise
        undo()
        raise OutOfMemory(why) from error
