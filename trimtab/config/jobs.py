"""Jobs: which groups of options each one takes, and the defaults it changes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from trimtab.config.attack import (
    AttackedOptions,
    RewardInputOptions,
    SearchOptions,
    SuccessOptions,
    TargetFileOptions,
)
from trimtab.config.generation import (
    AnswerLengthOptions,
    BatchEngineOptions,
    ConditionOptions,
    DrawingOptions,
    PostProcessingOptions,
    PreambleOptions,
    SelectionOptions,
    TaskOptions,
)
from trimtab.config.groups import (
    AnswerOptions,
    BackwardOptions,
    BatchOptions,
    CallOptions,
    CheckpointOptions,
    ConversationOptions,
    CountOptions,
    DataOptions,
    InputColumn,
    LabelColumn,
    LengthOptions,
    LoadOptions,
    LoggingOptions,
    LoraOptions,
    ModelOptions,
    OptimiserOptions,
    OutputColumn,
    PackingOptions,
    PrecisionOptions,
    PreferenceColumns,
    PretrainOptions,
    ProcessOptions,
    PromptLengthOptions,
    RunOptions,
    ShardingOptions,
    SourceOptions,
    TemplateOptions,
)
from trimtab.config.objectives import (
    CachedReferenceOptions,
    DistillationOptions,
    MergeOptions,
    PreferenceLossOptions,
    ReferenceOptions,
    RewardHeadOptions,
    RewardLossOptions,
    StepRewardOptions,
    TargetOptions,
    UnpairedLossOptions,
)
from trimtab.config.rl import (
    ActorOptions,
    AdvantageOptions,
    CriticOptions,
    EngineOptions,
    JudgeOptions,
    KLOptions,
    PlacementOptions,
    PolicyLossOptions,
    PretrainMixOptions,
    PromptColumns,
    PromptOptions,
    RecordingOptions,
    RewardOptions,
    RewardScaleOptions,
    RewardSourceOptions,
    RolloutOptions,
    SamplingEvaluationOptions,
    TeacherRewardOptions,
    VLLMOptions,
)
from trimtab.config.serving import ServerOptions, StepScoreOptions
from trimtab.config.tail import ProposalOptions, TailMeasureOptions, TailMethodOptions


def job(verb: str, **defaults: Any) -> Callable[[type], type]:
    """Make a class of groups a job called `verb`, with these defaults in place of the groups' own."""

    def decorate(cls: type) -> type:
        inherited = {name: known for base in cls.__mro__[1:] for name, known in _fields_of(base).items()}
        for name, default in defaults.items():
            # Declaring the field again under the same type is how a dataclass takes a new default.
            cls.__annotations__[name] = inherited[name].type
            setattr(cls, name, default)
        cls.verb = verb
        cls.trainer = getattr(cls, "trainer", verb)
        return dataclass(frozen=True, kw_only=True)(cls)

    return decorate


def _fields_of(cls: type) -> dict[str, Any]:
    return cls.__dict__.get("__dataclass_fields__", {})


@dataclass(frozen=True, kw_only=True)
class Subject(ModelOptions, DataOptions):
    """What every training job starts from"""


@dataclass(frozen=True, kw_only=True)
class Training(
    BatchOptions,
    OptimiserOptions,
    LoraOptions,
    CheckpointOptions,
    LoggingOptions,
    ShardingOptions,
    RunOptions,
):
    """How every supervised job is trained"""


@job(
    "sft",
    max_epochs=2,
    ckpt_path="./ckpt/checkpoints_sft",
    input_template="User: {}\nAssistant: ",
    wandb_project="trimtab_train_sft",
)
class SFTOptions(Subject, ConversationOptions, TargetOptions, Training, AnswerOptions):
    """Supervised fine-tuning"""


@job(
    "rm",
    learning_rate=9e-6,
    micro_train_batch_size=1,
    max_len=512,
    ckpt_path="./ckpt/checkpoints_rm",
    wandb_project="trimtab_train_rm",
)
class RMOptions(Subject, PreferenceColumns, TemplateOptions, RewardHeadOptions, RewardLossOptions, Training):
    """Reward model"""


