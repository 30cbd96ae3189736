"""Whether an engine answers from the policy as it is: log-probs of the same tokens, by the engine that drew them and by
the trainer.

    Probe           an engine with a copy of the weights answers a few prompts after every update. A checksum of what
                    was sent would not see what the engine made of it
    check_samples   the built-in engine has the trainer's own weights, but its own attention: in fp32 the first samples
                    of a run are compared before anything is learnt from them
    check_row       the same of later iterations, by what their first update has measured
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trimtab.config.jobs import RLOptions
from trimtab.data.prompts import PromptStore
from trimtab.distributed.device import Device
from trimtab.distributed.launcher import EngineLost, Group
from trimtab.distributed.weight_transfer import GLOO, TransferPlan, TransferSender, plan_transfer
from trimtab.errors import RunFailed
from trimtab.models.policy import Policy
from trimtab.models.weight_export import WeightExport
from trimtab.rollout.sampling import SamplingParams, request_seed
from trimtab.train.rl.checks import MUCH_GAP
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.micro_batches import MicroBatcher
from trimtab.train.rl.state import Roles

TOKENS = 256  # at least, of every engine
LONGEST = 32  # of one answer
LIMIT = 1e-3  # of the largest difference in fp32
START_LIMIT = 0.1  # of the mean difference in bf16, with the weights both were loaded with
SLACK = 3  # of the mean difference in bf16 after that, times the one at the start
SAMPLES_LIMIT = 0.01
"""Of the mean difference in fp32, built-in engine. Rounding leaves about 1e-6 nats; attention that the engine gets
wrong, 0.1 and more. The largest difference would say less: rounding may send a token to another expert."""
SAMPLED_TOKENS = 1024  # compared at least, if there are as many


@dataclass(frozen=True)
class Gap:
    mean: float
    largest: float
    tokens: int


class LogProbCheck:
    def __init__(self, options: RLOptions, roles: Roles, prompts: PromptStore, passes: MicroBatcher):
        self.options, self.roles, self.passes = options, roles, passes
        length = min(LONGEST, options.generate_max_len)
        count = -(-TOKENS // length)
        self.prompts = [[int(token) for token in prompts.ids(i % len(prompts))] for i in range(count)]
        self.seeds = [request_seed(options.seed, i) for i in range(count)]
        self.sampling = SamplingParams(max_new_tokens=length, temperature=options.temperature)
        self.at_start: Gap | None = None
        self.last: Gap | None = None

    def measure_start(self) -> None:
        """With the weights that both were loaded with; once."""
        if self.at_start is None:
            self.at_start = self.gap()
            self._judge(self.at_start, "with the weights both were loaded with")

    def check(self, version: int) -> None:
        self._judge(self.gap(), f"after iteration {version}")

    def gap(self) -> Gap:
        """The worst of all engines."""
        found = self.roles.rollouts.call("probe", prompts=self.prompts, seeds=self.seeds, sampling=self.sampling)
        return max((self._gap_of(answers) for answers in found), key=self._judged)

    def _gap_of(self, answers: Experience) -> Gap:
        self.passes.fill(answers, "old_N", self.roles.actor, "log_probs")
        assert answers.old_N is not None
        differences = (answers.old_N - answers.sampled_N).abs().nan_to_num(torch.inf)
        return Gap(float(differences.mean()), float(differences.max()), len(differences))

    def _judge(self, gap: Gap, when: str) -> None:
        self.last = gap
        value, limit = self._judged(gap), self._limit(gap)
        if not value <= limit:
            what = "on average" if self.options.bf16 else "at most"
            raise RunFailed(
                f"the rollout engine does not answer from the trainer's weights: {when} its log-probs of {gap.tokens} "
                f"tokens differ from the trainer's by {value:.1e} {what}, and {limit:.1e} is the limit; use "
                "--rollout_engine builtin, and report this"
            )

    def _judged(self, gap: Gap) -> float:
        return gap.mean if self.options.bf16 else gap.largest

    def _limit(self, gap: Gap) -> float:
        assert self.at_start is not None
        if not self.options.bf16:
            return LIMIT
        return START_LIMIT if gap is self.at_start else max(LIMIT, SLACK * self.at_start.mean)


def check_samples(experience: Experience, passes: MicroBatcher, actor: Group) -> None:
    """RunFailed: the engine's log-probs of its samples are not the trainer's, in fp32."""
    enough = int((experience.lengths_S.cumsum(0) < SAMPLED_TOKENS).sum()) + 1
    few = experience.take(range(min(enough, len(experience))))
    passes.fill(few, "old_N", actor, "log_probs")
    assert few.old_N is not None
    gap_N = (few.old_N - few.sampled_N).abs()
    if few.fresh_N is not None:
        gap_N = gap_N[few.fresh_N > 0]
    if len(gap_N) and (gap := float(gap_N.mean())) > SAMPLES_LIMIT:
        raise RunFailed(_apart(gap, SAMPLES_LIMIT, f"{len(gap_N):,} tokens, which were not trained on,"))


def check_row(row: dict[str, Any]) -> None:
    """The same by the figures of an iteration that was trained without dropout."""
    gap = row.get("log_prob_gap_fresh" if "age" in row else "log_prob_gap", 0.0)
    if gap > MUCH_GAP:
        raise RunFailed(_apart(gap, MUCH_GAP, f"the tokens of iteration {row['step']}"))


def _apart(gap: float, limit: float, tokens: str) -> str:
    return (
        f"the built-in engine does not sample from the policy that is trained: its log-probs of {tokens} differ from "
        f"the trainer's by {gap:.2g} nats on average, and in fp32 {limit:g} is the limit; most likely the engine does "
        "not compute this model's attention as the model does: use --rollout_engine vllm or another model, and report "
        "this"
    )


# ---- weights to engines


class WeightSync(Protocol):
    def connect(self) -> None:
        """Once before the first weights are published, while policy and engines hold those they were loaded with; and
        again whenever an engine has taken another one's place."""

    def publish(self, version: int) -> None:
        """Answers come from the policy as it is now, called by this number. RunFailed: they would not. EngineLost: one
        is gone; to `mend` that brings them to all."""

    def speak_to(self, roles: Roles) -> None:
        """The same roles, built anew, connected again."""

    def mend(self, lost: EngineLost, version: int) -> None:
        """Have another engine in the place of one that is gone, and all with the policy as it is now, called by this
        number; or raise that."""


