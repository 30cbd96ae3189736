"""Options of the RL jobs: rollouts, advantages, losses, asynchronous training, and the tail methods."""

from collections.abc import Iterable
from typing import Any

from trimtab.config.data_options import (
    PromptOptions,
    check_sources,
)
from trimtab.config.objective_options import CALLED, ESTIMATORS, LOSSES_CALLED, SURROGATES, Estimator, Surrogate
from trimtab.config.option import Options, option
from trimtab.config.placement_options import ClusterOptions
from trimtab.config.training_options import AnswerOptions, SamplingOptions, UpdateOptions
from trimtab.errors import UserError


class RecordingOptions(Options):
    """Rollouts"""

    record: str | None = None
    """Folder to keep every iteration's rollouts and rewards in."""
    replay: str | None = None
    """Folder of such a recording: learn from it instead of sampling."""

    def check(self) -> Iterable[str]:
        if self.record and self.replay:
            raise UserError("--record and --replay: a replayed run has nothing new to record; give one of them")
        return ()


class RolloutOptions(SamplingOptions):
    """Rollouts"""

    num_episodes: int = option(1, at_least=1)
    """Passes over the prompts."""
    rollout_batch_size: int = option(1024, at_least=1)
    """Prompts in one iteration: they are answered, scored and learnt from before the next ones are."""
    n_samples_per_prompt: int = option(1, at_least=1)
    """Answers to each prompt; they form a group."""
    generate_max_len: int = option(1024, at_least=1)
    """At most this many tokens in an answer."""
    generate_min_len: int = option(0, at_least=0)
    """No answer ends before it has this many tokens."""
    micro_rollout_batch_size: int = option(8, at_least=1)
    """Answers in one pass of scoring (log-probabilities, values, rewards); it changes memory and speed, not the
    result."""
    micro_logprob_batch_size: int | None = option(None, at_least=1)
    """Answers in one pass that computes log-probabilities; unset: micro_rollout_batch_size."""
    micro_reward_batch_size: int | None = option(None, at_least=1)
    """Answers in one pass of a reward model; unset: micro_rollout_batch_size."""
    micro_value_batch_size: int | None = option(None, at_least=1)
    """Answers in one pass that computes the critic's values; unset: micro_rollout_batch_size."""
    rollout_max_tokens_per_gpu: int | None = None
    """Token budget of a pass of scoring, with --use_dynamic_batch; unset: that of training, on an accelerator up to
    four times as many, to 32768."""
    use_dynamic_batch: bool = False
    """Cut passes by --train_max_tokens_per_gpu (16192 if unset) instead of by number."""
    vllm_generate_batch_size: int | None = option(None, at_least=1)
    """Prompts answered in one go; unset: rollout_batch_size. With --dynamic_filtering more of them wait less often."""
    dynamic_filtering: bool = False
    """Leave out groups whose mean score is outside the range below, and sample on until the iteration is full."""
    dynamic_filtering_rule: str = option("mean", choices=("mean", "differing"), needs="dynamic_filtering")
    """Which groups are kept: mean, by the range below; differing, those whose scores are not all alike."""
    dynamic_filtering_batches: int | None = option(None, at_least=1, needs="dynamic_filtering")
    """At most this many rounds of sampling for an iteration, which is then made of the groups there are; unset: as many
    as it takes."""
    dynamic_filtering_reward_range: tuple[float, float] = option((0.0, 1.0), needs=("dynamic_filtering_rule", "mean"))
    """Mean scores between these two, both excluded, are kept."""
    difficulty: bool = False
    """Keep the pass rate of every prompt, and retire prompts that are always or never solved."""
    difficulty_solved: float = option(1.0, needs="difficulty")
    """An answer solves its prompt if its score is at least this."""
    difficulty_range: tuple[float, float] = option((0.0, 1.0), at_least=0, at_most=1, needs="difficulty")
    """A group with a pass rate of at most the first is never solved, of at least the second always."""
    difficulty_after: int = option(1, at_least=1, needs="difficulty")
    """Retire a prompt after this many groups in a row that are always, or never, solved."""
    difficulty_return: float = option(0.1, at_least=0, at_most=1, needs="difficulty")
    """Probability that a retired prompt is answered all the same when its turn comes; what it then scores decides
    whether it stays retired. 0: it never comes back."""

    def check(self) -> Iterable[str]:
        if self.temperature <= 0:
            raise UserError(f"--temperature is {self.temperature:g}: it must be above 0")
        if self.generate_min_len > self.generate_max_len:
            raise UserError(
                f"--generate_min_len {self.generate_min_len} is more than --generate_max_len {self.generate_max_len}"
            )
        low, high = self.dynamic_filtering_reward_range
        if low >= high:
            raise UserError(f"--dynamic_filtering_reward_range {low:g} {high:g}: the first must be below the second")
        low, high = self.difficulty_range
        if low >= high:
            raise UserError(f"--difficulty_range {low:g} {high:g}: the first must be below the second")
        if self.dynamic_filtering and self.n_samples_per_prompt < 2:
            raise UserError("--dynamic_filtering judges groups of answers: set --n_samples_per_prompt above 1")
        at_once = self.vllm_generate_batch_size
        if at_once is not None and at_once > self.rollout_batch_size and not self.dynamic_filtering:
            raise UserError(
                f"--vllm_generate_batch_size {at_once} is more than --rollout_batch_size {self.rollout_batch_size}: "
                "without --dynamic_filtering an iteration needs no more prompts than that"
            )
        if self.dynamic_filtering:
            return ()
        return self.idle(["vllm_generate_batch_size", "dynamic_filtering_reward_range"], "without --dynamic_filtering")