@job(
    "prm",
    learning_rate=1e-6,
    micro_train_batch_size=1,
    eval_split="test",
    ckpt_path="./ckpt/checkpoints_prm",
    wandb_project="trimtab_train_prm",
)
class PRMOptions(Subject, InputColumn, LabelColumn, StepRewardOptions, Training):
    """Process reward model"""


@job(
    "dpo",
    learning_rate=1e-5,
    max_len=512,
    eval_split="test",
    ckpt_path="./ckpt/checkpoints_dpo",
    wandb_project="trimtab_train_dpo",
)
class DPOOptions(
    Subject, PreferenceColumns, TemplateOptions, PreferenceLossOptions, CachedReferenceOptions, Training, AnswerOptions
):
    """Preference optimisation"""


# OpenRLHF starts KTO from bigscience/bloomz-1b7 when no model is named. Nobody means that, so here it must be named.
@job(
    "kto",
    learning_rate=1e-5,
    beta=0.01,
    eval_split="test",
    input_template="User: {}\nAssistant: ",
    ckpt_path="./ckpt/checkpoints_kto",
    wandb_project="trimtab_train_kto",
)
class KTOOptions(
    Subject, ConversationOptions, LabelColumn, UnpairedLossOptions, ReferenceOptions, Training, AnswerOptions
):
    """Kahneman-Tversky optimisation"""


@job(
    "kd",
    eval_split="test",
    output_key="output",
    input_template="User: {}\nAssistant: ",
    ckpt_path="./ckpt/checkpoints_kd",
    wandb_project="trimtab_train_kd",
)
class KDOptions(Subject, ConversationOptions, TargetOptions, DistillationOptions, Training, AnswerOptions):
    """Distillation"""


@dataclass(frozen=True, kw_only=True)
class RLOptions(
    ModelOptions,
    PromptOptions,
    PromptColumns,
    TemplateOptions,
    RolloutOptions,
    EngineOptions,
    RewardOptions,
    RewardHeadOptions,
    StepScoreOptions,
    AdvantageOptions,
    KLOptions,
    PolicyLossOptions,
    CriticOptions,
    PretrainMixOptions,
    TeacherRewardOptions,
    RecordingOptions,
    BatchOptions,
    ActorOptions,
    LoraOptions,
    CheckpointOptions,
    SamplingEvaluationOptions,
    ShardingOptions,
    PlacementOptions,
    VLLMOptions,
    RunOptions,
):
    """What every RL job has: they are one job with different defaults"""

    trainer: ClassVar[str] = "rl"

    max_samples: int = 100_000_000
    micro_train_batch_size: int = 4
    placeholder_token: str | None = None  # set: --reward_pretrain is a process reward model


@job("ppo", ckpt_path="./ckpt/checkpoints_ppo_ray", wandb_project="trimtab_train_ppo")
class PPOOptions(RLOptions):
    """Proximal policy optimisation"""


@job("rl", ckpt_path="./ckpt/checkpoints_rl", wandb_project="trimtab_train_rl")
class AnyRLOptions(RLOptions):
    """RL as a config file says"""


# The KL as a k3 loss with weight 0.001 is what both OpenRLHF's and PaddleNLP's GRPO recipes have.
@job(
    "grpo",
    advantage_estimator="group_norm",
    n_samples_per_prompt=8,
    use_kl_loss=True,
    kl_estimator="k3",
    init_kl_coef=1e-3,
    ckpt_path="./ckpt/checkpoints_grpo",
    wandb_project="trimtab_train_grpo",
)
class GRPOOptions(RLOptions):
    """Group relative policy optimisation"""


