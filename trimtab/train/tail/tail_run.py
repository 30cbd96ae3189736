"""A tail run: the RL loop with updates of a proposal before those of the policy; its prompts, advantages and launch.

    sample the policy, score, compute advantages; --proposal_updates times: sample the proposal, score, compute
    advantages, update the proposal; update the policy on both; log, save

The proposal's updates and its last answers are part of the current iteration, and so of every checkpoint.

Advantages are composed from the parts in algos/:

    policy's answers      A = return - baseline (reinforce), of transformed rewards if asked for (reward_transforms);
                          base_proposal adds -kappa n omega (repulse) of the same answers
    proposal's answers    for the proposal omega - nu (ctl); for the policy -kappa n omega, with the same omega

All are multiplied by the token scale (group_rewards). Weights and figures use the raw reward.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trimtab.algos.group_rewards import answer_sums, for_answers, for_groups, token_scale
from trimtab.algos.policy_losses import kl_estimate
from trimtab.algos.tail import (
    annealed,
    answer_returns,
    ctl_advantages,
    effective_samples,
    log_ratios,
    minus_exponential,
    minus_indicator,
    push_down_advantages,
    push_down_factor,
    reinforce_advantages,
    tilted_weights,
    twist_step_weights,
)
from trimtab.config.repulse_aliases import run_name
from trimtab.config.rl_jobs import TailOptions
from trimtab.config.rl_options import PUSHING
from trimtab.data.formats import require_columns
from trimtab.data.prompts import (
    PromptDatasets,
    build_prompt_dataset,
    build_prompt_datasets,
    input_column,
    load_prompt_rows,
)
from trimtab.data.sources import load_rows
from trimtab.distributed.launcher import Group, Unit
from trimtab.errors import UserError
from trimtab.interrupts import StopRequest
from trimtab.models.load import fake_policy
from trimtab.rollout.sampling import SamplingParams, request_seed
from trimtab.train.launch import load_job_tokenizer
from trimtab.train.rl import train_rl
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.launch import Controller, dry_run_rl
from trimtab.train.rl.loop import RLRun
from trimtab.train.rl.micro_batches import with_advantage
from trimtab.train.rl.rollout_client import RolloutClient
from trimtab.train.rl.source import RolloutSource
from trimtab.train.rl.state import Iteration, Roles, UpdateTrial, timed
from trimtab.train.rl.token_advantages import reward_metrics
from trimtab.train.tail.measurements import HELD_OUT, TailFiles, TailMeasurements, bad_tokens, check_countable
from trimtab.train.tail.proposal import tail_units_of


def load_tail_stores(options: TailOptions, tokenizer: PreTrainedTokenizerBase) -> PromptDatasets:
    rows = {what: replaced(found, options.input_key, options) for what, found in load_prompt_rows(options).items()}
    stores, reports = build_prompt_datasets(rows, tokenizer, options)
    if options.evaluate_heldout_sampling:
        key = options.heldout_input_key or options.input_key
        assert options.heldout_prompt_data is not None
        found = load_rows(
            options.heldout_prompt_data,
            probabilities=None,
            split=options.prompt_split,
            max_samples=options.eval_max_samples,
            seed=options.seed,
            flag="--heldout_prompt_data",
            name_sources=True,
        )
        require_columns(found.column_names, {"--heldout_input_key": options.heldout_input_key})
        stores[HELD_OUT], reports[HELD_OUT] = build_prompt_dataset(
            replaced(found, key, options), tokenizer, dataclasses.replace(options, input_key=key), what="held-out"
        )
    return stores, reports


def replaced(rows: Dataset, key: str, options: TailOptions) -> Dataset:
    """The rows with --single_prompt as their prompt."""
    if options.single_prompt is None:
        return rows
    column = input_column(rows.column_names, key)
    return rows.remove_columns(column).add_column(column, [options.single_prompt] * len(rows))


# ---- the loop


PROPOSAL = 0x9E37  # separates the random streams of its answers from the policy's
PREFIX = "proposed/"


@dataclass
class TailIteration(Iteration):
    proposed: Experience | None = None  # the proposal's last answers
    proposal_reports: list[dict[str, float]] = field(default_factory=list)  # figures of the proposal's updates
    bad_texts: list[str] = field(default_factory=list)

    def on_disk(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, state = super().on_disk()
        del state["proposed"]
        if self.proposed is not None:
            tensors |= {f"{PREFIX}{name}": tensor for name, tensor in self.proposed.tensors().items()}
        return tensors, state

    @classmethod
    def from_disk(cls, tensors: dict[str, Tensor], state: dict[str, Any]) -> "TailIteration":
        proposed = {k.removeprefix(PREFIX): v for k, v in tensors.items() if k.startswith(PREFIX)}
        own = {k: v for k, v in tensors.items() if not k.startswith(PREFIX)}
        found = Experience.from_tensors(proposed) if proposed else None
        return cls(Experience.from_tensors(own), proposed=found, **state)


@dataclass
class TailRoles(Roles):
    start: Group | None = None  # the initial policy, if there is no reference
    proposal: Group | None = None
    proposal_rollouts: Group | None = None
    bad_words: Group | None = None

    @property
    def initial(self) -> Group | None:
        """The initial policy."""
        return self.start or self.reference


class TailRun(RLRun):
    iteration_class = TailIteration
    has_objective = False
    options: TailOptions
    roles: TailRoles
    files: TailFiles

    def __init__(self, *parts: Any, sampling: SamplingParams, measures: TailMeasurements):
        super().__init__(*parts)
        self.sampling, self.measures = sampling, measures
        self.proposal_client = self._make_proposal_client()

    def _make_proposal_client(self) -> RolloutClient | None:
        if self.roles.proposal_rollouts is None:
            return None
        return RolloutClient(self.client.stores, self.client.tokenizer, self.roles.proposal_rollouts, self.roles.reward)

    def use(self, groups: dict[str, Group]) -> None:
        super().use(groups)
        self.proposal_client = self._make_proposal_client()

    def schedule(self) -> None:
        super().schedule()
        if self.roles.proposal is not None:
            self.roles.proposal.call("schedule", steps=self.files.total * self.options.proposal_updates)

    @property
    def in_force(self) -> TailOptions:
        """The options with alpha and beta of this iteration."""
        return annealed_options(self.options, self.counters.iteration / max(1, self.files.total - 1))

    @property
    def is_ppo(self) -> bool:
        return self.options.method == "ppo"

    # ---- the policy's own answers

    leaves_kl_to_update = False  # returns are needed before the update

    def begin(self, stop: StopRequest) -> TailIteration | None:
        work = super().begin(stop)
        if work is None:
            return None
        assert isinstance(work, TailIteration)
        work.bad_texts += self.files.bad_texts(work.experience)
        return work

    def compute_advantages(self, experience: Experience) -> dict[str, float]:
        if self.is_ppo:
            return super().compute_advantages(experience) | badness_figures(experience, self.options)
        return compute_policy_advantages(experience, self.in_force, self.counters.kl_coefficient)

    # ---- the proposal's answers

    def before_updates(self, work: Iteration, stop: StopRequest) -> None:
        assert isinstance(work, TailIteration)
        rounds = 0 if self.roles.proposal is None else self.options.proposal_updates
        while len(work.proposal_reports) < rounds:
            self.update_proposal(work, stop)

    def update_proposal(self, work: TailIteration, stop: StopRequest) -> None:
        """One update of the proposal, on its answers to the same prompts."""
        if stop.signal:
            self.leave(stop)
        with timed(work.seconds, "rollout"):
            proposed = self.sample_proposal(work)
        if proposed is None:
            self.leave(stop)
        with timed(work.seconds, "scoring"):
            self.score_proposed(proposed)
        figures, pushed_N = compute_proposal_advantages(proposed, self.in_force)
        role, counters = self.roles.proposal, self.counters
        assert role is not None
        everything, totals = range(len(proposed)), {"answers": float(len(proposed))}

        def attempt() -> dict[str, float]:
            parts = self.batcher.parts(role, proposed, everything, "advantages_N", "policy_N")
            return self.batcher.send(role, "update", parts, totals=totals, step=counters.proposal_steps)[0]

        with timed(work.seconds, "update"):
            report = self.batcher.until_they_fit(attempt)
        counters.proposal_steps += 1
        self.sync_weights()
        counters.count(bool(report.pop("applied")))
        proposed.advantages_N = pushed_N
        work.proposed = proposed
        work.proposal_reports.append(figures | report)
        work.bad_texts += self.files.bad_texts(proposed)

    def sample_proposal(self, work: TailIteration) -> Experience | None:
        rows = work.experience.rows_S[work.experience.firsts_G].tolist()
        stream = request_seed(request_seed(self.options.seed, PROPOSAL), self.counters.proposal_steps)
        requests = [(row, request_seed(stream, place)) for place, row in enumerate(rows)]
        assert self.proposal_client is not None
        return self.proposal_client(requests, "train", self.sampling)

    def score_proposed(self, proposed: Experience) -> None:
        """Log-probs of these answers under policy and proposal, both before their updates, and log psi."""
        proposal = self.roles.proposal
        assert proposal is not None
        assert self.proposal_client is not None
        if self.proposal_client.exact:  # as in RLRun.score
            proposed.old_N = proposed.sampled_N
        else:
            self.batcher.fill(proposed, "old_N", proposal, "log_probs")
        self.batcher.fill(proposed, "policy_N", self.roles.actor, "log_probs")
        if self.options.proposal == "model":
            assert proposed.old_N is not None and proposed.policy_N is not None
            proposed.twist_N = proposed.old_N - proposed.policy_N
        else:
            self.batcher.fill(proposed, "twist_N", proposal, "log_twists")

    # ---- the policy's update, on both

    def update_actor(self, experience: Experience, samples: list[int]) -> dict[str, float]:
        if self.is_ppo:
            return super().update_actor(experience, samples)
        assert isinstance(self.iteration, TailIteration)
        role, proposed = self.roles.actor, self.iteration.proposed
        # As in MicroBatcher.policy_update: samples with zero advantages have no gradient, but one must stay.
        learnt = with_advantage(experience, samples) or samples[:1]
        parts = self.batcher.parts(role, experience, learnt, "advantages_N", "sampled_N")
        if proposed is not None:
            more = self.batcher.parts(
                role, proposed, with_advantage(proposed, list(range(len(proposed)))), "advantages_N"
            )
            parts = [[*own, *others] for own, others in zip(parts, more)]
        totals = {"answers": float(len(samples)), "seen_tokens": float(experience.lengths_S[learnt].sum())}
        return self.batcher.send(role, "update", parts, totals=totals, step=self.counters.actor_steps)[0]

    def trials(self, few: Experience) -> list[UpdateTrial]:
        if self.is_ppo:
            return super().trials(few)
        made = dataclasses.replace(few, policy_N=few.old_N)
        settings = {"totals": {"answers": float(len(few)), "seen_tokens": float(len(few.owners_N))}}
        found = [UpdateTrial(self.roles.actor, made, ["advantages_N", "sampled_N"], settings)]
        if self.roles.proposal is not None and self.options.proposal == "model":  # heads are no whole models
            found.append(UpdateTrial(self.roles.proposal, made, ["advantages_N", "policy_N"], settings))
        return found

    def sync_weights(self) -> None:
        super().sync_weights()
        if self.roles.proposal_rollouts is not None:
            self.roles.proposal_rollouts.call("weights_changed", version=self.counters.proposal_steps)

    # ---- metrics and files

    def measure(self, work: Iteration, stop: StopRequest) -> dict[str, float]:
        return super().measure(work, stop) | self.measures.during(self, work.prompts)

    def finish(self, work: Iteration, measured: dict[str, float]) -> dict:
        assert isinstance(work, TailIteration)
        options = self.in_force  # before the iteration is counted
        row = super().finish(work, measured)
        if options.method in PUSHING:
            row |= {"alpha": options.alpha, "kappa": push_down_kappa(options)}
            if options.start_target_dist_beta is not None:
                row["beta"] = options.target_dist_beta
        reports = work.proposal_reports
        for name in reports[0] if reports else ():
            row[f"proposal_{name}"] = math.fsum(report[name] for report in reports) / len(reports)
        row["sampled_answers"] = len(work.experience) * (1 + len(reports))
        self.files.keep_bad_texts(row["step"], work.bad_texts)
        return row

    def measure_start(self, stop: StopRequest) -> dict[str, float]:
        return super().measure_start(stop) | self.measures.before(self)

    def conclude(self, stop: StopRequest) -> None:
        super().conclude(stop)
        if not self.measures.after(self):
            self.leave(stop)


# ---- advantages

Figures = dict[str, float]


def compute_policy_advantages(experience: Experience, options: TailOptions, kl_coefficient: float) -> Figures:
    """Set the advantages of the policy's answers."""
    owners_N, groups_S = experience.owners_N, experience.groups_S
    kl_N = None
    if experience.reference_N is not None:
        kl_N = kl_estimate(experience.old_N, experience.reference_N, "k1")
    low, high = options.reward_clip_range
    rewards_S = transformed(experience.rewards_S, options).clamp(low, high)
    returns_S = answer_returns(rewards_S, kl_N, kl_coefficient, owners_N)
    baseline = {"expectation": None, "hardcoded": options.reinforce_hardcoded_baseline, "none": 0.0}
    against = partial(reinforce_advantages, baseline=baseline[options.reinforce_baseline_type])
    advantages_S = for_answers(against, groups_S, returns_S)
    raw_S = answer_returns(experience.rewards_S, kl_N, kl_coefficient, owners_N)
    figures = reward_metrics(experience, rewards_S, raw_S, kl_N)
    if options.method == "base_proposal":
        weights_S = weights_of(experience, options)
        advantages_S = advantages_S + pushed(weights_S, experience, options)
        figures |= weight_figures(weights_S, experience.old_N, experience)
    experience.advantages_N = scaled(advantages_S[owners_N], experience, options)
    return numbers(figures) | badness_figures(experience, options)


