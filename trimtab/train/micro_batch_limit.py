"""Recovery from out-of-memory: repeat the step with smaller micro-batches.

The micro-batch size changes results by rounding only, so a run that meets a step too large for the device continues
with smaller ones. The size found is a `MicroBatchLimit`, which checkpoints store: a resumed run uses the same
micro-batches as the run before it.

With several processes, one that runs out of memory leaves the others in the middle of a collective. All abort it, copy
their parts of the optimizer state to main memory, rebuild their sharded models and continue.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from trimtab.distributed.device import is_out_of_memory
from trimtab.distributed.process_group import abort_collectives, abort_reason
from trimtab.distributed.random_state import random_state, restore_random_state
from trimtab.errors import OutOfMemory, RunFailed
from trimtab.train.optimizer import Optimizer

Result = TypeVar("Result")

FLAGS = "--gradient_checkpointing, --bf16, --lora_rank or --adam_offload needs less memory"


class RebuildModels(Exception):
    """Micro-batches of several processes were too large: process groups and sharded models must be rebuilt."""


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
