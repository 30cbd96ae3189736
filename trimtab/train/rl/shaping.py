"""From rewards to advantages: the estimators, put together from their parts in algos/.

R of each answer, less what it is too long; standardised by all rewards of the run (running); seen against its group
(group_rewards); clipped
r of each token: -beta KL, and R on the last one (token_rewards); on the last token of each step the step's reward,
seen against the group's steps (step_rewards); a teacher adds log teacher - log policy
A of each token: GAE with a critic, the discounted sum of r without (advantages); whitened, where that belongs
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from trimtab.algos import kl, running
from trimtab.algos.advantages import discounted_sums, gae, whiten
from trimtab.algos.answers import sums
from trimtab.algos.group_rewards import SHAPED_BY, equal_groups
from trimtab.algos.groups import for_answers, for_groups
from trimtab.algos.step_rewards import STEPS_SHAPED_BY
from trimtab.algos.token_rewards import overlong_penalty, per_token
from trimtab.algos.value_loss import explained_variance
from trimtab.config.jobs import RLOptions
from trimtab.train.rl.experience import FINISHES, Experience
from trimtab.train.rl.trajectories import totals


def penalties(experience: Experience, options: RLOptions) -> Tensor:
    """What is taken from each answer's reward because it is too long."""
    if options.overlong_buffer_len is None:
        return torch.zeros_like(experience.rewards_S)
    return overlong_penalty(
        experience.lengths_S, options.generate_max_len, options.overlong_buffer_len, options.overlong_penalty_factor
    )


def shape(
    experience: Experience, options: RLOptions, kl_coefficient: float, moments: Sequence[float] | None = None
) -> dict[str, float]:
    """Give the experience its advantages (and returns); the figures of rewards, KL and lengths. `moments`: of all
    rewards of the run, these among them, where they are standardised by them."""
    estimator = options.estimator
    penalty_S = penalties(experience, options)
    rewards_S, groups_S = experience.rewards_S - penalty_S, experience.groups_S
    if moments is not None:
        rewards_S = running.standardised(rewards_S, moments)
    shaped_S = for_answers(SHAPED_BY[estimator.group], groups_S, rewards_S)
    kl_N = None
    if experience.reference_N is not None and experience.old_N is not None:
        kl_N = kl.estimate(experience.old_N, experience.reference_N, options.kl_estimator)
    rewards_N = per_token(
        shaped_S,
        None if options.use_kl_loss else kl_N,
        kl_coefficient,
        experience.remaining_N,
        experience.owners_N,
        options.reward_clip_range,
    )
    if experience.step_scores is not None and any(experience.step_scores):
        scores_K, tokens_K = experience.steps()
        shaped_K = STEPS_SHAPED_BY[estimator.group](scores_K, experience.owners_N[tokens_K], groups_S)
        rewards_N = rewards_N.index_add(0, tokens_K, shaped_K)
    if experience.teacher_N is not None:
        rewards_N = rewards_N + options.teacher_coef * (experience.teacher_N - experience.old_N)
    gamma = options.gamma if estimator.discounted else 1.0
    if estimator.critic:
        advantages_N, experience.returns_N = gae(
            rewards_N, experience.values_N, experience.remaining_N, gamma, options.lambd
        )
    else:
        advantages_N = discounted_sums(rewards_N, experience.remaining_N, gamma)
    if estimator.whitened:
        advantages_N = whiten(advantages_N, scale=not options.no_advantage_std_norm)
    experience.advantages_N = advantages_N
    figures = described(experience, rewards_S, sums(rewards_N, experience.owners_N, len(experience)), kl_N)
    figures["advantage_size"] = advantages_N.abs().mean()
    if experience.step_scores is not None:
        equal_G = for_groups(equal_groups, groups_S, rewards_S) & equal_steps(experience, options)
        figures["equal_groups"] = share_of_several(equal_G, experience)
    if moments is not None:
        figures |= {"reward_mean_so_far": moments[1], "reward_std_so_far": running.deviation(moments)}
    if options.overlong_buffer_len is not None:
        figures["overlong_penalty"] = penalty_S.mean()
    if experience.teacher_N is not None:
        figures["teacher_kl"] = (experience.old_N - experience.teacher_N).mean()
    if estimator.critic:
        figures["explained_variance"] = explained_variance(experience.values_N, experience.returns_N)
    return {name: float(value) for name, value in figures.items()}


def described(experience: Experience, rewards_S: Tensor, returns_S: Tensor, kl_N: Tensor | None) -> dict[str, Tensor]:
    """What there is to say of answers whatever is learnt from them; `rewards_S` are those that groups are seen by."""
    figures = {
        "reward": experience.answer_rewards_S.mean(),
        "reward_std": experience.answer_rewards_S.std(correction=0),
        "reward_min": experience.answer_rewards_S.min(),
        "reward_max": experience.answer_rewards_S.max(),
        "score": experience.scores_S.mean(),
        "return": returns_S.mean(),
        "equal_groups": share_of_several(for_groups(equal_groups, experience.groups_S, rewards_S), experience),
        "length": experience.lengths_S.float().mean(),
        "length_max": experience.lengths_S.max(),
        "truncated": (experience.finishes_S == FINISHES.index("length")).float().mean(),
    }
    if kl_N is not None:
        figures |= {"kl": kl_N.mean(), "kl_answer": kl_N.sum() / len(experience)}
    return figures | {f"reward/{name}": values.nanmean() for name, values in experience.logs.items()}


def share_of_several(chosen_G: Tensor, experience: Experience) -> Tensor:
    """Of the groups that have several answers; 0 without any."""
    several_G = experience.sizes_G > 1
    return (chosen_G & several_G).sum() / several_G.sum().clamp(min=1)


def equal_steps(experience: Experience, options: RLOptions) -> Tensor:
    """Which groups' steps say nothing of which answer is better: all are scored alike and, where rewards are added up
    as they are, there are as many in each answer."""
    scores = experience.step_scores
    assert scores is not None
    found = []
    for group in ([scores[i] for i in experience.samples_of([number])] for number in range(experience.groups)):
        alike = len({score for steps in group for score in steps}) <= 1
        found.append(alike and (options.estimator.grouped or len({len(steps) for steps in group}) == 1))
    return torch.tensor(found)


def with_advantage(experience: Experience, samples: list[int]) -> list[int]:
    """The samples that have an advantage at some token; the others have no gradient from the policy loss."""
    assert experience.advantages_N is not None
    found = totals(experience.advantages_N != 0, experience.lengths_S).tolist()
    return [i for i in samples if found[i]]
