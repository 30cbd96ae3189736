"""Jobs: which groups of options each one takes, and the defaults it changes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trimtab.config.groups import (
    AnswerOptions,
    BatchOptions,
    CallOptions,
    CheckpointOptions,
    ConversationOptions,
    DataOptions,
    InputColumn,
    LabelColumn,
    LoggingOptions,
    LoraOptions,
    ModelOptions,
    OptimiserOptions,
    PrecisionOptions,
    PreferenceColumns,
    RunOptions,
    ShardingOptions,
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


def job(verb: str, **defaults: Any) -> Callable[[type], type]:
    """Make a class of groups a job called `verb`, with these defaults in place of the groups' own."""

    def decorate(cls: type) -> type:
        inherited = {name: known for base in cls.__mro__[1:] for name, known in _fields_of(base).items()}
        for name, default in defaults.items():
            # Declaring the field again under the same type is how a dataclass takes a new default.
            cls.__annotations__[name] = inherited[name].type
            setattr(cls, name, default)
        cls.verb = verb
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


@job("lora-combine")
class LoraCombineOptions(MergeOptions, PrecisionOptions, CallOptions):
    """Merge a LoRA adapter into its model"""
