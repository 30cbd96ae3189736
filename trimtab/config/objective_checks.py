"""What checks.py says of the options in objectives.py: losses, references, teachers, merging."""

import os
from collections.abc import Iterable

from trimtab.config.bounds import a_place_that_exists, above_zero, at_least, between_zero_and_one, changed, one_of
from trimtab.config.jobs import DPOOptions
from trimtab.config.objectives import (
    BetaOptions,
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
from trimtab.errors import UserError

REFERENCE_FREE = ("orpo", "simpo")


def _examine_targets(options: TargetOptions) -> Iterable[str]:
    if options.multiturn and options.pretrain_mode:
        raise UserError("--multiturn learns the assistant's turns, --pretrain_mode every token: choose one")
    return []


def _examine_reward_head(options: RewardHeadOptions) -> Iterable[str]:
    if not options.value_head_prefix.isidentifier():
        raise UserError(f"--value_head_prefix is {options.value_head_prefix!r}: it must be a name such as score")
    return []


def _examine_reward_loss(options: RewardLossOptions) -> Iterable[str]:
    one_of(options, "loss", "sigmoid", "logexp")
    return []


def _examine_step_rewards(options: StepRewardOptions) -> Iterable[str]:
    tokens = options.reward_tokens
    if tokens is not None and (len(tokens) < 2 or len(set(tokens)) < len(tokens)):
        raise UserError(f"--reward_tokens {' '.join(tokens)}: give two or more different tokens, best first")
    return []


def _examine_beta(options: BetaOptions) -> Iterable[str]:
    above_zero(options, "beta")
    return []


def _examine_preference_loss(options: PreferenceLossOptions) -> Iterable[str]:
    one_of(options, "preference_loss", "dpo", "ipo", "orpo", "simpo")
    if options.ipo and options.preference_loss not in ("dpo", "ipo"):
        raise UserError(f"--ipo and --preference_loss {options.preference_loss} are two losses: choose one")
    if not 0 <= options.label_smoothing < 0.5:
        raise UserError(f"--label_smoothing is {options.label_smoothing:g}: it must be at least 0 and below 0.5")
    loss = "ipo" if options.ipo else options.preference_loss
    if options.label_smoothing and loss != "dpo":
        raise UserError(f"--label_smoothing belongs to the dpo loss, not to {loss}: drop one of the two")
    at_least(options, 0, "nll_loss_coef", "simpo_gamma")
    return []


def _examine_reference(options: ReferenceOptions) -> Iterable[str]:
    a_place_that_exists(options, "ref_pretrain")
    if options.ref_offload and not options.ref_pretrain and getattr(options, "lora_rank", 0):
        return ["--ref_offload has no effect: with --lora_rank the reference is the model without its adapters"]
    return []


def _examine_dpo(options: DPOOptions) -> Iterable[str]:
    if options.preference_loss in REFERENCE_FREE:
        for name in ("ref_pretrain", "ref_offload", "precompute_ref_log_probs"):
            if changed(options, name):
                raise UserError(f"--preference_loss {options.preference_loss} has no reference: drop --{name}")
    return []


def _examine_unpaired_loss(options: UnpairedLossOptions) -> Iterable[str]:
    at_least(options, 0, "desirable_loss_weight", "undesirable_loss_weight")
    if not options.desirable_loss_weight and not options.undesirable_loss_weight:
        raise UserError("--desirable_loss_weight and --undesirable_loss_weight are both 0: there is nothing to learn")
    return []


def _examine_distillation(options: DistillationOptions) -> Iterable[str]:
    a_place_that_exists(options, "teacher_model")
    between_zero_and_one(options, "kd_coef")
    one_of(options, "kd_loss", "forward_kl", "reverse_kl", "jsd")
    if not 0 < options.jsd_beta < 1:
        raise UserError(
            f"--jsd_beta is {options.jsd_beta:g}: it must be between 0 and 1; at the ends jsd is --kd_loss "
            "forward_kl or reverse_kl"
        )
    return [] if options.kd_coef else ["--teacher_model has no effect with --kd_coef 0"]


def _examine_merge(options: MergeOptions) -> Iterable[str]:
    model, adapter, output = (
        os.path.realpath(os.path.expanduser(place))
        for place in (options.model_path, options.lora_path, options.output_path)
    )
    a_place_that_exists(options, "model_path")
    a_place_that_exists(options, "lora_path")
    if os.path.isdir(adapter) and not os.path.isfile(os.path.join(adapter, "adapter_config.json")):
        raise UserError(f"--lora_path {options.lora_path}: no adapter_config.json there; give the folder of an adapter")
    for name, place in (("model_path", model), ("lora_path", adapter)):
        if output == place:
            raise UserError(f"--output_path is --{name}, which the merged model would replace: give another folder")
    if os.path.exists(output) and not os.path.isdir(output):
        raise UserError(f"--output_path {options.output_path} is a file: give a folder")
    if os.path.isdir(output) and os.listdir(output):
        return [f"--output_path {options.output_path} is not empty: files of the same names are replaced"]
    return []


EXAMINERS = (
    (TargetOptions, _examine_targets),
    (RewardHeadOptions, _examine_reward_head),
    (RewardLossOptions, _examine_reward_loss),
    (StepRewardOptions, _examine_step_rewards),
    (BetaOptions, _examine_beta),
    (PreferenceLossOptions, _examine_preference_loss),
    (ReferenceOptions, _examine_reference),
    (DPOOptions, _examine_dpo),
    (UnpairedLossOptions, _examine_unpaired_loss),
    (DistillationOptions, _examine_distillation),
    (MergeOptions, _examine_merge),
)
