"""Jobs: which groups of options each one takes, and the defaults it changes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from trimtab.config.groups import (
    BatchOptions,
    CheckpointOptions,
    ConversationOptions,
    DataOptions,
    LoggingOptions,
    LoraOptions,
    ModelOptions,
    OptimiserOptions,
    RunOptions,
    ShardingOptions,
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


@job(
    "sft",
    max_epochs=2,
    ckpt_path="./ckpt/checkpoints_sft",
    input_template="User: {}\nAssistant: ",
    wandb_project="trimtab_train_sft",
)
class SFTOptions(
    ModelOptions,
    DataOptions,
    ConversationOptions,
    BatchOptions,
    OptimiserOptions,
    LoraOptions,
    CheckpointOptions,
    LoggingOptions,
    ShardingOptions,
    RunOptions,
):
    """Supervised fine-tuning"""

    verb: ClassVar[str]

    multiturn: bool = False
    """Learn every assistant turn of a conversation, not only the last."""
    pretrain_mode: bool = False
    """Learn every token of the text and use no template (continued pre-training)."""
