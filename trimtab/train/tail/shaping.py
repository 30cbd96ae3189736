"""From rewards to the advantages of the tail methods, put together from their parts in algos/.

policy's answers      A = return - baseline (reinforce), of transformed rewards if asked for (reward_transforms);
                      base_proposal adds -kappa n omega (repulse) of the same answers
proposal's answers    for the proposal omega - nu (ctl); for the policy -kappa n omega, with the same omega

All times the scale of the answer's tokens (answers). What is weighed and measured is the raw reward.
"""

from torch import Tensor

from trimtab.algos import ctl, kl, reinforce, repulse
from trimtab.algos.answers import sums, token_scale
from trimtab.algos.reward_transforms import minus_exponential, minus_indicator
from trimtab.algos.tail_weights import effective_samples, log_ratios, tilted
from trimtab.config.jobs import TailOptions
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.shaping import described

Figures = dict[str, float]


def shape_own(experience: Experience, options: TailOptions, kl_coefficient: float) -> Figures:
    """Give the policy's answers their advantages."""
    owners_N, group = experience.owners_N, options.n_samples_per_prompt
    kl_N = None
    if experience.reference_N is not None:
        kl_N = kl.estimate(experience.old_N, experience.reference_N, "k1")
    low, high = options.reward_clip_range
    rewards_S = transformed(experience.rewards_S, options).clamp(low, high)
    returns_S = reinforce.returns(rewards_S, kl_N, kl_coefficient, owners_N)
    baseline = {"expectation": None, "hardcoded": options.reinforce_hardcoded_baseline, "none": 0.0}
    chosen = baseline[options.reinforce_baseline_type]
    advantages_S = reinforce.advantages(returns_S.view(-1, group), chosen).flatten()
    raw_S = reinforce.returns(experience.rewards_S, kl_N, kl_coefficient, owners_N)
    figures = described(experience, rewards_S.view(-1, group), raw_S, kl_N)
    if options.method == "base_proposal":
        weights_GA = tilted(experience.rewards_S.view(-1, group), options.target_dist_beta)
        advantages_S = advantages_S + repulse.push_down(weights_GA, pushing(options)).flatten()
        figures |= weighing(weights_GA, experience.old_N, owners_N)
    experience.advantages_N = scaled(advantages_S[owners_N], experience, options)
    return numbers(figures) | badness(experience, options)


def transformed(rewards_S: Tensor, options: TailOptions) -> Tensor:
    if options.method != "reinforce_transform":
        return rewards_S
    if options.reward_transform == "minus_alpha_ind":
        assert options.bad_threshold is not None
        return minus_indicator(rewards_S, options.alpha, options.bad_threshold)
    return minus_exponential(rewards_S, options.alpha, options.target_dist_beta)


def shape_proposed(experience: Experience, options: TailOptions) -> tuple[Figures, Tensor]:
    """Give the proposal's answers its advantages; those for the policy come back, to be used after its update."""
    owners_N, group, answers = experience.owners_N, options.n_samples_per_prompt, len(experience)
    assert experience.policy_N is not None and experience.old_N is not None
    ratio_N = experience.policy_N - experience.old_N
    ratios_GA = log_ratios(experience.policy_N, experience.old_N, owners_N, answers).view(-1, group)
    weights_GA = tilted(experience.rewards_S.view(-1, group), options.target_dist_beta, ratios_GA)
    steps_N = None
    if options.proposal_loss == "ctl":
        steps_N = ctl.step_weights(ratio_N, experience.twist_N, owners_N, answers, group)
    experience.advantages_N = scaled(ctl.advantages(weights_GA, steps_N, owners_N), experience, options)
    pushed_S = repulse.push_down(weights_GA, pushing(options)).flatten()
    figures = {"reward": experience.rewards_S.mean(), "length": experience.lengths_S.float().mean()}
    figures |= weighing(weights_GA, experience.policy_N, owners_N)
    return numbers(figures) | badness(experience, options), scaled(pushed_S[owners_N], experience, options)


def pushing(options: TailOptions) -> float:
    return repulse.kappa(options.alpha, options.n_samples_per_prompt, options.push_down_scale)


def scaled(advantages_N: Tensor, experience: Experience, options: TailOptions) -> Tensor:
    return advantages_N * token_scale(experience.owners_N, len(experience), options.token_reduction)


def weighing(weights_GA: Tensor, policy_N: Tensor | None, owners_N: Tensor) -> dict[str, Tensor]:
    """How evenly a group's weights lie, and the mean log-prob under the target that they stand for."""
    figures = {"effective_samples": effective_samples(weights_GA).mean(), "largest_weight": weights_GA.amax(1).mean()}
    if policy_N is not None:
        log_probs_GA = sums(policy_N, owners_N, weights_GA.numel()).view_as(weights_GA)
        figures["target_log_prob"] = (weights_GA * log_probs_GA).sum(1).mean()
    return figures


def badness(experience: Experience, options: TailOptions) -> Figures:
    found = {"worst_reward": float(experience.rewards_S.min())}
    if options.bad_threshold is not None:
        found["bad_share"] = float((experience.rewards_S < options.bad_threshold).float().mean())
    return found


def numbers(figures: dict[str, Tensor]) -> Figures:
    return {name: float(value) for name, value in figures.items()}