class EngineOptions(Options):
    """Built-in rollout engine"""

    rollout_slots: int = option(256, at_least=1)
    """Answers that are written at once."""
    rollout_kv_tokens: int | None = option(None, at_least=1)
    """Tokens whose keys and values are kept; unset: planned from the memory that is free."""
    weight_only_int8: bool = False
    """Sample with linear layers rounded to 8 bits, slightly off the policy: faster on NVIDIA GPUs in bf16 with up to 64
    answers at once, of no use from about 128 on, slower elsewhere; takes memory for the copies. docs/rollout.md has
    figures."""


class AdvantageOptions(Options):
    """Advantages"""

    advantage_estimator: str = option("gae", choices=CALLED)
    """How rewards become advantages"""
    gamma: float = option(1.0, at_least=0, at_most=1)
    """Discount of later rewards, token by token; always 1 in the estimators that compare a group's answers."""
    lambd: float = option(1.0, at_least=0, at_most=1)
    """Lambda of gae: 1 trusts the rewards, 0 the critic."""
    no_advantage_std_norm: bool = False
    """Where advantages are whitened over the iteration, centre them only."""

    @property
    def estimator(self) -> Estimator:
        return ESTIMATORS[self.advantage_estimator]

    def check(self) -> Iterable[str]:
        estimator = self.estimator
        if not estimator.discounted and self.gamma != 1:
            yield f"--gamma has no effect: --advantage_estimator {estimator.name} does not discount"
        if self.no_advantage_std_norm and not estimator.whitened:
            yield f"--no_advantage_std_norm has no effect: {estimator.name} does not whiten its advantages"


class KLOptions(Options):
    """KL to the reference"""

    init_kl_coef: float = option(0.01, at_least=0)
    """Weight of the KL; 0: none, and no reference is loaded."""
    kl_target: float | None = option(None, above=0)
    """Adapt the weight so that the mean KL of a token stays near this value."""
    kl_horizon: int = option(10_000, at_least=1, needs="kl_target")
    """Samples in which the weight adapts."""
    kl_estimator: str = option("k1", choices=("k1", "k2", "k3"), needs="init_kl_coef")
    """With d the difference in log-probability: k1 is d, k2 is d^2 / 2, k3 is exp(-d) - 1 + d."""
    use_kl_loss: bool = option(False, needs="init_kl_coef")
    """The KL is a term of the loss, not of the reward."""
    kl_clip: float | None = option(None, above=0, needs="use_kl_loss")
    """In the loss a token's KL is kept between minus this and this, and has no gradient beyond; unset: it is not."""

    def check(self) -> Iterable[str]:
        if not self.init_kl_coef:
            if self.kl_target is not None:
                raise UserError(
                    "--kl_target steers the weight of the KL, and --init_kl_coef 0 means that there is none"
                )
            return ()
        if self.use_kl_loss and self.kl_estimator == "k1":
            return ["--use_kl_loss with --kl_estimator k1 pulls nowhere on average: use k2 or k3"]
        if not self.use_kl_loss and self.kl_estimator != "k1":
            return [f"--kl_estimator {self.kl_estimator} is meant for --use_kl_loss: in the reward use k1"]
        return ()


