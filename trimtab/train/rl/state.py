"""The state of the RL loop: its roles, its counters and the current iteration.

Every checkpoint has the counters and the iteration.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trimtab.algos.advantages import NO_MOMENTS
from trimtab.algos.policy_losses import adapted_entropy_coefficient, adapted_kl_coefficient
from trimtab.config.rl_jobs import RLOptions
from trimtab.distributed.launcher import Group
from trimtab.errors import RunFailed
from trimtab.train.rl.checks import alarms
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.rollout_files import distributions, episode_figures


@dataclass
class Roles:
    """The groups of role processes that the loop calls."""

    actor: Group
    rollouts: Group
    reference: Group | None = None
    teacher: Group | None = None
    critic: Group | None = None
    reward: Group | None = None  # the reward models

    @property
    def trainers(self) -> list[Group]:
        return [role for role in (self.actor, self.critic) if role is not None]

    @contextmanager
    def trainers_asleep(self, options: RLOptions) -> Iterator[None]:
        """--deepspeed_enable_sleep: free the trainers' device memory for the engines inside the context."""
        trainers = self.trainers if options.deepspeed_enable_sleep else []
        for role in trainers:
            role.call("sleep")
        try:
            yield
        finally:
            for role in trainers:
                role.call("wake")


@dataclass
class UpdateTrial:
    """An update that the checks before the first iteration try."""

    role: Group
    experience: Experience
    columns: list[str]  # of the experience that the update needs
    settings: dict[str, Any]


MANY_BAD_STEPS = 5  # in a row: the run stops


@dataclass
class Counters:
    """The loop's state besides weights and the current iteration; saved in every checkpoint."""

    kl_coefficient: float
    iteration: int = 0
    prompts_used: int = 0
    actor_steps: int = 0
    critic_steps: int = 0
    proposal_steps: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    first_entropy: float = 0.0
    at_bound: int = 0  # consecutive iterations at the staleness bound
    start_is_measured: bool = False
    reward_moments: Sequence[float] = NO_MOMENTS  # of all rewards, with --running_reward_norm
    entropy_coefficient: float = 0.0
    low_entropy: bool = False  # whether the last update's was at most --entropy_target

    def count(self, applied: bool) -> None:
        """Count an update: applied, or skipped because its loss or gradient was not finite."""
        self.skipped_steps += not applied
        self.skipped_in_a_row = 0 if applied else self.skipped_in_a_row + 1
        if self.skipped_in_a_row >= MANY_BAD_STEPS:
            raise RunFailed(
                f"loss or gradient was not finite in {MANY_BAD_STEPS} updates in a row (last: iteration "
                f"{self.iteration + 1}); lower --actor_learning_rate, or resume from the last checkpoint"
            )

    def adapt_kl(self, row: dict[str, Any], options: RLOptions, *, lacks_kl: bool) -> None:
        """Write this iteration's KL coefficient into the row, and adapt it for the next one. `lacks_kl`: the KL was
        computed in the update, so the returns do not contain it yet."""
        if lacks_kl and not options.use_kl_loss:
            row["return"] -= self.kl_coefficient * row["kl_answer"]
        row["kl_coefficient"] = self.kl_coefficient
        if options.kl_target is not None:
            figures = (row["kl"], options.kl_target, options.kl_horizon, row["samples"])
            self.kl_coefficient = adapted_kl_coefficient(self.kl_coefficient, *figures)

    def adapt_entropy(self, report: dict[str, float], options: RLOptions) -> None:
        """Adapt the entropy's coefficient after an update of the policy."""
        report["entropy_coefficient"] = self.applied_entropy(options)
        entropy, target = report.pop("token_entropy"), options.entropy_target
        assert target is not None
        if not report["applied"]:
            return
        settings = entropy, target, options.entropy_coef_step, options.entropy_coef_max
        self.entropy_coefficient = adapted_entropy_coefficient(self.entropy_coefficient, *settings)
        self.low_entropy = entropy <= target

    def applied_entropy(self, options: RLOptions) -> float:
        """The entropy's coefficient in the next update."""
        if options.entropy_target is None:
            return options.entropy_loss_coef or 0.0
        return self.entropy_coefficient if self.low_entropy else 0.0


@dataclass
class Iteration:
    """The current iteration: its experience, figures, and the reports of the updates done so far."""

    experience: Experience
    prompts: int  # number taken from the data
    figures: dict[str, float]
    reports: list[dict[str, dict[str, float]]] = field(default_factory=list)  # of every update: role -> figures
    unfinished: dict[str, dict[str, float]] = field(default_factory=dict)  # the same for the current update
    seconds: dict[str, float] = field(default_factory=dict)

    def on_disk(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Its tensors and its JSON state."""
        return self.experience.tensors(), {k: v for k, v in vars(self).items() if k != "experience"}

    @classmethod
    def from_disk(cls, tensors: dict[str, Tensor], state: dict[str, Any]) -> "Iteration":
        return cls(Experience.from_tensors(tensors), **state)


def row_of(work: Iteration, counters: Counters, bound: int | None = None) -> dict[str, Any]:
    """The row of metrics.jsonl for an iteration, without timing and evaluation. `bound`: of the staleness."""
    experience = work.experience
    entropy = float(-experience.sampled_N.mean())
    counters.first_entropy = counters.first_entropy or entropy
    is_at_bound = "age_max" in work.figures and work.figures["age_max"] == bound
    counters.at_bound = counters.at_bound + 1 if is_at_bound else 0
    row: dict[str, Any] = {
        "step": counters.iteration,
        **work.figures,
        "sampled_entropy": entropy,
        **summary(work.reports),
        "skipped_steps": counters.skipped_steps,
        "samples": len(experience.firsts_E),
        "tokens": int(experience.lengths_S.sum()),
        "prompt_tokens": int(experience.prompt_lengths_S[experience.firsts_G].sum()),
        **episode_figures(experience),
        **distributions(experience),
    }
    return row | {"alarms": list(alarms(row, counters.first_entropy, counters.at_bound))}


def summary(reports: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    """The reports of an iteration's updates in one row: means, but for log_prob_* the value of the first update."""
    row: dict[str, float] = {}
    for role in ("actor", "critic"):
        found = [report[role] for report in reports if role in report]
        prefix = "" if role == "actor" else "critic_"
        for name in found[0] if found else ():
            first = name.startswith("log_prob_")
            values = [report[name] for report in (found[:1] if first else found)]
            row[prefix + name] = math.fsum(values) / len(values)
    return row


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.monotonic() - began
