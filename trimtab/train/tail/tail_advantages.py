"""Advantages of the tail methods, composed from the parts in algos/.

policy's answers      A = return - baseline (reinforce), of transformed rewards if asked for (reward_transforms);
                      base_proposal adds -kappa n omega (repulse) of the same answers
proposal's answers    for the proposal omega - nu (ctl); for the policy -kappa n omega, with the same omega

All are multiplied by the token scale (group_rewards). Weights and figures use the raw reward.
"""

import dataclasses
from functools import partial

from torch import Tensor

from trimtab.algos.group_rewards import answer_sums, for_answers, for_groups, token_scale
from trimtab.algos.policy_losses import kl_estimate
from trimtab.algos.tail import (
    annealed,
    answer_returns,
    ctl_advantages,
    effective_samples,
    log_ratios,
    minus_exponential,
    minus_indicator,
    push_down_advantages,
    push_down_factor,
    reinforce_advantages,
    tilted_weights,
    twist_step_weights,
)
from trimtab.config.rl_jobs import TailOptions
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.token_advantages import reward_metrics

Figures = dict[str, float]


def compute_policy_advantages(experience: Experience, options: TailOptions, kl_coefficient: float) -> Figures:
    """Set the advantages of the policy's answers."""
    owners_N, groups_S = experience.owners_N, experience.groups_S
    kl_N = None
    if experience.reference_N is not None:
        kl_N = kl_estimate(experience.old_N, experience.reference_N, "k1")
    low, high = options.reward_clip_range
    rewards_S = transformed(experience.rewards_S, options).clamp(low, high)
    returns_S = answer_returns(rewards_S, kl_N, kl_coefficient, owners_N)
    baseline = {"expectation": None, "hardcoded": options.reinforce_hardcoded_baseline, "none": 0.0}
    against = partial(reinforce_advantages, baseline=baseline[options.reinforce_baseline_type])
    advantages_S = for_answers(against, groups_S, returns_S)
    raw_S = answer_returns(experience.rewards_S, kl_N, kl_coefficient, owners_N)
    figures = reward_metrics(experience, rewards_S, raw_S, kl_N)
    if options.method == "base_proposal":
        weights_S = weights_of(experience, options)
        advantages_S = advantages_S + pushed(weights_S, experience, options)
        figures |= weight_figures(weights_S, experience.old_N, experience)
    experience.advantages_N = scaled(advantages_S[owners_N], experience, options)
    return numbers(figures) | badness_figures(experience, options)


def transformed(rewards_S: Tensor, options: TailOptions) -> Tensor:
    if options.method != "reinforce_transform":
        return rewards_S
    if options.reward_transform == "minus_alpha_ind":
        assert options.bad_threshold is not None
        return minus_indicator(rewards_S, options.alpha, options.bad_threshold)
    return minus_exponential(rewards_S, options.alpha, options.target_dist_beta)


def compute_proposal_advantages(experience: Experience, options: TailOptions) -> tuple[Figures, Tensor]:
    """Set the proposal's advantages on its answers; returns figures and the policy's advantages on the same answers,
    which
    are used after the proposal's update."""
    owners_N = experience.owners_N
    assert experience.policy_N is not None and experience.old_N is not None
    ratio_N = experience.policy_N - experience.old_N
    ratios_S = log_ratios(experience.policy_N, experience.old_N, owners_N, len(experience))
    weights_S = weights_of(experience, options, ratios_S)
    steps_N = None
    if options.proposal_loss == "ctl":
        steps_N = twist_step_weights(ratio_N, experience.twist_N, owners_N, experience.groups_S)
    experience.advantages_N = scaled(ctl_advantages(weights_S, steps_N, owners_N), experience, options)
    pushed_S = pushed(weights_S, experience, options)
    figures = {"reward": experience.rewards_S.mean(), "length": experience.lengths_S.float().mean()}
    figures |= weight_figures(weights_S, experience.policy_N, experience)
    return numbers(figures) | badness_figures(experience, options), scaled(pushed_S[owners_N], experience, options)


def weights_of(experience: Experience, options: TailOptions, *ratios_S: Tensor) -> Tensor:
    """The weight omega of every answer."""

    def weigh(rewards_GA: Tensor, ratios_GA: Tensor | None = None) -> Tensor:
        return tilted_weights(rewards_GA, options.target_dist_beta, ratios_GA)

    return for_answers(weigh, experience.groups_S, experience.rewards_S, *ratios_S)


def pushed(weights_S: Tensor, experience: Experience, options: TailOptions) -> Tensor:
    return push_down_advantages(weights_S, push_down_kappa(options), len(experience) / experience.groups)


def annealed_options(options: TailOptions, progress: float) -> TailOptions:
    """The options with alpha and beta annealed to this share of the training."""
    if options.start_alpha is None and options.start_target_dist_beta is None:
        return options
    alpha = annealed(options.start_alpha, options.alpha, progress)
    beta = annealed(options.start_target_dist_beta, options.target_dist_beta, progress)
    return dataclasses.replace(options, alpha=alpha, target_dist_beta=beta)


def push_down_kappa(options: TailOptions) -> float:
    return push_down_factor(options.alpha, options.n_samples_per_prompt, options.push_down_scale)


def scaled(advantages_N: Tensor, experience: Experience, options: TailOptions) -> Tensor:
    return advantages_N * token_scale(experience.owners_N, len(experience), options.token_reduction)


def weight_figures(weights_S: Tensor, policy_N: Tensor | None, experience: Experience) -> dict[str, Tensor]:
    """Effective sample size and largest weight of a group, and the weighted mean log-prob under the policy."""
    groups_S = experience.groups_S
    figures = {
        "effective_samples": for_groups(effective_samples, groups_S, weights_S).mean(),
        "largest_weight": for_groups(lambda weights_GA: weights_GA.amax(1), groups_S, weights_S).mean(),
    }
    if policy_N is not None:
        weighed_S = weights_S * answer_sums(policy_N, experience.owners_N, len(experience))
        figures["target_log_prob"] = for_groups(lambda weighed_GA: weighed_GA.sum(1), groups_S, weighed_S).mean()
    return figures


def badness_figures(experience: Experience, options: TailOptions) -> Figures:
    found = {"worst_reward": float(experience.rewards_S.min())}
    if options.bad_threshold is not None:
        found["bad_share"] = float((experience.rewards_S < options.bad_threshold).float().mean())
    return found


def numbers(figures: dict[str, Tensor]) -> Figures:
    return {name: float(value) for name, value in figures.items()}
