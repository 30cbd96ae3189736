"""When a micro-batch does not fit into memory: begin the step again in smaller ones.

How a step is cut into micro-batches changes nothing but rounding, so a run that meets a step too large for the device
continues with smaller ones. What it has learnt about its device is a `MicroBatchLimit`, which lies in its checkpoints:
a resumed run cuts its steps as the run before it did.

In several processes, one that runs out of memory leaves the others in the middle of a collective. All abort it, keep
their parts of what was learnt in main memory, build their split models again and continue.
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
    """Several processes have found their passes too large: what they made together must be made again."""


class InsufficientMemory(RunFailed):
    """Memory is short where no smaller pass would help. What the run holds is whole and can be saved."""


@dataclass
class MicroBatchLimit:
    """The most that one pass may hold; None: what the options say."""

    tokens: int | None = None
    samples: int | None = None

    def of_tokens(self, budget: int) -> int:
        return budget if self.tokens is None else min(budget, self.tokens)

    def of_samples(self, count: int) -> int:
        return count if self.samples is None else min(count, self.samples)

    def halve(self, passes: Sequence[tuple[int, int]], *, by_tokens: bool) -> bool:
        """Half of the largest of the passes (tokens, samples) that did not fit. False: all have a single sample."""
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
        """For the row of metrics of a step."""
        return {f"pass_{name}": value for name, value in vars(self).items() if value is not None}


def retry_smaller(attempt: Callable[[], Result], shrink: Callable[[str], None]) -> Result:
    """What `attempt` gives; each time it runs out of memory, `shrink` is told why and it is made again."""
    while True:
        try:
            return attempt()
        except OutOfMemory as error:
            why = str(error)
        shrink(why)  # outside, where nothing holds the attempt's tensors any more


def undo_step(optimizer: Optimizer) -> Callable[[], None]:
    """What undoes a step from here on: forget its gradients and its random numbers."""
    random_before = random_state()

    def undo() -> None:
        optimizer.clear_gradients()
        restore_random_state(random_before)

    return undo


@contextmanager
def memory_guard(undo: Callable[[], None] = lambda: None) -> Iterator[None]:
    """A lack of memory inside, in this process or in one that it works with, becomes OutOfMemory in all of them, after
    `undo` has taken back what was begun."""
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
