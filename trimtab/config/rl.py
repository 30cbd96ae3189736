"""Groups of options of the RL jobs: prompts, rollouts, rewards, advantages, losses, and who runs where.

Like groups.py. What RL shares with the other jobs (model, LoRA, checkpoints, sharding, ...) is in there.
"""

from dataclasses import dataclass

from trimtab.config.groups import (
    AnswerOptions,
    InputColumn,
    PrefixOptions,
    PromptLengthOptions,
    RowOptions,
    SamplingOptions,
    UpdateOptions,
    required,
)


@dataclass(frozen=True, kw_only=True)
class PromptOptions(RowOptions, PromptLengthOptions):
    """Data"""

    prompt_data: str | None = required("DATA", "a file, a folder or a hub name")
    """Prompts: hub names, files or folders, separated by commas, as --dataset of the other jobs."""
    prompt_data_probs: str | None = None
    """Share of each source, separated by commas; unset: the sources are concatenated."""
    prompt_split: str = "train"
    """Split to train on."""
    # Unlike --max_len of the other jobs, which is always a number.
    max_len: int | None = None
    """At most this many tokens in prompt and answer together; unset: prompt_max_len + generate_max_len. Deprecated."""


@dataclass(frozen=True, kw_only=True)
class PromptColumns(InputColumn):
    """Conversations"""

    # Unlike --label_key of the other jobs, which judges an answer and is never unset.
    label_key: str | None = None
    """Column that is handed to the reward as the prompt's label, such as the right answer."""


@dataclass(frozen=True, kw_only=True)
class PretrainMixOptions:
    """Pre-training mix"""

    pretrain_data: str | None = None
    """Text to go on pre-training on beside RL (PTX)."""
    pretrain_data_probs: str | None = "1.0"
    """Share of each source of --pretrain_data."""
    pretrain_split: str = "train"
    """Split of --pretrain_data."""
    ptx_coef: float = 0.05
    """Weight of the loss on --pretrain_data; an update takes as many of its rows as it has samples."""


@dataclass(frozen=True, kw_only=True)
class TeacherRewardOptions:
    """Rewards"""

    teacher_model: str | None = None
    """Model to learn from on the policy's own answers (on-policy distillation): each token's reward is how much more
    likely the teacher finds it."""
    teacher_coef: float = 1.0
    """Weight of that reward."""


@dataclass(frozen=True, kw_only=True)
class RecordingOptions:
    """Rollouts"""

    record: str | None = None
    """Folder to keep every iteration's rollouts and rewards in."""
    replay: str | None = None
    """Folder of such a recording: learn from it instead of sampling."""


@dataclass(frozen=True, kw_only=True)
class RolloutOptions(SamplingOptions):
    """Rollouts"""

    num_episodes: int = 1
    """Passes over the prompts."""
    rollout_batch_size: int = 1024
    """Prompts in one iteration: they are answered, scored and learnt from before the next ones are."""
    n_samples_per_prompt: int = 1
    """Answers to each prompt; they form a group."""
    generate_max_len: int = 1024
    """At most this many tokens in an answer."""
    micro_rollout_batch_size: int = 8
    """Answers in one pass of scoring (log-probabilities, values, rewards); it changes memory and speed, not the
    result."""
    rollout_max_tokens_per_gpu: int | None = None
    """Token budget of a pass of scoring, with --use_dynamic_batch; unset: that of training."""
    use_dynamic_batch: bool = False
    """Cut passes by --train_max_tokens_per_gpu (16192 if unset) instead of by number."""
    vllm_generate_batch_size: int | None = None
    """Prompts answered in one go; unset: rollout_batch_size. With --dynamic_filtering more of them wait less often."""
    dynamic_filtering: bool = False
    """Leave out groups whose mean score is outside the range below, and sample on until the iteration is full."""
    dynamic_filtering_reward_range: tuple[float, float] = (0.0, 1.0)
    """Mean scores between these two, both excluded, are kept."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Built-in rollout engine"""

    rollout_slots: int = 256
    """Answers that are written at once."""
    rollout_kv_tokens: int | None = None
    """Tokens whose keys and values are kept; unset: planned from the memory that is free."""
    weight_only_int8: bool = False
    """Sample with weights rounded to 8 bits: less memory traffic, and samples that are slightly off the policy."""


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """Rewards"""

    reward_pretrain: str | None = None
    """Reward models, separated by commas: ours, or any sequence classifiers with one score. Their rewards are added
    up."""
    reward_verifier: str | None = None
    """Built-in rewards with their weights, for example gsm8k:1.0,format:0.2."""