class PolicyLossOptions(Options):
    """Policy loss"""

    policy_loss_type: str = option("ppo", choices=LOSSES_CALLED)
    """What is minimised"""
    policy_loss_coef: float = option(1.0, at_least=0)
    """Weight of the policy loss beside the KL and the entropy."""
    loss_reduction: str | None = option(None, choices=("token", "answer", "constant"))
    """What the mean is over: token (all tokens alike), answer (all answers alike) or constant (--generate_max_len
    tokens for each answer, as in Dr. GRPO; for each episode --max_turns times as many, up to --episode_max_len); unset:
    token, for gspo, gmpo and sapo answer."""
    eps_clip: float = option(0.2, above=0)
    """The ratio of new to old probability is clipped to 1 - eps_clip and 1 + eps_clip."""
    eps_clip_low_high: tuple[float, float] | None = None
    """Two values instead, for the lower and the upper bound."""
    dual_clip: float | None = option(None, above=1)
    """A bound above 1 on how much a bad answer counts that has become more likely; unset: none."""
    sapo_temperatures: tuple[float, float] = option((1.0, 1.05), above=0, needs=("policy_loss_type", "sapo"))
    """How fast the gate of sapo closes: for positive advantages, and for the others."""
    cov_ratio: float = option(0.0002, above=0, at_most=1)
    """Of clip_cov and kl_cov, the share of a step's tokens that is left out or pulled back; at least one token is."""
    clip_cov_range: tuple[float, float] = option((1.0, 5.0), needs=("policy_loss_type", "clip_cov"))
    """Covariances between which clip_cov leaves tokens out."""
    kl_cov_coef: float = option(1.0, at_least=0, needs=("policy_loss_type", "kl_cov"))
    """Weight of kl_cov's KL to the policy before the update."""
    entropy_loss_coef: float | None = option(None, at_least=0)
    """Weight of the entropy, which is raised; 0: only measured; unset: not even that. With --entropy_target: the first
    one."""
    entropy_target: float | None = option(None, above=0)
    """Adapt the weight so that the mean entropy of a token, in nats, does not fall below this value; unset: it stays as
    it is."""
    entropy_coef_step: float = option(0.005, above=0, needs="entropy_target")
    """How much the weight changes after each optimiser step: up at or below the target, down above it."""
    entropy_coef_max: float = option(1.0, above=0, needs="entropy_target")
    """The largest weight."""
    freezing_actor_steps: int = option(-1, at_least=-1)
    """Train the critic alone for this many iterations; 0 or -1: none."""
    mismatch_correction: str | None = option(None, choices=("tis", "icepop", "sequence"))
    """Weigh tokens by how far the policy is from what sampled them: tis (truncated), icepop (tokens outside the range
    are left out) or sequence (answers outside the range are left out); unset: none."""
    mismatch_range: tuple[float, float] = option((0.5, 2.0), needs="mismatch_correction")
    """Lowest and highest such weight."""
    routing_replay: str = option("auto", choices=("auto", "on", "off"))
    """Score and train a mixture's tokens with the experts that the engine chose for them: on, off, or auto: with vLLM,
    if the model's routing can be replayed. In place of --compile and --exact."""

    @property
    def surrogate(self) -> Surrogate:
        return SURROGATES[self.policy_loss_type]

    @property
    def measures_entropy(self) -> bool:
        return self.entropy_loss_coef is not None or self.entropy_target is not None

    def check(self) -> Iterable[str]:
        low, high = self.mismatch_range
        if not 0 <= low < high:
            raise UserError(
                f"--mismatch_range {low:g} {high:g}: give two weights, the first at least 0 and below the second"
            )
        if self.dual_clip is not None and self.policy_loss_type != "ppo":
            raise UserError(f"--dual_clip belongs to --policy_loss_type ppo, not {self.policy_loss_type}: drop it")
        low, high = self.clip_cov_range
        if low >= high:
            raise UserError(f"--clip_cov_range {low:g} {high:g}: the first must be below the second")
        if (self.entropy_loss_coef or 0.0) > self.entropy_coef_max and self.entropy_target is not None:
            raise UserError(
                f"--entropy_loss_coef {self.entropy_loss_coef:g} is more than --entropy_coef_max "
                f"{self.entropy_coef_max:g}: lower it"
            )
        if not self.surrogate.chooses:
            yield from self.idle(["cov_ratio"], f"with --policy_loss_type {self.policy_loss_type}")
        if self.eps_clip_low_high is not None:
            low, high = self.eps_clip_low_high
            if not 0 < low <= 1 or high <= 0:
                raise UserError(
                    f"--eps_clip_low_high {low:g} {high:g}: both must be above 0, and the first, of the lower bound, "
                    "at most 1"
                )
            yield from self.idle(["eps_clip"], "beside --eps_clip_low_high")
        bounds = "eps_clip" if self.eps_clip_low_high is None else "eps_clip_low_high"
        if not self.surrogate.high:
            yield from self.idle([bounds], f"with --policy_loss_type {self.policy_loss_type}: it has no bounds")
        elif not self.surrogate.low and self.asks(bounds):
            yield (
                f"--{bounds} has no effect as a lower bound: --policy_loss_type {self.policy_loss_type} bounds from "
                "above alone"
            )


