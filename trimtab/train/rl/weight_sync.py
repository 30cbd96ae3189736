"""Weight sync from the policy to the engines, and checks that engines sample from the synced weights.

An engine in the policy's process reads the policy's weights in place, or copies them there. Engines in their own
processes receive them while the policy's processes send. A copy may differ from the sent weights without any error, and
another implementation of attention may be wrong for a model. So the engine's log-probs are compared with the trainer's
on the same tokens:

    LogProbCheck    for engines with a copy, after every sync: they answer a few prompts, which the trainer scores. A
                    checksum of the weights would not detect a wrong conversion inside the engine
    SampleCheck     for the built-in engine in fp32, and in bf16 with fused layers: on the first samples before they
                    are trained, and in every iteration on the gap measured in its first update
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.config.rl_jobs import RLOptions
from trimtab.data.prompts import PromptDataset
from trimtab.distributed.launcher import EngineLost, Group
from trimtab.distributed.weight_transfer import GLOO, plan_transfer
from trimtab.errors import RunFailed
from trimtab.rollout.sampling import SamplingParams, request_seed
from trimtab.train.rl.checks import MUCH_GAP
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.micro_batches import MicroBatcher
from trimtab.train.rl.source import RolloutSource
from trimtab.train.rl.state import Roles

logger = logging.getLogger(__name__)

TOKENS = 256  # compared per engine, at least
LONGEST = 32  # tokens of one answer
LIMIT = 1e-3  # for the largest difference in fp32
START_LIMIT = 0.1  # for the mean difference in bf16 with the initial weights
SLACK = 3  # later limit for the mean difference in bf16, as a multiple of the initial difference
SAMPLES_LIMIT = 0.01
"""Limit for the mean difference of the built-in engine in fp32. Rounding leaves about 1e-6 nats; wrong attention leaves
0.1 and more. The mean is used, because rounding may route a single token to another expert."""
SAMPLED_TOKENS = 1024  # compared at least, if available


class WeightSync:
    """Brings the policy's weights to all engines, verifies them, and replaces lost engines."""

    def __init__(self, options: RLOptions, roles: Roles, source: RolloutSource, check: "LogProbCheck | None"):
        """`check`: for engines that hold a copy of the weights."""
        self.options, self.roles, self.source, self.check = options, roles, source, check
        self.version = 0  # version of the engines' weights: the number of iterations done
        self.seconds = 0.0  # of the last sync, or of the first comparison
        self.replaced = 0  # engines replaced so far; --max_restarts bounds it

    def connect(self) -> None:
        """Open the transfer links and measure the initial log-prob gap, while policy and engines have the initial
        weights.
        Called again after an engine was replaced."""
        if self.options.engines_apart:
            self._open_links()
        began = time.monotonic()
        if self.check is not None:
            self.check.measure_start()
        self.seconds = time.monotonic() - began

    def use(self, roles: Roles) -> None:
        """Continue with rebuilt roles."""
        self.roles = roles
        if self.check is not None:
            self.check.roles = roles
        self.connect()

    def sync(self, version: int) -> None:
        """Update the engines to the policy's current weights, as `version`. RunFailed: their log-probs do not agree."""
        self.version, began = version, time.monotonic()
        with self.source.paused():
            try:
                self._sync()
            except EngineLost as lost:
                self.replace_engine(lost)
        self.seconds = time.monotonic() - began

    @contextmanager
    def averaged(self, sync: Callable[[], None]) -> Iterator[None]:
        """With --enable_ema, use the averaged weights in policy and engines inside the context."""
        if not self.options.enable_ema:
            yield
            return
        self.roles.actor.call("show_average")
        sync()
        try:
            yield
        finally:
            self.roles.actor.call("hide_average")
            sync()

    def replace_engine(self, lost: EngineLost) -> None:
        """Start a new engine in place of a lost one and sync all, while none generates. Raises `lost` once
        --max_restarts
        engines were replaced."""
        while True:
            self.replaced += 1
            if not self.options.engines_apart or self.replaced > self.options.max_restarts:
                raise lost
            print(f"{lost}; engine {self.replaced} of {self.options.max_restarts} takes its place", flush=True)
            try:
                self.roles.rollouts.replace_engine(lost)
                self.connect()
                self._sync()
                return self.source.engine_replaced()
            except EngineLost as another:
                lost = another

    def _sync(self) -> None:
        if self.options.engines_apart:
            sending = self.roles.actor.start("send_weights")
            receiving = self.roles.rollouts.start("receive_weights", version=self.version)
            for call in (receiving, sending):  # engines first: waiting for them detects a lost one
                call.wait()
        else:
            self.roles.rollouts.call("weights_changed", version=self.version)
        if self.check is not None:
            self.check.check(self.version)

    def _open_links(self) -> None:
        offers, found = self.roles.actor.call("offer_link"), self.roles.rollouts.call("seats")
        library, asked = offers[0]["library"], self.options.vllm_sync_backend
        backend = asked if asked == GLOO else library
        if backend != asked and self.options.asks("vllm_sync_backend"):
            why = "needs accelerators" if library == GLOO else "is another device's"
            print(f"--vllm_sync_backend {asked} {why}: {library} is used", flush=True)
        plan = plan_transfer(
            offers,
            [seat for engine in found for seat in engine],
            backend=backend,
            tensors=offers[0]["tensors"],
            about=offers[0]["about"],
            patience=self.options.hang_timeout,
        )
        # Started in both groups before waiting, because each side waits for the other.
        pending = [role.start("join_links", plan=plan) for role in (self.roles.actor, self.roles.rollouts)]
        for call in reversed(pending):  # engines first: waiting for them detects a lost one
            call.wait()