@dataclass(frozen=True, kw_only=True)
class RewardSourceOptions(JudgeOptions):
    """Rewards"""

    remote_rm_url: str | None = None
    """Python files with reward_func(queries, prompts, labels), or addresses of reward servers, which share the
    samples; separated by commas."""
    reward_weights: tuple[float, ...] | None = None
    """Weights of the models, then of the files and, together, of the servers; unset: 1 each."""


@dataclass(frozen=True, kw_only=True)
class RewardScaleOptions:
    """Rewards"""

    normalize_reward: bool = False
    """Subtract the mean and divide by the deviation that the reward model's config.json holds."""


@dataclass(frozen=True, kw_only=True)
class RewardOptions(RewardSourceOptions, RewardScaleOptions):
    """Rewards"""

    reward_clip_range: tuple[float, float] = (-10.0, 10.0)
    """The reward of an answer, after shaping, is kept between these two."""
    overlong_buffer_len: float | None = None
    """Tokens before --generate_max_len in which an answer's length is penalised, the longer the more; unset: none."""
    overlong_penalty_factor: float = 1.0
    """The penalty at full length."""


@dataclass(frozen=True, kw_only=True)
class AdvantageOptions:
    """Advantages"""

    advantage_estimator: str = "gae"
    """gae (PPO, with a critic), reinforce (REINFORCE++), reinforce_baseline, rloo, group_norm (GRPO) or dr_grpo."""
    gamma: float = 1.0
    """Discount of later rewards, token by token; always 1 in the estimators that compare a group's answers."""
    lambd: float = 1.0
    """Lambda of gae: 1 trusts the rewards, 0 the critic."""
    no_advantage_std_norm: bool = False
    """Where advantages are whitened over the iteration, centre them only."""


@dataclass(frozen=True, kw_only=True)
class KLOptions:
    """KL to the reference"""

    init_kl_coef: float = 0.01
    """Weight of the KL; 0: none, and no reference is loaded."""
    kl_target: float | None = None
    """Adapt the weight so that the KL stays near this value."""
    kl_horizon: int = 10_000
    """Samples in which the weight adapts."""
    kl_estimator: str = "k1"
    """With d the difference in log-probability: k1 is d, k2 is d^2 / 2, k3 is exp(-d) - 1 + d."""
    use_kl_loss: bool = False
    """The KL is a term of the loss, not of the reward."""


@dataclass(frozen=True, kw_only=True)
class PolicyLossOptions:
    """Policy loss"""

    policy_loss_type: str = "ppo"
    """ppo (a ratio for each token), gspo (one ratio for each answer) or cispo (the ratio is a clipped weight)."""
    loss_reduction: str | None = None
    """What the mean is over: token (all tokens alike), answer (all answers alike) or constant (--generate_max_len
    tokens for each answer, as in Dr. GRPO); unset: token, for gspo answer."""
    eps_clip: float = 0.2
    """The ratio of new to old probability is clipped to 1 - eps_clip and 1 + eps_clip."""
    eps_clip_low_high: tuple[float, float] | None = None
    """Two values instead, for the lower and the upper bound."""
    dual_clip: float | None = None
    """A bound above 1 on how much a bad answer counts that has become more likely; unset: none."""
    entropy_loss_coef: float | None = None
    """Weight of the entropy, which is raised; 0: only measured; unset: not even that."""
    freezing_actor_steps: int = -1
    """Train the critic alone for so many iterations; -1: none."""
    mismatch_correction: str | None = None
    """Weigh tokens by how far the policy is from what sampled them: tis (truncated), icepop (tokens outside the range
    are left out) or sequence (answers outside the range are left out); unset: none."""
    mismatch_range: tuple[float, float] = (0.5, 2.0)
    """Lowest and highest such weight."""