def transformed(rewards_S: Tensor, options: TailOptions) -> Tensor:
    if options.method != "reinforce_transform":
        return rewards_S
    if options.reward_transform == "minus_alpha_ind":
        assert options.bad_threshold is not None
        return minus_indicator(rewards_S, options.alpha, options.bad_threshold)
    return minus_exponential(rewards_S, options.alpha, options.target_dist_beta)


def compute_proposal_advantages(experience: Experience, options: TailOptions) -> tuple[Figures, Tensor]:
    """Set the proposal's advantages on its answers; returns figures and the policy's advantages on the same answers,
    which are used after the proposal's update."""
    owners_N = experience.owners_N
    assert experience.policy_N is not None and experience.old_N is not None
    ratio_N = experience.policy_N - experience.old_N
    ratios_S = log_ratios(experience.policy_N, experience.old_N, owners_N, len(experience))
    weights_S = weights_of(experience, options, ratios_S)
    steps_N = None
    if options.proposal_loss == "ctl":
        steps_N = twist_step_weights(ratio_N, experience.twist_N, owners_N, experience.groups_S)
    experience.advantages_N = scaled(ctl_advantages(weights_S, steps_N, owners_N), experience, options)
    pushed_S = pushed(weights_S, experience, options)
    figures = {"reward": experience.rewards_S.mean(), "length": experience.lengths_S.float().mean()}
    figures |= weight_figures(weights_S, experience.policy_N, experience)
    return numbers(figures) | badness_figures(experience, options), scaled(pushed_S[owners_N], experience, options)