class CriticOptions(Options):
    """Critic"""

    critic_pretrain: str | None = option(None, place="model")
    """Model the critic starts from; unset: the first reward model or, without one or if its tokenizer is another one,
    --pretrain."""
    critic_learning_rate: float = option(9e-6, at_least=0)
    """Peak learning rate of the critic."""
    value_clip: float = option(0.5, above=0)
    """A value moves at most this far from what it was when the answers were written."""
    bootstrap_truncated: bool = False
    """GAE goes on with the critic's value after the last token of an answer that was cut off, instead of 0."""
    save_value_network: bool = False
    """Save the critic too, in critic/ of --save_path."""


class ActorOptions(UpdateOptions):
    """Optimiser"""

    actor_learning_rate: float = option(1e-6, at_least=0)
    """Peak learning rate of the policy."""
    enable_ema: bool = False
    """Evaluate and save a running average of the policy instead of the policy."""
    ema_beta: float = option(0.992, at_least=0, at_most=1, needs="enable_ema")
    """Decay of that average."""


class SamplingEvaluationOptions(AnswerOptions):
    """Logging and evaluation"""

    eval_temperature: float = option(0.6, at_least=0)
    """Temperature of the samples in evaluation."""
    eval_n_samples_per_prompt: int = option(4, at_least=1)
    """Samples for each prompt in evaluation."""
    save_rollouts: int = option(8, at_least=0)
    """Rollouts of every iteration that are kept in the log."""
    perf: bool = option(False, always=True)
    """Measure the time of each phase; that is always done here."""


# ---- asynchronous training; a run without stale answers is the synchronous one (`outlives_updates`)


BOUND_PER_BATCH = 4
"""Default of --async_staleness for each batch of --async_queue_size."""