# Clip higher, no KL, the mean over tokens, and groups that teach nothing sampled again.
@job(
    "dapo",
    advantage_estimator="group_norm",
    n_samples_per_prompt=8,
    eps_clip_low_high=(0.2, 0.28),
    init_kl_coef=0.0,
    dynamic_filtering=True,
    ckpt_path="./ckpt/checkpoints_dapo",
    wandb_project="trimtab_train_dapo",
)
class DAPOOptions(RLOptions):
    """GRPO with DAPO's settings"""


@job(
    "reinforce",
    advantage_estimator="reinforce",
    ckpt_path="./ckpt/checkpoints_reinforce",
    wandb_project="trimtab_train_reinforce",
)
class ReinforceOptions(RLOptions):
    """REINFORCE++"""


@job(
    "rloo",
    advantage_estimator="rloo",
    n_samples_per_prompt=8,
    ckpt_path="./ckpt/checkpoints_rloo",
    wandb_project="trimtab_train_rloo",
)
class RLOOOptions(RLOptions):
    """REINFORCE leave-one-out"""


# The defaults are those of the smaller of RePULSe's two experiments with real models.
@job(
    "tail",
    rollout_batch_size=50,
    n_samples_per_prompt=5,
    generate_max_len=20,
    micro_rollout_batch_size=250,
    train_batch_size=250,
    micro_train_batch_size=250,
    advantage_estimator="rloo",
    init_kl_coef=0.2,
    lambd=0.95,
    value_clip=0.2,
    reward_clip_range=(-1e6, 1e4),  # a transformed reward may be very low
    actor_learning_rate=3e-5,
    critic_learning_rate=3e-5,
    lr_scheduler="constant",
    adam_betas=(0.9, 0.999),
    ckpt_path="./ckpt/checkpoints_tail",
    wandb_project="trimtab_train_tail",
)
class TailOptions(RLOptions, RewardInputOptions, TailMethodOptions, ProposalOptions, TailMeasureOptions):
    """Rare bad answers made rarer"""

    trainer: ClassVar[str] = "tail"


@job(
    "generate",
    seed=1234,
    max_samples=100_000_000,
    output_key="output",
    value_head_prefix="value_head",
    zero_stage=0,
)
class GenerateOptions(
    TaskOptions,
    PretrainOptions,
    SourceOptions,
    CountOptions,
    PromptLengthOptions,
    LengthOptions,
    PromptColumns,
    OutputColumn,
    TemplateOptions,
    AnswerLengthOptions,
    DrawingOptions,
    SelectionOptions,
    RewardSourceOptions,
    RewardHeadOptions,
    PostProcessingOptions,
    BatchEngineOptions,
    ProcessOptions,
    RunOptions,
):
    """Answers to many prompts, and their scores"""


@job(
    "chat",
    max_len=4096,
    input_template="User: {}\nAssistant: ",
    temperature=0.2,
    top_p=0.9,
    repetition_penalty=1.2,
)
class ChatOptions(
    PretrainOptions, LengthOptions, PreambleOptions, TemplateOptions, DrawingOptions, ConditionOptions, RunOptions
):
    """A conversation with a model"""


@job("attack", max_new_tokens=20)
class AttackOptions(
    PretrainOptions,
    BackwardOptions,
    AttackedOptions,
    TargetFileOptions,
    SearchOptions,
    AnswerLengthOptions,
    SuccessOptions,
    RewardInputOptions,
    RewardScaleOptions,
    RewardHeadOptions,
    ProcessOptions,
    RunOptions,
):
    """GCG attack"""


@job("lora-combine")
class LoraCombineOptions(MergeOptions, PrecisionOptions, CallOptions):
    """Merge a LoRA adapter into its model"""


# A reward model has no steps to end, so the placeholder that a process reward model needs may be missing.
@job("serve-rm", placeholder_token=None)
class ServeRMOptions(
    JudgeOptions,
    RewardScaleOptions,
    RewardHeadOptions,
    StepScoreOptions,
    LoadOptions,
    LengthOptions,
    PackingOptions,
    ServerOptions,
    CallOptions,
):
    """Reward server"""
