"""Whether an engine answers from the policy as it is: log-probs of the same tokens, by the engine that drew them and by
the trainer.

    Probe           an engine with a copy of the weights answers a few prompts after every update. A checksum of what
                    was sent would not see what the engine made of it
    check_samples   the built-in engine has the trainer's own weights, but its own attention: in fp32 the first samples
                    of a run are compared before anything is learnt from them
    check_row       the same of later iterations, by what their first update has measured
"""

from dataclasses import dataclass
from typing import Any

import torch

from trimtab.config.jobs import RLOptions
from trimtab.data.prompts import PromptStore
from trimtab.distributed.launcher import Group
from trimtab.errors import RunFailed
from trimtab.rollout.sampling import SamplingParams, request_seed
from trimtab.train.rl.alarms import MUCH_GAP
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.passes import Passes
from trimtab.train.rl.role_groups import Roles

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


class Probe:
    def __init__(self, options: RLOptions, roles: Roles, prompts: PromptStore, passes: Passes):
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


def check_samples(experience: Experience, passes: Passes, actor: Group) -> None:
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
