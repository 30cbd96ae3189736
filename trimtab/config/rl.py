"""Groups of options of the RL jobs: prompts, rollouts, rewards, advantages, losses, and who runs where.

Like groups.py. What RL shares with the other jobs (model, LoRA, checkpoints, sharding, ...) is in there.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from trimtab.config import estimators
from trimtab.config.data import InputColumn, PromptLengthOptions, RowOptions
from trimtab.config.groups import AnswerOptions, SamplingOptions, UpdateOptions
from trimtab.config.option import Options, option, required
from trimtab.config.sources import check_mixture, check_sources
from trimtab.errors import UserError


@dataclass(frozen=True, kw_only=True)
class PromptOptions(RowOptions, PromptLengthOptions):
    """Data"""

    prompt_data: str = required("DATA", "a file, a folder or a hub name")
    """Prompts: hub names, files or folders, separated by commas, as --dataset of the other jobs."""
    prompt_data_probs: str | None = None
    """Share of each source, separated by commas; unset: the sources are concatenated."""
    prompt_split: str = "train"
    """Split to train on."""
    truncate_prompts: bool = False
    """Cut prompts longer than --prompt_max_len, whose first tokens stay, instead of leaving them out; they are counted
    too."""
    no_shuffle: bool = False
    """Take the prompts in the order of the data, in every episode."""
    drop_last: bool = False
    """Leave out the prompts at the end of an episode that do not fill an iteration."""
    # Unlike --max_len of the other jobs, which is always a number.
    max_len: int | None = None
    """At most this many tokens in prompt and answer together; unset: prompt_max_len + generate_max_len. Deprecated."""

    def check(self) -> Iterable[str]:
        if self.prompt_data is None:  # an environment has rows
            return self.idle(["prompt_data_probs", "prompt_split"], "without --prompt_data")
        return check_mixture(self.prompt_data, self.prompt_data_probs, "--prompt_data")


@dataclass(frozen=True, kw_only=True)
class PromptColumns(InputColumn):
    """Conversations"""

    # Unlike --label_key of the other jobs, which judges an answer and is never unset.
    label_key: str | None = None
    """Column that is handed to the reward as the prompt's label, such as the right answer."""


@dataclass(frozen=True, kw_only=True)
class PretrainMixOptions(Options):
    """Pre-training mix"""

    pretrain_data: str | None = None
    """Text to go on pre-training on beside RL (PTX)."""
    pretrain_data_probs: str | None = option("1.0", needs="pretrain_data")
    """Share of each source of --pretrain_data."""
    pretrain_split: str = option("train", needs="pretrain_data")
    """Split of --pretrain_data."""
    ptx_coef: float = option(0.05, at_least=0, needs="pretrain_data")
    """Weight of the loss on --pretrain_data; an update takes as many of its rows as it has samples."""

    def check(self) -> Iterable[str]:
        return check_sources(self.pretrain_data, "--pretrain_data")


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
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
    """No answer ends before it has so many tokens."""
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
    """At most so many rounds of sampling for an iteration, which is then made of the groups there are; unset: as many
    as it takes."""
    dynamic_filtering_reward_range: tuple[float, float] = option((0.0, 1.0), needs=("dynamic_filtering_rule", "mean"))
    """Mean scores between these two, both excluded, are kept."""

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


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class AdvantageOptions(Options):
    """Advantages"""

    advantage_estimator: str = option("gae", choices=estimators.CALLED)
    """How rewards become advantages"""
    gamma: float = option(1.0, at_least=0, at_most=1)
    """Discount of later rewards, token by token; always 1 in the estimators that compare a group's answers."""
    lambd: float = option(1.0, at_least=0, at_most=1)
    """Lambda of gae: 1 trusts the rewards, 0 the critic."""
    no_advantage_std_norm: bool = False
    """Where advantages are whitened over the iteration, centre them only."""

    @property
    def estimator(self) -> estimators.Estimator:
        return estimators.ESTIMATORS[self.advantage_estimator]

    def check(self) -> Iterable[str]:
        estimator = self.estimator
        if not estimator.discounted and self.gamma != 1:
            yield f"--gamma has no effect: --advantage_estimator {estimator.name} does not discount"
        if self.no_advantage_std_norm and not estimator.whitened:
            yield f"--no_advantage_std_norm has no effect: {estimator.name} does not whiten its advantages"


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class PolicyLossOptions(Options):
    """Policy loss"""

    policy_loss_type: str = option("ppo", choices=("ppo", "gspo", "cispo"))
    """ppo (a ratio for each token), gspo (one ratio for each answer) or cispo (the ratio is a clipped weight)."""
    policy_loss_coef: float = option(1.0, at_least=0)
    """Weight of the policy loss beside the KL and the entropy."""
    loss_reduction: str | None = option(None, choices=("token", "answer", "constant"))
    """What the mean is over: token (all tokens alike), answer (all answers alike) or constant (--generate_max_len
    tokens for each answer, as in Dr. GRPO; for each episode --max_turns times as many, up to --episode_max_len); unset:
    token, for gspo answer."""
    eps_clip: float = option(0.2, above=0)
    """The ratio of new to old probability is clipped to 1 - eps_clip and 1 + eps_clip."""
    eps_clip_low_high: tuple[float, float] | None = None
    """Two values instead, for the lower and the upper bound."""
    dual_clip: float | None = option(None, above=1)
    """A bound above 1 on how much a bad answer counts that has become more likely; unset: none."""
    entropy_loss_coef: float | None = option(None, at_least=0)
    """Weight of the entropy, which is raised; 0: only measured; unset: not even that."""
    freezing_actor_steps: int = option(-1, at_least=-1)
    """Train the critic alone for so many iterations; 0 or -1: none."""
    mismatch_correction: str | None = option(None, choices=("tis", "icepop", "sequence"))
    """Weigh tokens by how far the policy is from what sampled them: tis (truncated), icepop (tokens outside the range
    are left out) or sequence (answers outside the range are left out); unset: none."""
    mismatch_range: tuple[float, float] = option((0.5, 2.0), needs="mismatch_correction")
    """Lowest and highest such weight."""

    def check(self) -> Iterable[str]:
        low, high = self.mismatch_range
        if not 0 <= low < high:
            raise UserError(
                f"--mismatch_range {low:g} {high:g}: give two weights, the first at least 0 and below the second"
            )
        if self.dual_clip is not None and self.policy_loss_type != "ppo":
            raise UserError(f"--dual_clip belongs to --policy_loss_type ppo, not {self.policy_loss_type}: drop it")
        if self.eps_clip_low_high is not None:
            low, high = self.eps_clip_low_high
            if not 0 < low <= 1 or high <= 0:
                raise UserError(
                    f"--eps_clip_low_high {low:g} {high:g}: both must be above 0, and the first, of the lower bound, "
                    "at most 1"
                )
            yield from self.idle(["eps_clip"], "beside --eps_clip_low_high")
        bounds = "eps_clip" if self.eps_clip_low_high is None else "eps_clip_low_high"
        if self.policy_loss_type == "cispo" and self.asks(bounds):
            yield f"--{bounds} has no effect as a lower bound: --policy_loss_type cispo bounds from above alone"


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class ActorOptions(UpdateOptions):
    """Optimiser"""

    actor_learning_rate: float = option(1e-6, at_least=0)
    """Peak learning rate of the policy."""
    enable_ema: bool = False
    """Evaluate and save a running average of the policy instead of the policy."""
    ema_beta: float = option(0.992, at_least=0, at_most=1, needs="enable_ema")
    """Decay of that average."""


@dataclass(frozen=True, kw_only=True)
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