@dataclass(frozen=True, kw_only=True)
class CriticOptions:
    """Critic"""

    critic_pretrain: str | None = None
    """Model the critic starts from; unset: the first reward model or, without one or if its tokenizer is another one,
    --pretrain."""
    critic_learning_rate: float = 9e-6
    """Peak learning rate of the critic."""
    value_clip: float = 0.5
    """A value moves at most this far from what it was when the answers were written."""
    save_value_network: bool = False
    """Save the critic too, in critic/ of --save_path."""


@dataclass(frozen=True, kw_only=True)
class ActorOptions(UpdateOptions):
    """Optimiser"""

    actor_learning_rate: float = 1e-6
    """Peak learning rate of the policy."""
    enable_ema: bool = False
    """Save a running average of the policy instead of the policy."""
    ema_beta: float = 0.992
    """Decay of that average."""


@dataclass(frozen=True, kw_only=True)
class SamplingEvaluationOptions(AnswerOptions):
    """Logging and evaluation"""

    eval_temperature: float = 0.6
    """Temperature of the samples in evaluation."""
    eval_n_samples_per_prompt: int = 4
    """Samples for each prompt in evaluation."""
    save_rollouts: int = 8
    """Rollouts of every iteration that are kept in the log."""
    perf: bool = False
    """Measure the time of each phase; that is always done here."""


@dataclass(frozen=True, kw_only=True)
class PlacementOptions:
    """Placement"""

    actor_num_nodes: int = 1
    """Machines of the policy."""
    # OpenRLHF's 8 would refuse every smaller machine; unset is what is here.
    actor_num_gpus_per_node: int | None = None
    """GPUs of the policy on each machine, which all models share here; unset: --nproc."""
    ref_num_nodes: int = 1
    """Machines of the reference."""
    ref_num_gpus_per_node: int | None = None
    """GPUs of the reference on each machine."""
    critic_num_nodes: int = 1
    """Machines of the critic."""
    critic_num_gpus_per_node: int | None = None
    """GPUs of the critic on each machine."""
    reward_num_nodes: int = 1
    """Machines of the reward models."""
    reward_num_gpus_per_node: int | None = None
    """GPUs of the reward models on each machine."""
    colocate_actor_ref: bool = False
    """Policy and reference share GPUs; here they always do."""
    colocate_critic_reward: bool = False
    """Critic and reward models share GPUs; here they always do."""
    colocate_all_models: bool = False
    """All models and the rollout engine share GPUs; here they always do."""
    ref_reward_offload: bool = False
    """Keep the weights of reference and reward models in main memory and bring them to the device to score."""
    deepspeed_enable_sleep: bool = False
    """Free the optimiser's device memory while answers are written. Not implemented yet."""
    actor_init_on_gpu: bool = False
    """Load the policy straight to the device; that is how it is always done here."""
    async_train: bool = False
    """Write the next answers while learning from the last. Not implemented yet."""
    agent_func_path: str | None = None
    """Python file of an environment that answers the policy turn by turn. Not implemented yet."""


@dataclass(frozen=True, kw_only=True)
class VLLMOptions(PrefixOptions):
    """vLLM"""

    vllm_num_engines: int | None = None
    """Number of vLLM engines. The built-in engine does their work, on the policy's own GPUs."""
    vllm_tensor_parallel_size: int = 1
    """GPUs of one engine."""
    vllm_gpu_memory_utilization: float = 0.95
    """Share of the memory that an engine may take."""
    vllm_sync_backend: str = "nccl"
    """How weights go to the engines: nccl or gloo. The built-in engine reads the policy's own."""
    vllm_sync_with_ray: bool = False
    """Send the weights through Ray."""
    vllm_enable_sleep: bool = False
    """Give the engine's memory back while the policy is trained; done here when it is more than what is free."""
    enforce_eager: bool = False
    """Capture no graphs."""
    enable_vllm_is_correction: bool = False
    """Weigh tokens by how much the policy and the engine that wrote them differ."""
    vllm_is_truncated_threshold: float = 2.0
    """Upper bound of that weight."""
