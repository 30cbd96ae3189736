"""What can be said about options before torch is imported: mistakes are a UserError, oddities a line of warning.

What depends on this machine (packages, processes) is in support.py, what depends on the loss in objective_checks.py
and rl_checks.py.
"""

import dataclasses
import os
import time
from collections.abc import Iterable
from typing import Any, TypeVar

from trimtab.config.attack_checks import EXAMINERS as ATTACK_EXAMINERS
from trimtab.config.bounds import (
    a_place_that_exists,
    at_least,
    between_zero_and_one,
    changed,
    every_so_often,
)
from trimtab.config.catalogue import options_of
from trimtab.config.generation_checks import EXAMINERS as GENERATION_EXAMINERS
from trimtab.config.groups import (
    AnswerOptions,
    BatchOptions,
    CheckpointOptions,
    CountOptions,
    LengthOptions,
    LoadOptions,
    LoggingOptions,
    LoraOptions,
    ModelOptions,
    OptimiserOptions,
    PreferenceColumns,
    ProcessOptions,
    RowOptions,
    RunOptions,
    SamplingOptions,
    ShardingOptions,
    SourceOptions,
    TemplateOptions,
    UpdateOptions,
)
from trimtab.config.jobs import RLOptions, TailOptions
from trimtab.config.objective_checks import EXAMINERS as OBJECTIVE_EXAMINERS
from trimtab.config.objectives import PreferenceLossOptions
from trimtab.config.rl_checks import EXAMINERS as RL_EXAMINERS
from trimtab.config.rl_checks import settle_rl
from trimtab.config.serving_checks import EXAMINERS as SERVING_EXAMINERS
from trimtab.config.source_checks import check_mixture, check_sources
from trimtab.config.tail_checks import EXAMINERS as TAIL_EXAMINERS
from trimtab.config.tail_checks import settle_tail
from trimtab.errors import UserError

Options = TypeVar("Options")

SCHEDULERS = (
    "linear",
    "cosine",
    "cosine_with_min_lr",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
)


def settle(options: Options) -> tuple[Options, list[str]]:
    """The options with what they leave open filled in, and a line for each value that was set aside."""
    changes: dict[str, Any] = {}
    warnings = []
    if isinstance(options, LoggingOptions) and options.wandb_run_name is None:
        changes["wandb_run_name"] = f"{options.verb}_{time.strftime('%Y%m%dT%H%M%S')}"
    if (
        isinstance(options, TemplateOptions)
        and options.input_template is not None
        and "{}" not in options.input_template
    ):
        changes["input_template"] = None
        warnings.append("--input_template has no {} for the prompt, so it is left out")
    if isinstance(options, PreferenceLossOptions):
        # Two spellings of one choice; whoever reads either must see it.
        if options.ipo and options.preference_loss == "dpo":
            changes["preference_loss"] = "ipo"
        elif options.preference_loss == "ipo":
            changes["ipo"] = True
    if isinstance(options, RLOptions):
        changes |= settle_rl(options)
    if isinstance(options, TailOptions):
        changes |= settle_tail(options)
    return dataclasses.replace(options, **changes), warnings


def check(options: Any) -> list[str]:
    """Refuse what cannot be meant; return warnings about what probably is not."""
    warnings: list[str] = []
    for name, option in options_of(type(options)).items():
        if option.required and not getattr(options, name):
            raise UserError(f"--{name} is missing: give {option.required[1]}")
    for group, examine in EVERY_EXAMINER:
        if isinstance(options, group):
            warnings += examine(options)
    return warnings + _without_effect(options)


def _examine_model(options: ModelOptions) -> Iterable[str]:
    a_place_that_exists(options, "pretrain")
    at_least(options, 0, "aux_loss_coef")
    if options.aux_loss_coef > 0 and options.gradient_checkpointing_use_reentrant:
        raise UserError("--aux_loss_coef gets no gradient through reentrant checkpointing: leave that variant out")
    return []


def _examine_run(options: RunOptions) -> Iterable[str]:
    at_least(options, 0, "seed")
    return []