def weights_of(experience: Experience, options: TailOptions, *ratios_S: Tensor) -> Tensor:
    """The weight omega of every answer."""

    def weigh(rewards_GA: Tensor, ratios_GA: Tensor | None = None) -> Tensor:
        return tilted_weights(rewards_GA, options.target_dist_beta, ratios_GA)

    return for_answers(weigh, experience.groups_S, experience.rewards_S, *ratios_S)


def pushed(weights_S: Tensor, experience: Experience, options: TailOptions) -> Tensor:
    return push_down_advantages(weights_S, push_down_kappa(options), len(experience) / experience.groups)


def annealed_options(options: TailOptions, progress: float) -> TailOptions:
    """The options with alpha and beta annealed to this share of the training."""
    if options.start_alpha is None and options.start_target_dist_beta is None:
        return options
    alpha = annealed(options.start_alpha, options.alpha, progress)
    beta = annealed(options.start_target_dist_beta, options.target_dist_beta, progress)
    return dataclasses.replace(options, alpha=alpha, target_dist_beta=beta)


def push_down_kappa(options: TailOptions) -> float:
    return push_down_factor(options.alpha, options.n_samples_per_prompt, options.push_down_scale)


def scaled(advantages_N: Tensor, experience: Experience, options: TailOptions) -> Tensor:
    return advantages_N * token_scale(experience.owners_N, len(experience), options.token_reduction)


