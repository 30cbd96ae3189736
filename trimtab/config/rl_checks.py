"""What checks.py says of the options in rl.py."""

import os
from collections.abc import Iterable
from typing import Any

from trimtab.config.bounds import (
    a_place_that_exists,
    above_zero,
    at_least,
    between_zero_and_one,
    changed,
    every_so_often,
    one_of,
    place_exists,
)
from trimtab.config.jobs import RLOptions
from trimtab.config.placement import ROLES
from trimtab.config.rl import (
    ActorOptions,
    AdvantageOptions,
    CriticOptions,
    EngineOptions,
    KLOptions,
    PlacementOptions,
    PolicyLossOptions,
    PretrainMixOptions,
    PromptOptions,
    RewardOptions,
    RewardSourceOptions,
    RolloutOptions,
    SamplingEvaluationOptions,
    VLLMOptions,
)
from trimtab.config.source_checks import check_mixture, check_sources, listed
from trimtab.errors import UserError

ESTIMATORS = ("gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo")
OF_GROUPS = ("reinforce_baseline", "rloo", "group_norm", "dr_grpo")
"""Estimators that compare the answers to one prompt with each other."""
WHITENED = ("gae", "reinforce", "reinforce_baseline")
OF_THE_CRITIC = ("critic_pretrain", "critic_learning_rate", "value_clip", "save_value_network", "lambd")
DYNAMIC_BUDGET = 16_192

# What has nothing to do without vLLM. Its other options describe what the built-in engine always does.
_OF_OTHER_ENGINES = (
    "vllm_num_engines",
    "vllm_gpu_memory_utilization",
    "vllm_sync_backend",
    "vllm_sync_with_ray",
    "enforce_eager",
)


def longest_rollout(options: RLOptions) -> int:
    return options.prompt_max_len + options.generate_max_len


def settle_rl(options: RLOptions) -> dict[str, Any]:
    """What the options leave open, and where two of them are one choice."""
    changes: dict[str, Any] = {}
    if options.use_dynamic_batch:
        budget = options.train_max_tokens_per_gpu or max(DYNAMIC_BUDGET, longest_rollout(options))
        changes["packing_samples"] = True
        changes["train_max_tokens_per_gpu"] = budget
        changes["rollout_max_tokens_per_gpu"] = options.rollout_max_tokens_per_gpu or budget
    if options.enable_vllm_is_correction and options.mismatch_correction is None:
        changes["mismatch_correction"] = "tis"
        changes["mismatch_range"] = (0.0, options.vllm_is_truncated_threshold)
    # Engines that share the policy's GPUs are as many as these are.
    engines = (options.vllm_num_engines or 0) * options.vllm_tensor_parallel_size
    gpus = options.actor_num_gpus_per_node or (engines if options.colocate_all_models else 0)
    if gpus > 1 and options.nproc == 1:
        changes["nproc"] = gpus
    return changes


def _examine_prompts(options: PromptOptions) -> Iterable[str]:
    at_least(options, 1, "prompt_max_len")
    return check_mixture(options.prompt_data, options.prompt_data_probs, "--prompt_data")


def _examine_rollouts(options: RolloutOptions) -> Iterable[str]:
    at_least(options, 1, "num_episodes", "rollout_batch_size", "n_samples_per_prompt", "generate_max_len")
    at_least(options, 1, "micro_rollout_batch_size")
    above_zero(options, "temperature")
    low, high = options.dynamic_filtering_reward_range
    if low >= high:
        raise UserError(f"--dynamic_filtering_reward_range {low:g} {high:g}: the first must be below the second")
    if options.dynamic_filtering and options.n_samples_per_prompt < 2:
        raise UserError("--dynamic_filtering judges groups of answers: set --n_samples_per_prompt above 1")
    at_once = options.vllm_generate_batch_size
    if at_once is not None:
        at_least(options, 1, "vllm_generate_batch_size")
        if at_once > options.rollout_batch_size and not options.dynamic_filtering:
            raise UserError(
                f"--vllm_generate_batch_size {at_once} is more than --rollout_batch_size {options.rollout_batch_size}: "
                "without --dynamic_filtering an iteration needs no more prompts than that"
            )
    return []


def _examine_engine(options: EngineOptions) -> Iterable[str]:
    at_least(options, 1, "rollout_slots")
    if options.rollout_kv_tokens is not None:
        at_least(options, 1, "rollout_kv_tokens")
    return []


def _examine_reward_sources(options: RewardSourceOptions) -> Iterable[str]:
    models, places = listed(options.reward_pretrain), listed(options.remote_rm_url)
    for model in models:
        place_exists(model, "--reward_pretrain")
    files = [place for place in places if _is_file_of_a_reward(place)]
    count = len(models) + len(files) + (len(files) < len(places))  # all servers are one reward
    weights = options.reward_weights
    if weights is not None and len(weights) != count:
        raise UserError(
            f"--reward_weights has {len(weights)} numbers for {count} rewards: give one for each model, each file and, "
            "together, the servers"
        )
    return []


