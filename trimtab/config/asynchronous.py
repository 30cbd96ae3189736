"""Options of answers that outlive an update: how far ahead of learning they are written, and how old they may get.

A run whose answers may not get older at all is the synchronous one, in its own code: `outlives_updates` says which.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trimtab.config.option import Options, option
from trimtab.config.placement import ClusterOptions
from trimtab.config.rl import PromptOptions, RecordingOptions, RolloutOptions
from trimtab.errors import UserError

BOUND_PER_BATCH = 4
"""--async_staleness for each batch of --async_queue_size, if nobody says how old answers may get."""


@dataclass(frozen=True, kw_only=True)
class AsyncOptions(Options):
    """Asynchronous training"""

    async_train: bool = False
    """Answers outlive an update: those of later iterations are under way while the policy learns, and what is not whole
    by then goes on with the new weights."""
    async_queue_size: int = option(1, at_least=0, needs="async_train")
    """Batches that are under way ahead of the one to be learnt from; 0: none, as without --async_train."""
    async_staleness: int | None = option(None, at_least=0, needs="async_train")
    """At most so many iterations lie between the start of an answer and its use; unset: 4 for each batch of
    --async_queue_size; 0: none, as without --async_train."""
    partial_rollout: bool = False
    """Engines of their own take new weights in the middle of answers, which then go on; without, they first end those
    that they write. An engine where the policy is always goes on."""
    async_timeout: float = option(600.0, above=0, needs="async_train")
    """Seconds without a token, a reward or a step after which the run ends, with a checkpoint and a table of what every
    answer was waiting for."""

    @property
    def outlives_updates(self) -> bool:
        """Whether answers may be learnt from by another policy than the one that began them; the same before and after
        options are settled."""
        return self.async_train and self.async_queue_size > 0 and self.async_staleness != 0

    def settle(self, changes: dict[str, Any]) -> Iterable[str]:
        if not self.async_train:
            return
        if self.async_queue_size and self.async_staleness == 0:
            changes["async_queue_size"] = 0
            yield from self.idle(["async_queue_size"], "with --async_staleness 0: nothing is written ahead")
        elif not self.async_queue_size:
            changes["async_staleness"] = 0
            if self.async_staleness:
                yield from self.idle(["async_staleness"], "with --async_queue_size 0: nothing is written ahead")
        elif self.async_staleness is None:
            changes["async_staleness"] = BOUND_PER_BATCH * self.async_queue_size

    def check(self) -> Iterable[str]:
        if self.partial_rollout and not self.async_train:
            raise UserError("--partial_rollout lets answers go on after an update: add --async_train, or leave it out")
        if not self.outlives_updates:
            return self.idle(["partial_rollout"], "where nothing is written ahead")
        assert self.async_staleness is not None, "settled"
        if self.async_staleness < self.async_queue_size:
            raise UserError(
                f"--async_staleness {self.async_staleness} is less than --async_queue_size {self.async_queue_size}: "
                f"answers so many batches ahead are as old when their turn comes; give at least "
                f"{self.async_queue_size}, or 0 to write nothing ahead"
            )
        return ()


@dataclass(frozen=True, kw_only=True)
class AsyncRunOptions(PromptOptions, RolloutOptions, AsyncOptions, RecordingOptions, ClusterOptions):
    """What asynchronous training has to say to other groups; it has no options of its own."""

    @property
    def prompts_under_way(self) -> int:
        """The most that are being answered at a time."""
        if self.outlives_updates:
            return (1 + self.async_queue_size) * self.rollout_batch_size
        more = self.vllm_generate_batch_size if self.dynamic_filtering else None
        return more or self.rollout_batch_size

    def check(self) -> Iterable[str]:
        if self.async_train and self.replay:
            raise UserError(
                "--async_train and --replay: a recording of an asynchronous run is replayed without --async_train; "
                "leave it out"
            )
        if not self.outlives_updates:
            return
        self._check_filtering()
        if self.engines_apart:
            self._check_engines_apart()
        elif "partial_rollout" in self.given:
            shown = "" if self.partial_rollout else " False"
            yield f"--partial_rollout{shown} has no effect where the engine is with the policy: answers always go on"
        if self.dynamic_filtering:
            why = "with --async_train: a prompt follows wherever an answer has ended"
            yield from self.idle(["vllm_generate_batch_size"], why)

    def _check_filtering(self) -> None:
        if self.dynamic_filtering and self.dynamic_filtering_batches is not None:
            raise UserError(
                "--dynamic_filtering_batches counts rounds of sampling, and --async_train has none: leave it out"
            )
        if self.dynamic_filtering and self.drop_last:
            raise UserError(
                "--drop_last with --dynamic_filtering: --async_train learns from every useful group, also where the "
                "last ones do not fill an iteration; leave --drop_last out"
            )

    def _check_engines_apart(self) -> None:
        for name in ("vllm_enable_sleep", "deepspeed_enable_sleep"):
            if getattr(self, name):
                raise UserError(
                    f"--{name}: with --async_train engines write while the policy learns, and neither rests; leave it "
                    "out"
                )
        if self.colocate_all_models:
            raise UserError(
                "--colocate_all_models: with --async_train engines write while the policy learns; give them GPUs of "
                "their own, or use --rollout_engine builtin"
            )
