"""`compute_advantages`: GAE, REINFORCE++, RLOO, GRPO and their relatives, composed from the parts in algos/.

R of each answer: reward minus overlong penalty; optionally standardized by the run's running moments; then compared
    with its group (group_rewards) and clipped.
r of each token: -beta KL, plus R on the last token (token_rewards); plus, on the last token of each step, the step's
    reward compared with the group's steps; or instead of R, on the last token of each turn, the reward whose sum over
    later turns is the turn's return (turn_end_rewards); a teacher adds log teacher - log policy.
A of each token: GAE with a critic, otherwise the discounted sum of r (advantages); whitened if the estimator says so.

An episode of several branches is one answer here, with its tokens in the order of sampling. An answer or episode
without a sampled token is excluded from groups, means and deviations, and counted (empty_samples).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from trimtab.algos.advantages import (
    discounted_sums,
    gae,
    moments_std,
    overlong_penalty,
    token_rewards,
    whiten,
    whiten_with_moments,
)
from trimtab.algos.group_rewards import (
    SHAPED_BY,
    STEPS_SHAPED_BY,
    answer_sums,
    compared,
    equal_groups,
    for_answers,
    for_groups,
    rewards_before_turn,
    turn_deviations,
    turn_end_rewards,
)
from trimtab.algos.policy_losses import explained_variance, kl_estimate
from trimtab.config.rl_jobs import RLOptions
from trimtab.train.rl.experience import Experience, TimeOrder, TurnLayout


def penalties(experience: Experience, options: RLOptions) -> Tensor:
    """The overlong penalty of each answer. The length of an episode is that of its last sequence, with the prompt."""
    if options.overlong_buffer_len is None:
        return torch.zeros(len(experience.firsts_E))
    lengths_E, longest = experience.lengths_S, options.generate_max_len
    if experience.episodes is not None:
        assert options.episode_max_len is not None, "checked"
        lengths_E, longest = experience.sequence_lengths_S[experience.lasts_E], options.episode_max_len
    return overlong_penalty(lengths_E, longest, options.overlong_buffer_len, options.overlong_penalty_factor)


def compute_advantages(
    experience: Experience, options: RLOptions, kl_coefficient: float, moments: Sequence[float] | None = None
) -> dict[str, float]:
    """Set the experience's advantages (and returns), and return figures of rewards, KL and lengths. `moments`: running
    moments of all rewards of the run including these; None: rewards are not standardized by them."""
    estimator, time, drawn_E = options.estimator, TimeOrder(experience), experience.drawn_E
    penalty_E = penalties(experience, options)
    rewards_E, groups_E = experience.rewards_S[experience.firsts_E] - penalty_E, experience.groups_E
    if moments is not None:
        rewards_E = whiten_with_moments(rewards_E, moments)
    turns = TurnLayout.of(experience) if options.turn_reward == "returns" and experience.episodes is not None else None
    if turns is not None and moments is not None:
        turns.rewards_K = whiten_with_moments(turns.rewards_K, moments, centred=False)
    shaped_E, unit_E = against_groups(rewards_E, groups_E, drawn_E, turns, estimator.group)
    kl_N = None
    if experience.reference_N is not None and experience.old_N is not None:
        kl_N = kl_estimate(experience.old_N, experience.reference_N, options.kl_estimator)
    rewards_N = token_rewards(
        shaped_E if turns is None else torch.zeros_like(shaped_E),
        None if options.use_kl_loss or kl_N is None else time.sorted(kl_N),
        kl_coefficient,
        time.remaining_N,
        time.owners_N,
        options.reward_clip_range,
    )
    if turns is not None:
        own_K = turn_end_rewards(shaped_E, unit_E, turns.rewards_K, turns.episodes_K, options.reward_clip_range)
        rewards_N = rewards_N.index_add(0, time.places_N[turns.tokens_K], own_K)
    if experience.step_scores is not None and any(experience.step_scores):
        scores_K, tokens_K = experience.steps()
        answers_K = experience.episodes_S[experience.owners_N[tokens_K]]
        own_groups = groups_E[drawn_E].unique(return_inverse=True)[1]
        shaped_K = STEPS_SHAPED_BY[estimator.group](scores_K, drawn_E.cumsum(0)[answers_K] - 1, own_groups)
        rewards_N = rewards_N.index_add(0, time.places_N[tokens_K], shaped_K)
    if experience.teacher_N is not None:
        rewards_N = rewards_N + options.teacher_coef * time.sorted(experience.teacher_N - experience.old_N)
    gamma = options.gamma if estimator.discounted else 1.0
    if estimator.critic:
        values_N = time.sorted(experience.values_N)
        after_N = None if experience.after_N is None else time.sorted(experience.after_N)
        advantages_N, returns_N = gae(rewards_N, values_N, time.remaining_N, gamma, options.lambd, after_N)
        experience.returns_N = time.back(returns_N)
    else:
        advantages_N = discounted_sums(rewards_N, time.remaining_N, gamma)
    advantages_N = time.back(advantages_N)
    learnt_S = carrying_loss(experience, options)
    if learnt_S is None:
        experience.advantages_N = whitened(advantages_N, options)
    else:
        learnt_N = learnt_S[experience.owners_N]
        experience.advantages_N = torch.zeros_like(advantages_N)
        experience.advantages_N[learnt_N] = whitened(advantages_N[learnt_N], options)
    figures = reward_metrics(experience, rewards_E, answer_sums(rewards_N, time.owners_N, len(rewards_E)), kl_N)
    figures["advantage_size"] = experience.advantages_N.abs().mean()
    if experience.step_scores is not None or turns is not None:
        equal_G = equal_rewards(experience, rewards_E)
        if experience.step_scores is not None:
            equal_G &= equal_steps(experience, options)
        if turns is not None:
            before_K = rewards_before_turn(turns.rewards_K, turns.episodes_K)
            taught_K = (before_K != 0) & (unit_E[turns.episodes_K] != 0)
            equal_G[groups_E[turns.episodes_K[taught_K]]] = False
        figures["equal_groups"] = share_of_several(equal_G, experience)
    if experience.episodes is not None or not bool(drawn_E.all()):
        figures["empty_samples"] = (~drawn_E).sum()
    if moments is not None:
        figures |= {"reward_mean_so_far": moments[1], "reward_std_so_far": moments_std(moments)}
    if options.overlong_buffer_len is not None:
        figures["overlong_penalty"] = penalty_E.mean()
    if learnt_S is not None:
        figures["masked"] = 1 - learnt_S[experience.firsts_E].float().mean()
    if experience.teacher_N is not None:
        figures["teacher_kl"] = (experience.old_N - experience.teacher_N).mean()
    if estimator.critic:
        figures["explained_variance"] = explained_variance(experience.values_N, experience.returns_N)
    return {name: float(value) for name, value in figures.items()}


def against_groups(
    rewards_E: Tensor, groups_E: Tensor, drawn_E: Tensor, turns: TurnLayout | None, by: str
) -> tuple[Tensor, Tensor]:
    """Rewards relative to their group, and the scale by which they were multiplied: 0 for an answer without others in
    its group if the estimator needs them."""
    unit_E = torch.ones_like(rewards_E)
    if by != "unchanged":
        unit_E = for_answers(compared, groups_E, rewards_E, counted_S=drawn_E)
    if turns is None or by != "standardised":
        return for_answers(SHAPED_BY[by], groups_E, rewards_E, counted_S=drawn_E), unit_E
    deviations_E = turn_deviations(rewards_E, turns.rewards_K, turns.episodes_K, groups_E, drawn_E)
    unit_E = unit_E / (deviations_E + 1e-9)
    return for_answers(SHAPED_BY["minus_mean"], groups_E, rewards_E, counted_S=drawn_E) * unit_E, unit_E


def equal_rewards(experience: Experience, rewards_E: Tensor) -> Tensor:
    """Which groups have equal rewards, over the answers with sampled tokens."""
    return for_groups(equal_groups, experience.groups_E, rewards_E, counted_S=experience.drawn_E, empty=True)


def whitened(advantages_N: Tensor, options: RLOptions) -> Tensor:
    """Whiten the advantages if the estimator does so."""
    if not options.estimator.whitened or not len(advantages_N):
        return advantages_N
    return whiten(advantages_N, scale=not options.no_advantage_std_norm)


def carrying_loss(experience: Experience, options: RLOptions) -> Tensor | None:
    """--mask_truncated: which samples carry loss; None: all.

    Truncated samples count in group baselines and in all figures of rewards and lengths, but they are in no update, and
    the means of losses and advantages leave them out.
    """
    if not options.mask_truncated:
        return None
    return ~experience.cut_off_S


def reward_metrics(
    experience: Experience, rewards_E: Tensor, returns_E: Tensor, kl_N: Tensor | None
) -> dict[str, Tensor]:
    """Figures of rewards, returns, lengths and KL; `rewards_E`: the rewards that are compared within groups."""
    firsts_E = experience.firsts_E
    answer_rewards_E = experience.answer_rewards_S[firsts_E]
    figures = {
        "reward": answer_rewards_E.mean(),
        "reward_std": answer_rewards_E.std(correction=0),
        "reward_min": answer_rewards_E.min(),
        "reward_max": answer_rewards_E.max(),
        "score": experience.scores_S[firsts_E].mean(),
        "return": returns_E.mean(),
        "equal_groups": share_of_several(equal_rewards(experience, rewards_E), experience),
        "length": experience.lengths_E.float().mean(),
        "length_max": experience.lengths_E.max(),
        "truncated": experience.cut_off_S[firsts_E].float().mean(),
    }
    if kl_N is not None:
        figures |= {"kl": kl_N.mean(), "kl_answer": kl_N.sum() / len(firsts_E)}
    return figures | {f"reward/{name}": values[firsts_E].nanmean() for name, values in experience.logs.items()}


def share_of_several(chosen_G: Tensor, experience: Experience) -> Tensor:
    """The share of `chosen_G` among groups with several answers; 0 without such groups."""
    several_G = experience.answers_G > 1
    return (chosen_G & several_G).sum() / several_G.sum().clamp(min=1)


def equal_steps(experience: Experience, options: RLOptions) -> Tensor:
    """Which groups have step rewards that do not distinguish their answers: all steps have the same score and, if step
    rewards are summed without comparison, all answers have the same number of steps."""
    scores = experience.step_scores
    assert scores is not None
    found = []
    for number in range(experience.groups):
        group: dict[int, list[float]] = {}  # step scores by answer
        for i in experience.samples_of([number]):
            if experience.drawn_E[experience.episodes_S[i]]:
                group.setdefault(int(experience.episodes_S[i]), []).extend(scores[i])
        alike = len({score for steps in group.values() for score in steps}) <= 1
        found.append(alike and (options.estimator.grouped or len({len(steps) for steps in group.values()}) <= 1))
    return torch.tensor(found)


def trained(experience: Experience, samples: list[int], options: RLOptions) -> list[int]:
    """The samples of an update that are trained: they carry loss and have sampled tokens."""
    trained_S, learnt_S = experience.lengths_S > 0, carrying_loss(experience, options)
    if learnt_S is not None:
        trained_S &= learnt_S
    found = trained_S.tolist()
    return [i for i in samples if found[i]]
