"""What every rollout engine can do. Loops know this and `types`; which engine is behind it is the caller's choice."""

from collections.abc import Collection, Generator, Sequence
from typing import Protocol, runtime_checkable

from trimtab.rollout.types import Rollout, Sampling


@runtime_checkable
class Engine(Protocol):
    exact: bool
    """Whether the log-probs of what is drawn are exactly the trainer's."""

    def generate(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        *,
        seeds: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
    ) -> list[Rollout]:
        """All answers, in the order of the prompts and their samples.

        `seeds`: one for each prompt, from which its samples draw; `limits`: each prompt's own max_new_tokens.
        """

    def stream(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        *,
        seeds: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
    ) -> Generator[Rollout]:
        """The same answers as they finish; to close it ends them."""

    def abort(self, prompts: Collection[int] | None = None) -> None:
        """Stop answers to these prompts of the stream at work, or all: they come as they are, finished by "abort"."""

    def sleep(self) -> None:
        """Give memory back while the model trains."""

    def rest(self) -> None:
        """Between the calls of a training loop: give memory back if little else is free."""

    def wake(self) -> None:
        """Be ready for the next call."""