def _examine_load(options: LoadOptions) -> Iterable[str]:
    if options.load_in_4bit and not options.bf16:
        raise UserError("--load_in_4bit computes in bfloat16: add --bf16")
    return []


def _examine_lora(options: LoraOptions) -> Iterable[str]:
    at_least(options, 0, "lora_rank")
    at_least(options, 1, "lora_alpha")
    if not 0 <= options.lora_dropout < 1:
        raise UserError(f"--lora_dropout is {options.lora_dropout:g}: it must be at least 0 and below 1")
    if getattr(options, "load_in_4bit", False) and not options.lora_rank:
        raise UserError("--load_in_4bit freezes the base model: add --lora_rank, for example --lora_rank 16")
    if options.lora_rank or getattr(options, "proposal_lora_rank", 0):
        return []
    idle = (name for name in ("lora_alpha", "lora_dropout", "target_modules") if changed(options, name))
    return [f"--{name} has no effect without --lora_rank" for name in idle]


def _examine_update(options: UpdateOptions) -> Iterable[str]:
    if options.lr_scheduler not in SCHEDULERS:
        raise UserError(f"--lr_scheduler {options.lr_scheduler} is not one of {', '.join(SCHEDULERS)}")
    between_zero_and_one(options, "lr_warmup_ratio", "min_lr_ratio")
    at_least(options, 0, "l2", "max_norm")
    for beta in options.adam_betas:
        if not 0 <= beta < 1:
            raise UserError(f"--adam_betas has {beta:g}: both must be at least 0 and below 1")
    return []


def _examine_optimiser(options: OptimiserOptions) -> Iterable[str]:
    at_least(options, 0, "learning_rate")
    return []


def _examine_batches(options: BatchOptions) -> Iterable[str]:
    at_least(options, 1, "train_batch_size", "micro_train_batch_size", "max_epochs")
    whole, micro = options.train_batch_size, options.micro_train_batch_size
    if whole % micro:
        divisor = max(number for number in range(1, min(micro, whole) + 1) if whole % number == 0)
        other = "" if whole < micro else f", or --train_batch_size {whole - whole % micro}"
        raise UserError(
            f"--train_batch_size {whole} is not a multiple of --micro_train_batch_size {micro}: "
            f"use --micro_train_batch_size {divisor}{other}"
        )
    budget = options.train_max_tokens_per_gpu
    if budget is None or isinstance(options, RLOptions):
        return []
    if not options.packing_samples:
        raise UserError("--train_max_tokens_per_gpu is the budget of packed rows: add --packing_samples")
    answers, sample = (2, "pair of two") if isinstance(options, PreferenceColumns) else (1, "sample of")
    if budget < answers * options.max_len:
        raise UserError(
            f"--train_max_tokens_per_gpu {budget} cannot hold one {sample} --max_len {options.max_len}: "
            f"raise it to {answers * options.max_len} or more"
        )
    return []


def _examine_count(options: CountOptions) -> Iterable[str]:
    at_least(options, 1, "max_samples")
    return []


def _examine_rows(options: RowOptions) -> Iterable[str]:
    if options.num_workers is not None:
        at_least(options, 1, "num_workers")
    return check_sources(options.eval_dataset, "--eval_dataset")


def _examine_length(options: LengthOptions) -> Iterable[str]:
    at_least(options, 1, "max_len")
    return []


def _examine_sources(options: SourceOptions) -> Iterable[str]:
    return check_mixture(options.dataset, options.dataset_probs, "--dataset")


def _examine_sampling(options: SamplingOptions) -> Iterable[str]:
    if not 0 < options.top_p <= 1:
        raise UserError(f"--top_p is {options.top_p:g}: it must be above 0 and at most 1")
    return []


def _examine_templates(options: TemplateOptions) -> Iterable[str]:
    if options.input_template and "\\n" in options.input_template:
        return [r"--input_template holds a backslash and an n, not a new line: in bash write $'...\n...'"]
    return []