def weight_figures(weights_S: Tensor, policy_N: Tensor | None, experience: Experience) -> dict[str, Tensor]:
    """Effective sample size and largest weight of a group, and the weighted mean log-prob under the policy."""
    groups_S = experience.groups_S
    figures = {
        "effective_samples": for_groups(effective_samples, groups_S, weights_S).mean(),
        "largest_weight": for_groups(lambda weights_GA: weights_GA.amax(1), groups_S, weights_S).mean(),
    }
    if policy_N is not None:
        weighed_S = weights_S * answer_sums(policy_N, experience.owners_N, len(experience))
        figures["target_log_prob"] = for_groups(lambda weighed_GA: weighed_GA.sum(1), groups_S, weighed_S).mean()
    return figures


def badness_figures(experience: Experience, options: TailOptions) -> Figures:
    found = {"worst_reward": float(experience.rewards_S.min())}
    if options.bad_threshold is not None:
        found["bad_share"] = float((experience.rewards_S < options.bad_threshold).float().mean())
    return found


def numbers(figures: dict[str, Tensor]) -> Figures:
    return {name: float(value) for name, value in figures.items()}


# ---- launch


def train_tail(options: TailOptions) -> None:
    train_rl(options, TailController)


def dry_run_tail(options: TailOptions) -> list[str]:
    lines = dry_run_rl(options, load_tail_stores, options.num_episodes * options.fit_steps, tail_units_of)
    if options.analytic_bad_word_calc:
        try:
            bad = bad_tokens(options, load_job_tokenizer(options))
        except UserError as error:
            return [*lines, f"warning: {error}"]
        check_bad_words(options, bad)
    return lines