def _examine_rewards(options: RewardOptions) -> Iterable[str]:
    low, high = options.reward_clip_range
    if low >= high:
        raise UserError(f"--reward_clip_range {low:g} {high:g}: the first must be below the second")
    if options.overlong_buffer_len is not None:
        above_zero(options, "overlong_buffer_len")
    at_least(options, 0, "overlong_penalty_factor")
    if options.normalize_reward and not options.reward_pretrain:
        return ["--normalize_reward has no effect without --reward_pretrain"]
    return []


def _is_file_of_a_reward(place: str) -> bool:
    if place.startswith(("http://", "https://")):
        return False
    file = place[: place.rfind(".py") + 3]  # a function's name may follow
    if not file.endswith(".py"):
        raise UserError(f"--remote_rm_url {place} is neither an address (http://...) nor a Python file")
    if not os.path.isfile(os.path.expanduser(file)):
        raise UserError(f"--remote_rm_url: {file} does not exist; check the path")
    return True


def _examine_advantages(options: AdvantageOptions) -> Iterable[str]:
    estimator = options.advantage_estimator
    one_of(options, "advantage_estimator", *ESTIMATORS)
    between_zero_and_one(options, "gamma", "lambd")
    warnings = []
    if estimator in OF_GROUPS and options.gamma != 1:
        warnings.append(f"--gamma has no effect: --advantage_estimator {estimator} does not discount")
    if options.no_advantage_std_norm and estimator not in WHITENED:
        warnings.append(f"--no_advantage_std_norm has no effect: {estimator} does not whiten its advantages")
    return warnings


def _examine_kl(options: KLOptions) -> Iterable[str]:
    at_least(options, 0, "init_kl_coef")
    at_least(options, 1, "kl_horizon")
    one_of(options, "kl_estimator", "k1", "k2", "k3")
    if options.kl_target is not None:
        above_zero(options, "kl_target")
        if not options.init_kl_coef:
            raise UserError("--kl_target steers the weight of the KL, and --init_kl_coef 0 means that there is none")
    if not options.init_kl_coef:
        return []
    if options.use_kl_loss and options.kl_estimator == "k1":
        return ["--use_kl_loss with --kl_estimator k1 pulls nowhere on average: use k2 or k3"]
    if not options.use_kl_loss and options.kl_estimator != "k1":
        return [f"--kl_estimator {options.kl_estimator} is meant for --use_kl_loss: in the reward use k1"]
    return []


def _examine_policy_loss(options: PolicyLossOptions) -> Iterable[str]:
    one_of(options, "policy_loss_type", "ppo", "gspo", "cispo")
    if options.loss_reduction is not None:
        one_of(options, "loss_reduction", "token", "answer", "constant")
    if options.mismatch_correction is not None:
        one_of(options, "mismatch_correction", "tis", "icepop", "sequence")
    low, high = options.mismatch_range
    if not 0 <= low < high:
        raise UserError(
            f"--mismatch_range {low:g} {high:g}: give two weights, the first at least 0 and below the second"
        )
    if options.dual_clip is not None and options.policy_loss_type != "ppo":
        raise UserError(f"--dual_clip belongs to --policy_loss_type ppo, not {options.policy_loss_type}: drop it")
    above_zero(options, "eps_clip")
    every_so_often(options, "freezing_actor_steps")
    if options.dual_clip is not None and options.dual_clip <= 1:
        raise UserError(f"--dual_clip is {options.dual_clip:g}: it must be above 1")
    if options.entropy_loss_coef is not None:
        at_least(options, 0, "entropy_loss_coef")
    if options.eps_clip_low_high is None:
        return []
    low, high = options.eps_clip_low_high
    if not 0 < low <= 1 or high <= 0:
        raise UserError(
            f"--eps_clip_low_high {low:g} {high:g}: both must be above 0, and the first, of the lower bound, at most 1"
        )
    return ["--eps_clip has no effect beside --eps_clip_low_high"] if changed(options, "eps_clip") else []


def _examine_critic(options: CriticOptions) -> Iterable[str]:
    a_place_that_exists(options, "critic_pretrain")
    at_least(options, 0, "critic_learning_rate")
    above_zero(options, "value_clip")
    return []


def _examine_actor(options: ActorOptions) -> Iterable[str]:
    at_least(options, 0, "actor_learning_rate")
    between_zero_and_one(options, "ema_beta")
    return []


def _examine_pretrain_mix(options: PretrainMixOptions) -> Iterable[str]:
    at_least(options, 0, "ptx_coef")
    return check_sources(options.pretrain_data, "--pretrain_data")


def _examine_evaluation(options: SamplingEvaluationOptions) -> Iterable[str]:
    at_least(options, 0, "eval_temperature", "save_rollouts")
    at_least(options, 1, "eval_n_samples_per_prompt")
    return []