def make_weight_sync(options: RLOptions, roles: Roles, prompts: PromptStore, passes: MicroBatcher) -> WeightSync:
    probe = LogProbCheck(options, roles, prompts, passes) if options.uses_vllm else None
    if options.engines_apart:
        assert probe is not None
        return SentWeights(options, roles, probe)
    return SharedWeights(roles.rollouts, probe)


class SharedWeights:
    def __init__(self, rollouts: Group, probe: LogProbCheck | None):
        """`probe`: of an engine that takes a copy."""
        self.rollouts, self.probe = rollouts, probe

    def connect(self) -> None:
        if self.probe is not None:
            self.probe.measure_start()

    def publish(self, version: int) -> None:
        self.rollouts.call("weights_changed", version=version)
        if self.probe is not None:
            self.probe.check(version)

    def speak_to(self, roles: Roles) -> None:
        self.rollouts = roles.rollouts
        if self.probe is not None:
            self.probe.roles = roles

    def mend(self, lost: EngineLost, version: int) -> None:
        raise lost


class SentWeights:
    def __init__(self, options: RLOptions, roles: Roles, probe: LogProbCheck):
        self.options, self.roles, self.probe = options, roles, probe
        self.replaced = 0  # engines, of --max_restarts

    def connect(self) -> None:
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
        # Each waits for the other.
        pending = [role.start("join_links", plan=plan) for role in (self.roles.actor, self.roles.rollouts)]
        for call in reversed(pending):  # a lost engine is noticed while engines are waited for
            call.wait()
        self.probe.measure_start()

    def publish(self, version: int) -> None:
        self._send(version)

    def mend(self, lost: EngineLost, version: int) -> None:
        while True:
            self.replaced += 1
            if self.replaced > self.options.max_restarts:
                raise lost
            print(f"{lost}; engine {self.replaced} of {self.options.max_restarts} takes its place", flush=True)
            try:
                self.roles.rollouts.replace_engine(lost)
                self.connect()
                return self._send(version)
            except EngineLost as another:
                lost = another

    def _send(self, version: int) -> None:
        sending = self.roles.actor.start("send_weights")
        receiving = self.roles.rollouts.start("receive_weights", version=version)
        for call in (receiving, sending):  # a lost engine is noticed while engines are waited for
            call.wait()
        self.probe.check(version)

    def speak_to(self, roles: Roles) -> None:
        self.roles = self.probe.roles = roles
        self.connect()


# ---- the policy's side


def handover_of(options: RLOptions, policy: Policy) -> WeightExport:
    return WeightExport(policy, bf16=options.bf16, adapters=options.vllm_sync_lora == "adapter")


class WeightSender:
    """In every process of the policy: of a split one all gather, and those that have a link send."""

    def __init__(self, handover: WeightExport, device: Device):
        self.handover = handover
        self._outgoing = TransferSender(device.torch)

    def offer(self) -> dict[str, Any]:
        """Where to connect to, and what will be sent."""
        about = {"adapter_config": self.handover.adapter_config()} if self.handover.adapters else {}
        return {**self._outgoing.offer(), "tensors": self.handover.described(), "about": about}

    def open(self, plan: TransferPlan) -> None:
        self._outgoing.open(plan)

    def send(self) -> None:
        self._outgoing.send(self.handover.tensors())

    def close(self) -> None:
        self._outgoing.close()