class AsyncOptions(Options):
    """Asynchronous training"""

    async_train: bool = False
    """Answers outlive an update: those of later iterations are under way while the policy learns, and what is not whole
    by then goes on with the new weights."""
    async_queue_size: int = option(1, at_least=0, needs="async_train")
    """Batches that are under way ahead of the one to be learnt from; 0: none, as without --async_train."""
    async_staleness: int | None = option(None, at_least=0, needs="async_train")
    """At most this many iterations lie between the start of an answer and its use; unset: 4 for each batch of
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


# ---- the tail job: methods that lower the probability of rare bad answers (RePULSe, Zhao et al. 2025), and baselines


METHODS = ("ppo", "reinforce", "reinforce_transform", "base_proposal", "repulse")
PUSHING = ("base_proposal", "repulse")
"""Methods that lower the probability of a target's answers, beside raising the reward."""
OF_METHODS = {
    **dict.fromkeys(("push_down_scale", "start_alpha", "start_target_dist_beta"), PUSHING),
    "reward_transform": ("reinforce_transform",),
    **dict.fromkeys(("target_dist_beta", "alpha", "token_reduction", "reinforce_baseline_type"), METHODS[1:]),
}
"""Options and the methods that use them; with the others target_dist_beta and alpha are part of the run's name."""
MODULATIONS = ("modulation_model", "modulation_linear_head", "modulation_nn_head")

# Swear words in several spellings, in GPT-2's vocabulary.
GPT2_BAD_TOKENS = (
    *(5089, 9372, 20654, 25617, 30998, 31699, 34094, 46733, 21551, 40267),
    *(7510, 16211, 20041, 32574, 41356, 31030, 47209, 18185, 29836),
)


class TailMethodOptions(Options):
    """Rare bad answers"""

    method: str = option("repulse", choices=METHODS)
    """ppo; reinforce; reinforce_transform (a reward that punishes bad answers harder); base_proposal (the worst of the
    policy's own answers are pushed down); repulse (what a learnt proposal finds is)."""
    target_dist_beta: float = -10.0
    """Beta below 0: bad answers are samples of policy(answer) exp(beta reward). Of reinforce_transform the exponent."""
    alpha: float = option(0.1, at_least=0)
    """How hard bad answers are pushed down. Of reinforce_transform the weight of its punishment."""
    push_down_scale: str = option("per_sample", choices=("per_sample", "per_group"))
    """per_sample divides --alpha by the answers of a group, as the original does; per_group does not."""
    start_alpha: float | None = option(None, above=0)
    """What --alpha is at first: it goes from here to there over all updates, by the same factor each time."""
    start_target_dist_beta: float | None = None
    """The same of --target_dist_beta."""
    token_reduction: str = option("token_mean", choices=("token_mean", "token_sum"))
    """token_mean: an answer counts with its mean log-probability, as in the original; token_sum: with its whole one,
    so that long and short answers follow the same objective."""
    reward_transform: str = option("minus_alpha_exp_beta_r", choices=("minus_alpha_exp_beta_r", "minus_alpha_ind"))
    """Of reinforce_transform: minus_alpha_exp_beta_r, or minus_alpha_ind, which subtracts --alpha from bad answers."""
    bad_threshold: float | None = None
    """Answers with a reward below this are bad: their share is measured."""
    reinforce_baseline_type: str = option("expectation", choices=("expectation", "hardcoded", "none"))
    """What a return is compared with: expectation (the mean of its group's other ones), hardcoded or none."""
    reinforce_hardcoded_baseline: float = option(0.0, needs=("reinforce_baseline_type", "hardcoded"))
    """The constant of hardcoded."""

    def check(self) -> Iterable[str]:
        by_threshold = self.reward_transform == "minus_alpha_ind"
        tilting = self.method in PUSHING or (self.method == "reinforce_transform" and not by_threshold)
        if tilting and self.target_dist_beta >= 0:
            raise UserError(
                f"--target_dist_beta {self.target_dist_beta:g}: with --method {self.method} it must be below 0, or "
                "good answers would be pushed down with the bad ones"
            )
        if self.start_target_dist_beta is not None and self.start_target_dist_beta >= 0:
            raise UserError(
                f"--start_target_dist_beta {self.start_target_dist_beta:g}: it must be below 0, as the last"
            )
        if self.start_alpha is not None and self.alpha == 0:
            raise UserError("--start_alpha: no factor leads from it to --alpha 0; give a small one")
        if self.method == "reinforce_transform" and by_threshold and self.bad_threshold is None:
            raise UserError(
                "--reward_transform minus_alpha_ind needs --bad_threshold: the reward below which one is bad"
            )
        if self.method in ("reinforce_transform", *PUSHING) and self.alpha == 0:
            yield f"--alpha 0 makes --method {self.method} the same as reinforce"
        for name, methods in OF_METHODS.items():
            if self.method not in methods:
                yield from self.idle([name], f"with --method {self.method}")


