"""What checks.py says of the options in tail.py."""

from collections.abc import Iterable
from typing import Any

from trimtab.config.bounds import at_least, changed, one_of
from trimtab.config.jobs import TailOptions
from trimtab.config.source_checks import check_sources
from trimtab.config.tail import (
    METHODS,
    MODULATIONS,
    PUSHING,
    ProposalOptions,
    TailMeasureOptions,
    TailMethodOptions,
)
from trimtab.errors import UserError

# Options of other RL jobs that would change what is sampled, or what a return is, unseen by the formulas.
_OF_OTHER_METHODS = (
    *("temperature", "top_p", "weight_only_int8", "max_epochs", "gamma", "use_kl_loss", "kl_estimator", "kl_target"),
    *("dynamic_filtering", "overlong_buffer_len", "entropy_loss_coef", "policy_loss_type", "no_advantage_std_norm"),
    *("eps_clip", "eps_clip_low_high", "dual_clip", "aux_loss_coef", "loss_reduction", "mismatch_correction"),
    *("teacher_model", "pretrain_data", "freezing_actor_steps"),
)


def settle_tail(options: TailOptions) -> dict[str, Any]:
    """What the method decides."""
    if options.method not in METHODS:
        return {}  # checks refuse it
    estimator = "gae" if options.method == "ppo" else "rloo"
    if changed(options, "advantage_estimator") and options.advantage_estimator != estimator:
        raise UserError(
            f"--advantage_estimator {options.advantage_estimator}: --method decides that here; leave it out"
        )
    changes: dict[str, Any] = {"advantage_estimator": estimator}
    if options.save_negdata and options.bad_threshold is not None and not changed(options, "save_negdata_threshold"):
        changes["save_negdata_threshold"] = options.bad_threshold
    if options.method == "ppo" and options.critic_pretrain is None:
        changes["critic_pretrain"] = options.pretrain  # not the reward model: critic and policy start alike
    if options.method == "ppo" and options.loss_reduction is None:
        changes["loss_reduction"] = "answer"  # as in the other methods, with their default
    return changes


def _examine_method(options: TailMethodOptions) -> Iterable[str]:
    one_of(options, "method", *METHODS)
    one_of(options, "push_down_scale", "per_sample", "per_group")
    one_of(options, "token_reduction", "token_mean", "token_sum")
    one_of(options, "reward_transform", "minus_alpha_exp_beta_r", "minus_alpha_ind")
    one_of(options, "reinforce_baseline_type", "expectation", "hardcoded", "none")
    at_least(options, 0, "alpha")
    by_threshold = options.reward_transform == "minus_alpha_ind"
    tilting = options.method in PUSHING or (options.method == "reinforce_transform" and not by_threshold)
    if tilting and options.target_dist_beta >= 0:
        raise UserError(
            f"--target_dist_beta {options.target_dist_beta:g}: with --method {options.method} it must be below 0, or "
            "good answers would be pushed down with the bad ones"
        )
    if options.method == "reinforce_transform" and by_threshold and options.bad_threshold is None:
        raise UserError("--reward_transform minus_alpha_ind needs --bad_threshold: the reward below which one is bad")
    warnings = []
    if options.method in ("reinforce_transform", *PUSHING) and options.alpha == 0:
        warnings.append(f"--alpha 0 makes --method {options.method} the same as reinforce")
    if changed(options, "reinforce_hardcoded_baseline") and options.reinforce_baseline_type != "hardcoded":
        warnings.append("--reinforce_hardcoded_baseline has no effect without --reinforce_baseline_type hardcoded")
    return warnings


def _examine_proposal(options: ProposalOptions) -> Iterable[str]:
    one_of(options, "proposal", "model", *MODULATIONS)
    one_of(options, "proposal_loss", "ctl", "ctl_nosecondterm")
    at_least(options, 0, "proposal_learning_rate", "proposal_lora_rank")
    at_least(options, 1, "proposal_updates")
    if options.proposal in MODULATIONS and options.proposal_loss == "ctl_nosecondterm":
        raise UserError(
            f"--proposal_loss ctl_nosecondterm: without its second term --proposal {options.proposal} grows "
            "without bound; use ctl"
        )
    if options.proposal_lora_rank and options.proposal in MODULATIONS:
        raise UserError(f"--proposal_lora_rank: --proposal {options.proposal} takes no adapters; leave it out")
    return []


def _examine_measures(options: TailMeasureOptions) -> Iterable[str]:
    at_least(options, 1, "fit_steps", "sampling_iters")
    if options.evaluate_heldout_sampling and not options.heldout_prompt_data:
        raise UserError("--evaluate_heldout_sampling needs --heldout_prompt_data: a file, a folder or a hub name")
    if options.analytic_bad_word_calc and options.single_prompt is None:
        raise UserError("--analytic_bad_word_calc sums over the answers to one prompt: give it as --single_prompt")
    if options.fit_steps > 1 and not options.analytic_bad_word_calc:
        raise UserError("--fit_steps measures with --analytic_bad_word_calc: add it, or use --num_episodes")
    warnings = check_sources(options.heldout_prompt_data, "--heldout_prompt_data")
    for name, needed in (
        ("bad_token_ids", "analytic_bad_word_calc"),
        ("heldout_prompt_data", "evaluate_heldout_sampling"),
        ("heldout_input_key", "evaluate_heldout_sampling"),
        ("sampling_iters", "evaluate_heldout_sampling"),
        ("save_negdata_threshold", "save_negdata"),
    ):
        if changed(options, name) and not getattr(options, needed):
            warnings.append(f"--{name} has no effect without --{needed}")
    return warnings


def _examine_tail(options: TailOptions) -> Iterable[str]:
    """What options of several groups say together."""
    method, group = options.method, options.n_samples_per_prompt
    if options.enable_ema:
        raise UserError("--enable_ema: the average would be saved and the last weights measured; leave it out")
    if options.placeholder_token is not None and options.step_reward == "steps":
        raise UserError("--step_reward steps: a tail method judges whole answers; use min or last")
    if method == "ppo":
        return []
    if group < 2:
        raise UserError(
            f"--n_samples_per_prompt {group}: --method {method} weighs answers to one prompt against each "
            "other; set it above 1"
        )
    for name in _OF_OTHER_METHODS:
        if changed(options, name):
            raise UserError(f"--{name} has no place in --method {method}: leave it out")
    answers = options.rollout_batch_size * group
    if options.train_batch_size != answers:
        raise UserError(
            f"--train_batch_size {options.train_batch_size}: --method {method} makes one step of each rollout, which "
            f"is --rollout_batch_size x --n_samples_per_prompt = {answers}"
        )
    if options.micro_train_batch_size % group and not options.packing_samples:
        raise UserError(
            f"--micro_train_batch_size {options.micro_train_batch_size} splits the {group} answers to a prompt: use a "
            f"multiple of {group}, or --packing_samples"
        )
    for name in ("proposal_updates", "proposal_lora_rank"):
        if method != "repulse" and changed(options, name):
            raise UserError(f"--{name}: --method {method} has no proposal; leave it out")
    return []


EXAMINERS = (
    (TailMethodOptions, _examine_method),
    (ProposalOptions, _examine_proposal),
    (TailMeasureOptions, _examine_measures),
    (TailOptions, _examine_tail),
)