def _examine_checkpoints(options: CheckpointOptions) -> Iterable[str]:
    source = getattr(options, "pretrain", None)
    if source and os.path.realpath(os.path.expanduser(source)) == os.path.realpath(options.save_path):
        raise UserError(f"--save_path {options.save_path} is --pretrain: the model it starts from would be lost")
    every_so_often(options, "save_steps")
    at_least(options, 1, "max_ckpt_num", "max_ckpt_mem")
    if options.save_steps > 0 and options.disable_ds_ckpt and not options.save_hf_ckpt:
        return ["--save_steps saves nothing: --disable_ds_ckpt is on and --save_hf_ckpt is not"]
    return []


def _examine_logging(options: LoggingOptions) -> Iterable[str]:
    at_least(options, 1, "logging_steps")
    every_so_often(options, "eval_steps")
    return []


def _examine_answers(options: AnswerOptions) -> Iterable[str]:
    at_least(options, 0, "report_samples")
    if options.report_samples and getattr(options, "load_in_4bit", False):
        raise UserError("--report_samples loads the model unquantised: leave it out, or --load_in_4bit")
    return []


def _examine_processes(options: ProcessOptions) -> Iterable[str]:
    if options.zero_stage not in range(4):
        raise UserError(f"--zero_stage is {options.zero_stage}: it must be 0, 1, 2 or 3")
    return []


def _examine_sharding(options: ShardingOptions) -> Iterable[str]:
    if options.grad_accum_dtype not in (None, "fp32", "bf16"):
        raise UserError(f"--grad_accum_dtype is {options.grad_accum_dtype}: it must be fp32, bf16 or None")
    return []


_EXAMINERS = (
    (RunOptions, _examine_run),
    (ModelOptions, _examine_model),
    (SourceOptions, _examine_sources),
    (SamplingOptions, _examine_sampling),
    (CountOptions, _examine_count),
    (RowOptions, _examine_rows),
    (LengthOptions, _examine_length),
    (LoadOptions, _examine_load),
    (LoraOptions, _examine_lora),
    (UpdateOptions, _examine_update),
    (OptimiserOptions, _examine_optimiser),
    (BatchOptions, _examine_batches),
    (TemplateOptions, _examine_templates),
    (CheckpointOptions, _examine_checkpoints),
    (LoggingOptions, _examine_logging),
    (AnswerOptions, _examine_answers),
    (ProcessOptions, _examine_processes),
    (ShardingOptions, _examine_sharding),
)
EVERY_EXAMINER = (
    *_EXAMINERS,
    *OBJECTIVE_EXAMINERS,
    *TAIL_EXAMINERS,  # before RL's, which would speak of options that the method has chosen
    *RL_EXAMINERS,
    *GENERATION_EXAMINERS,
    *SERVING_EXAMINERS,
    *ATTACK_EXAMINERS,
)

_NEEDS = (
    ("gradient_checkpointing_use_reentrant", "gradient_checkpointing"),
    ("eval_split", "eval_dataset"),
    ("wandb_org", "use_wandb"),
    ("wandb_group", "use_wandb"),
    ("overlong_penalty_factor", "overlong_buffer_len"),
    ("dynamic_filtering_reward_range", "dynamic_filtering"),
    ("kl_horizon", "kl_target"),
    ("use_kl_loss", "init_kl_coef"),
    ("ema_beta", "enable_ema"),
    ("vllm_tensor_parallel_size", "vllm_num_engines"),
    ("vllm_is_truncated_threshold", "enable_vllm_is_correction"),
    ("pretrain_data_probs", "pretrain_data"),
    ("pretrain_split", "pretrain_data"),
    ("ptx_coef", "pretrain_data"),
    ("teacher_coef", "teacher_model"),
    ("mismatch_range", "mismatch_correction"),
)
_NEEDS_CHOICE = (
    ("min_lr_ratio", "lr_scheduler", "cosine_with_min_lr"),
    ("simpo_gamma", "preference_loss", "simpo"),
    ("jsd_beta", "kd_loss", "jsd"),
)


def _without_effect(options: Any) -> list[str]:
    return [
        f"--{name} has no effect without --{needed}"
        for name, needed in _NEEDS
        if changed(options, name) and not getattr(options, needed)
    ] + [
        f"--{name} has no effect without --{choice} {value}"
        for name, choice, value in _NEEDS_CHOICE
        if changed(options, name) and getattr(options, choice) != value
    ]