class ProposalOptions(Options):
    """Proposal of repulse"""

    proposal: str = option("model", choices=("model", *MODULATIONS))
    """model: a language model of its own, started from --pretrain; modulation_model, modulation_linear_head,
    modulation_nn_head: the policy times what a model, or a head on its hidden states, has learnt."""
    proposal_lora_rank: int = option(0, at_least=0)
    """Above 0 the proposal is adapters of this rank on the policy's own weights: no second model is held."""
    proposal_loss: str = option("ctl", choices=("ctl", "ctl_nosecondterm"))
    """ctl (contrastive twist learning), or ctl_nosecondterm, which leaves out its second term. With --token_reduction
    token_sum, or if all answers are equally long, that term only takes away noise; else what is learnt changes."""
    proposal_learning_rate: float = option(3e-5, at_least=0)
    """Peak learning rate of the proposal."""
    proposal_updates: int = option(1, at_least=1)
    """Updates of the proposal for each one of the policy, every one on answers of its own."""

    def check(self) -> Iterable[str]:
        if self.proposal in MODULATIONS and self.proposal_loss == "ctl_nosecondterm":
            raise UserError(
                f"--proposal_loss ctl_nosecondterm: without its second term --proposal {self.proposal} grows "
                "without bound; use ctl"
            )
        if self.proposal_lora_rank and self.proposal in MODULATIONS:
            raise UserError(f"--proposal_lora_rank: --proposal {self.proposal} takes no adapters; leave it out")
        return ()


class TailMeasureOptions(Options):
    """Measurements"""

    save_info_path: str | None = None
    """Folder of the metric files, in the original's layout and under its names; unset: --save_path."""
    fit_steps: int = option(1, at_least=1)
    """Repeat the whole training this many times, and measure after each."""
    single_prompt: str | None = None
    """Use this text in place of every prompt."""
    analytic_bad_word_calc: bool = False
    """Measure the exact probability that an answer to --single_prompt holds a bad token. For very short answers."""
    bad_token_ids: tuple[int, ...] | None = option(None, needs="analytic_bad_word_calc")
    """The bad tokens; unset: swear words of GPT-2's vocabulary."""
    evaluate_heldout_sampling: bool = False
    """After training answer the held-out prompts, and keep every reward."""
    heldout_prompt_data: str | None = option(None, needs="evaluate_heldout_sampling")
    """Held-out prompts, as --prompt_data."""
    heldout_input_key: str | None = option(None, needs="evaluate_heldout_sampling")
    """Column that holds them; unset: --input_key."""
    sampling_iters: int = option(1, at_least=1, needs="evaluate_heldout_sampling")
    """Passes over the held-out prompts."""
    save_negdata: bool = False
    """Keep the distinct texts that were sampled in training with a reward below the next option."""
    save_negdata_threshold: float = option(-5.0, needs="save_negdata")
    """The reward below which a text is kept; not given: --bad_threshold, if that is."""
    negdata_path: str | None = None
    """Folder of the file of these texts; unset: --save_info_path."""

    def check(self) -> Iterable[str]:
        if self.evaluate_heldout_sampling and not self.heldout_prompt_data:
            raise UserError("--evaluate_heldout_sampling needs --heldout_prompt_data: a file, a folder or a hub name")
        if self.analytic_bad_word_calc and self.single_prompt is None:
            raise UserError("--analytic_bad_word_calc sums over the answers to one prompt: give it as --single_prompt")
        if self.fit_steps > 1 and not self.analytic_bad_word_calc:
            raise UserError("--fit_steps measures with --analytic_bad_word_calc: add it, or use --num_episodes")
        return check_sources(self.heldout_prompt_data, "--heldout_prompt_data")