@dataclass(frozen=True)
class Gap:
    """Difference between two sets of log-probs."""

    mean: float
    largest: float
    tokens: int


class LogProbCheck:
    """Compares log-probs of engines that hold a copy of the weights with the trainer's."""

    def __init__(self, options: RLOptions, roles: Roles, prompts: PromptDataset, batcher: MicroBatcher):
        self.options, self.roles, self.batcher = options, roles, batcher
        length = min(LONGEST, options.generate_max_len)
        count = -(-TOKENS // length)
        self.prompts = [[int(token) for token in prompts.ids(i % len(prompts))] for i in range(count)]
        self.seeds = [request_seed(options.seed, i) for i in range(count)]
        self.sampling = SamplingParams(max_new_tokens=length, temperature=options.temperature)
        self.at_start: Gap | None = None

    def measure_start(self) -> None:
        """Measure the gap with the initial weights, once."""
        if self.at_start is None:
            self.at_start = self.gap()
            self._check(self.at_start, START_LIMIT, "with the weights both were loaded with")

    def check(self, version: int) -> None:
        assert self.at_start is not None
        self._check(self.gap(), max(LIMIT, SLACK * self.at_start.mean), f"after iteration {version}")

    def gap(self) -> Gap:
        """The largest gap over all engines."""
        found = self.roles.rollouts.call("probe", prompts=self.prompts, seeds=self.seeds, sampling=self.sampling)
        return max((self._gap_of(answers) for answers in found), key=self._size)

    def _gap_of(self, answers: Experience) -> Gap:
        self.batcher.fill(answers, "old_N", self.roles.actor, "log_probs")
        assert answers.old_N is not None
        differences = (answers.old_N - answers.sampled_N).abs().nan_to_num(torch.inf)
        return Gap(float(differences.mean()), float(differences.max()), len(differences))

    def _size(self, gap: Gap) -> float:
        return gap.mean if self.options.bf16 else gap.largest

    def _check(self, gap: Gap, bf16_limit: float, when: str) -> None:
        value, limit = self._size(gap), bf16_limit if self.options.bf16 else LIMIT
        if not value <= limit:
            what = "on average" if self.options.bf16 else "at most"
            raise RunFailed(
                f"the rollout engine does not answer from the trainer's weights: {when} its log-probs of {gap.tokens} "
                f"tokens differ from the trainer's by {value:.1e} {what}, and {limit:.1e} is the limit; use "
                "--rollout_engine builtin, and report this"
            )


class SampleCheck:
    """Compares the built-in engine's log-probs with the trainer's, if they should be the same: in fp32 but for
    rounding, in bf16 with fused layers (--exact) bit for bit."""

    def __init__(self, options: RLOptions, batcher: MicroBatcher, *, engine_exact: bool):
        self.options, self.batcher = options, batcher
        self.is_due = self.is_exact = engine_exact and not options.replay  # a recording may come from other weights
        self.is_bitwise = self.is_exact and options.bf16
        self._differing = 0  # of the first samples' tokens

    def check_samples(self, experience: Experience, actor: Group) -> None:
        """Check the first samples of the run. RunFailed: the engine's log-probs differ from the trainer's."""
        if not self.is_due:
            return
        self.is_due = False
        enough = int((experience.lengths_S.cumsum(0) < SAMPLED_TOKENS).sum()) + 1
        few = experience.take(range(min(enough, len(experience))))
        self.batcher.fill(few, "old_N", actor, "log_probs")
        assert few.old_N is not None
        gap_N = (few.old_N - few.sampled_N).abs()
        if few.fresh_N is not None:
            gap_N = gap_N[few.fresh_N > 0]
        if len(gap_N):
            self._differing = int((gap_N > 0).sum())
            self._check(float(gap_N.mean()), SAMPLES_LIMIT, f"{len(gap_N):,} tokens, which were not trained on,")

    def add_alarm(self, row: dict[str, Any]) -> None:
        """An alarm in the row of an iteration if log-probs that should be the same bits are not."""
        comparable = self.options.updates_per_iteration == 1 and not self.options.outlives_updates
        gap = row.get("log_prob_gap", 0.0) if comparable else 0.0
        if self.is_bitwise and (gap > 0 or self._differing):
            row["alarms"] = [
                *row.get("alarms", []),
                f"sampled log-probs are not the trainer's bit for bit (--exact), {gap:.2g} nats off on average, and "
                f"{self._differing} tokens of the first samples: please report this",
            ]

    def check_row(self, row: dict[str, Any]) -> None:
        """Check the gap in the row of an iteration. With dropout the update's log-probs are not comparable."""
        if self.is_exact and not (self.options.keep_dropout or self.options.lora_dropout):
            gap = row.get("log_prob_gap_fresh" if "age" in row else "log_prob_gap", 0.0)
            self._check(gap, MUCH_GAP, f"the tokens of iteration {row['step']}")

    def _check(self, gap: float, limit: float, tokens: str) -> None:
        if gap > limit:
            raise RunFailed(
                f"the built-in engine does not sample from the policy that is trained: its log-probs of {tokens} "
                f"differ from the trainer's by {gap:.2g} nats on average, and {limit:g} is the limit; most "
                "likely the engine does not compute this model's attention as the model does: use --rollout_engine "
                "vllm or another model, and report this"
            )