def _examine_placement(options: PlacementOptions) -> Iterable[str]:
    at_least(options, 1, *(f"{role}_num_nodes" for role in ROLES))
    given = (f"{role}_num_gpus_per_node" for role in ROLES)
    at_least(options, 1, *(name for name in given if getattr(options, name) is not None))
    if options.deepspeed_enable_sleep:
        return ["--deepspeed_enable_sleep has no effect: to keep the optimiser off the device use --adam_offload"]
    return []


def _examine_vllm(options: VLLMOptions) -> Iterable[str]:
    at_least(options, 1, "vllm_tensor_parallel_size")
    if options.vllm_num_engines is not None:
        at_least(options, 0, "vllm_num_engines")
    aside = [f"--{name}" for name in _OF_OTHER_ENGINES if changed(options, name) and getattr(options, name) != 0]
    if not aside:
        return []
    return [f"the built-in engine writes the answers, with the policy's own weights: {', '.join(aside)} set aside"]


def _examine_rl(options: RLOptions) -> Iterable[str]:
    """What options of several groups say together."""
    estimator, group = options.advantage_estimator, options.n_samples_per_prompt
    if estimator in OF_GROUPS and group < 2:
        raise UserError(
            f"--advantage_estimator {estimator} compares the answers to one prompt: set --n_samples_per_prompt above 1"
        )
    _check_rewarded(options)
    if options.record and options.replay:
        raise UserError("--record and --replay: a replayed run has nothing new to record; give one of them")
    if options.max_len is not None and options.max_len < longest_rollout(options):
        raise UserError(
            f"--max_len {options.max_len} is less than --prompt_max_len + --generate_max_len "
            f"({longest_rollout(options)}): lower these instead"
        )
    if options.overlong_buffer_len is not None and options.overlong_buffer_len > options.generate_max_len:
        raise UserError(
            f"--overlong_buffer_len {options.overlong_buffer_len:g} is more than --generate_max_len "
            f"{options.generate_max_len}"
        )
    _check_budgets(options)
    return [*_about_the_critic(options), *_about_steps(options)]


def _check_rewarded(options: RLOptions) -> None:
    sources = ("reward_pretrain", "remote_rm_url", "reward_verifier", "agent_func_path")
    if any(getattr(options, name) for name in sources):
        return
    name_one = "set --reward_pretrain, --remote_rm_url or --reward_verifier"
    if not options.teacher_model and not options.replay:
        raise UserError(f"nothing gives rewards: {name_one}")
    if options.eval_dataset:
        raise UserError(f"--eval_dataset needs a reward to measure with: {name_one}, or leave it out")
    if options.dynamic_filtering and not options.replay:
        raise UserError(f"--dynamic_filtering needs a reward to judge groups by: {name_one}, or leave it out")


def _about_the_critic(options: RLOptions) -> list[str]:
    estimator = options.advantage_estimator
    if estimator == "gae":
        return []
    if options.freezing_actor_steps > 0:
        raise UserError(f"--freezing_actor_steps trains the critic alone, and {estimator} has none: drop it")
    names = [f"--{name}" for name in OF_THE_CRITIC if changed(options, name)]
    return [f"{', '.join(names)} without effect: --advantage_estimator {estimator} has no critic"] if names else []


def _check_budgets(options: RLOptions) -> None:
    for name in ("train_max_tokens_per_gpu", "rollout_max_tokens_per_gpu"):
        budget = getattr(options, name)
        if budget is None:
            continue
        if not options.use_dynamic_batch:
            raise UserError(f"--{name} is the token budget of a pass: add --use_dynamic_batch")
        if budget < longest_rollout(options):
            raise UserError(
                f"--{name} {budget} cannot hold one sample of --prompt_max_len + --generate_max_len "
                f"{longest_rollout(options)}: raise it"
            )


def _about_steps(options: RLOptions) -> list[str]:
    """An iteration's samples are cut into optimiser steps of whole groups."""
    group, wanted = options.n_samples_per_prompt, options.train_batch_size
    samples = options.rollout_batch_size * group
    if samples <= wanted:
        few = f"an iteration has {samples} samples, fewer than --train_batch_size {wanted}: they make one step"
        return [few] if samples < wanted else []
    step = max(1, wanted // group) * group
    if step != wanted:
        return [f"a step has {step} samples, not --train_batch_size {wanted}: groups of {group} stay whole"]
    if samples % step:
        return [f"the last step of an iteration has {samples % step} samples, not --train_batch_size {wanted}"]
    return []


EXAMINERS = (
    (PromptOptions, _examine_prompts),
    (RolloutOptions, _examine_rollouts),
    (EngineOptions, _examine_engine),
    (RewardSourceOptions, _examine_reward_sources),
    (RewardOptions, _examine_rewards),
    (AdvantageOptions, _examine_advantages),
    (KLOptions, _examine_kl),
    (PolicyLossOptions, _examine_policy_loss),
    (CriticOptions, _examine_critic),
    (ActorOptions, _examine_actor),
    (PretrainMixOptions, _examine_pretrain_mix),
    (SamplingEvaluationOptions, _examine_evaluation),
    (PlacementOptions, _examine_placement),
    (VLLMOptions, _examine_vllm),
    (RLOptions, _examine_rl),
)