def check_bad_words(options: TailOptions, bad: Sequence[int]) -> None:
    """Refuse --analytic_bad_word_calc if it is infeasible for this vocabulary and length."""
    check_countable(fake_policy(options).config.get_text_config().vocab_size, bad, options.generate_max_len)


class TailController(Controller):
    options: TailOptions

    @staticmethod
    def units(options: TailOptions, processes: int) -> list[Unit]:
        return tail_units_of(options, processes)

    def episodes(self) -> int:
        return self.options.num_episodes * self.options.fit_steps

    def load_stores(self) -> PromptDatasets:
        return load_tail_stores(self.options, self.tokenizer)

    def check_models(self) -> None:
        super().check_models()
        if self.options.analytic_bad_word_calc:
            check_bad_words(self.options, bad_tokens(self.options, self.tokenizer))

    def manifest(self, actor: dict[str, Any], reward: str) -> dict:
        return super().manifest(actor, reward) | {"run_name": run_name(self.options)}

    def make_run(
        self,
        groups: dict[str, Group],
        client: RolloutClient,
        source: RolloutSource,
        sampling: SamplingParams,
        manifest: dict,
        *more: Any,
    ) -> TailRun:
        files = TailFiles(self.options, manifest, self.tokenizer, self.iterations, self.stores)
        store = self.stores["train"]
        measures = TailMeasurements(self.options, len(store), store.ids(0), self.stores.get(HELD_OUT))
        parts = self.options, TailRoles(**groups), client, source, self.order, files, *more
        return TailRun(*parts, sampling=sampling, measures=measures)
