"""What a Learner is made with (trimtab/api/learner.py): options of models, adapters, optimiser and engine. Its work is
not a run: there are no data, no schedule, no folder and one process."""

from collections.abc import Iterable
from dataclasses import fields

from trimtab.config.data import ChatTemplateOptions
from trimtab.config.groups import (
    DropoutOptions,
    LoraOptions,
    ModelOptions,
    OptimiserOptions,
    RunOptions,
)
from trimtab.config.job import with_defaults
from trimtab.config.option import option
from trimtab.config.rl import EngineOptions
from trimtab.config.sharding import ShardingOptions
from trimtab.errors import UserError

_NOT_TAKEN = {
    *("compile", "aux_loss_coef", "flash_attn", "use_ms", "gradient_checkpointing_use_reentrant"),
    *("lr_scheduler", "lr_warmup_ratio", "min_lr_ratio"),
    *(known.name for known in fields(ShardingOptions)),
    *(known.name for known in fields(RunOptions)),
} - {"adam_offload", "grad_accum_dtype", "seed", "full_determinism"}


@with_defaults(learning_rate=1e-6, seed=0)
class LearnerOptions(
    ModelOptions,
    DropoutOptions,
    LoraOptions,
    OptimiserOptions,
    EngineOptions,
    ChatTemplateOptions,
    ShardingOptions,
    RunOptions,
):
    """Learner"""

    pass_tokens: int | None = option(None, at_least=1)
    """Tokens in one forward and backward pass; unset: 8192, and on a CPU 2048. It changes memory and speed, not the
    result; where passes do not fit, they are made smaller."""

    @classmethod
    def taken(cls) -> list[str]:
        """The names that a Learner takes, but for its model."""
        known = [known.name for known in fields(cls) if "no_option" not in known.metadata]
        return [name for name in known if name not in _NOT_TAKEN and name != "pretrain"]

    def may_lack(self, name: str) -> bool:
        return name == "pretrain" or super().may_lack(name)  # a module may be given

    def check(self) -> Iterable[str]:
        if self.plans_recomputation:
            raise UserError("--gradient_checkpointing_layers auto: only a run is planned; give a number")
        return ()
