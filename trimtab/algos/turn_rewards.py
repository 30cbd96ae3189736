"""Rewards of the turns of an episode: a token answers for what comes from its turn on (--turn_reward returns).

    r_k              the reward of turn k, at its last token; what is rewarded as a whole, at the episode's last one
    G_t              sum of the rewards that come at token t or later;  R the sum of all, G of the first token
    A_t              G_t - b,   b what the estimator takes from R (group_rewards): nothing, the mean R of the group, or
                     that of its other episodes                                      = (R - b) - what came before t
    standardised     (G_t - mean) / (D + 1e-9),   D^2 the sum over the n episodes of the mean over their turns of
                     (G - mean)^2, divided by n - 1; with rewards at the end alone the deviation of R

b knows nothing of what the episode did from t on but through R itself, so the mean gradient of leave_one_out is that of
E[R], and that of minus_mean (n - 1) / n of it, as for whole episodes. To compare a k-th turn with the k-th turns of the
group would be biased: how many there are depends on where the policy stops, so that turns count by their number
(verl#7244). Where all totals of a group are alike, rewarded turns leave something in its tokens all the same, which is
nothing in the mean: b is not what is still to come.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from trimtab.algos.answers import sums
from trimtab.algos.groups import for_answers


def before(rewards_K: Tensor, episodes_K: Tensor) -> Tensor:
    """What each turn's episode was given before it. `episodes_K`: which one a turn belongs to, in order."""
    upto_K = rewards_K.double().cumsum(0) - rewards_K
    firsts_K = torch.searchsorted(episodes_K, episodes_K)
    return (upto_K - upto_K[firsts_K]).to(rewards_K.dtype)


def deviations(
    totals_E: Tensor, rewards_K: Tensor, episodes_K: Tensor, groups_E: Tensor, counted_E: Tensor | None = None
) -> Tensor:
    """D of each episode's group, for `standardised`; `counted_E`: of which episodes (groups.for_answers)."""

    def mean(totals_GA: Tensor) -> Tensor:
        return totals_GA.mean(1, keepdim=True).expand_as(totals_GA)

    means_E = for_answers(mean, groups_E, totals_E, counted_S=counted_E)
    to_come_K = totals_E[episodes_K] - before(rewards_K, episodes_K)
    squares_K = (to_come_K - means_E[episodes_K]).square()
    turns_E = torch.bincount(episodes_K, minlength=len(totals_E))
    own_E = sums(squares_K, episodes_K, len(totals_E)) / turns_E.clamp(min=1)
    squares_E = torch.where(turns_E > 0, own_E, (totals_E - means_E).square())

    def deviation(squares_GA: Tensor) -> Tensor:
        return (squares_GA.sum(1, keepdim=True) / max(squares_GA.shape[1] - 1, 1)).sqrt().expand_as(squares_GA)

    return for_answers(deviation, groups_E, squares_E, counted_S=counted_E)


def at_ends(
    shaped_E: Tensor,
    unit_E: Tensor,
    rewards_K: Tensor,
    episodes_K: Tensor,
    clip: tuple[float, float] | None = None,
) -> Tensor:
    """What stands on the last token of each turn, so that sums from a token on are its turn's G - b. `shaped_E`: R - b
    of each episode; `unit_E`: what a reward of 1 is in that; `clip`: lowest and highest G - b."""
    to_come_K = shaped_E[episodes_K] - unit_E[episodes_K] * before(rewards_K, episodes_K)
    if clip is not None:
        to_come_K = to_come_K.clamp(*clip)
    goes_on_K = F.pad(episodes_K[1:] == episodes_K[:-1], (0, 1))
    return torch.where(goes_on_K, to_come_K - F.pad(to_come_K[1:], (0, 1)), to_come_K)
