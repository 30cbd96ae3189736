"""Rewards of the steps within answers, seen against the steps of the group: K steps of all answers -> K shaped rewards.

    r_j              the score of step j, at the step's last token
    A_t              sum over the steps j that end at token t or later of the shaped r_j
    standardised     (r_j - mean) / (std + 1e-9), mean and unbiased std over all steps of the group's answers
                                                       Shao et al. 2024 (DeepSeekMath), process supervision
    leave_one_out    r_j - b,   b the mean over all steps of the group's other answers
    minus_mean       (n - 1) / n (r_j - b): as for whole answers, where R - mean is (n - 1) / n of leave_one_out's
    unchanged        r_j

A step counts by how much better it is than other steps, so an answer gains nothing by having many of them. b does not
depend on the answer itself: where a score depends on the text up to its step alone, the mean gradient of leave_one_out
is that of E[sum_j r_j] - b E[number of steps] with b held fixed at its mean. Where all steps of a group are scored
alike, or no other answer has a step, there is exactly 0.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from trimtab.algos.answers import sums
from trimtab.algos.groups import for_groups, sizes

Shaping = Callable[[Tensor, Tensor, Tensor], Tensor]  # (scores_K, answers_K, groups_S) -> shaped rewards [K]


def unchanged(scores_K: Tensor, answers_K: Tensor, groups_S: Tensor) -> Tensor:
    return scores_K


def standardised(scores_K: Tensor, answers_K: Tensor, groups_S: Tensor) -> Tensor:
    """`answers_K`: which answer a step belongs to, in order; `groups_S`: which group an answer belongs to."""
    groups_K = groups_S[answers_K]
    steps_G = torch.bincount(groups_K)
    deviations_K = _from_first(scores_K, groups_K)
    deviations_K = deviations_K - (sums(deviations_K, groups_K, len(steps_G)) / steps_G)[groups_K]
    variance_G = sums(deviations_K.square(), groups_K, len(steps_G)) / (steps_G - 1).clamp(min=1)
    return deviations_K / (variance_G.sqrt() + 1e-9)[groups_K]


def leave_one_out(scores_K: Tensor, answers_K: Tensor, groups_S: Tensor) -> Tensor:
    groups_K, answers = groups_S[answers_K], len(groups_S)
    deviations_K = _from_first(scores_K, groups_K)
    totals_S, steps_S = sums(deviations_K, answers_K, answers), torch.bincount(answers_K, minlength=answers)
    of_others_S = (_of_group(column_S, groups_S) - column_S for column_S in (totals_S, steps_S))
    totals_K, steps_K = (column_S[answers_K] for column_S in of_others_S)
    return torch.where(steps_K > 0, deviations_K - totals_K / steps_K.clamp(min=1), 0)


def minus_mean(scores_K: Tensor, answers_K: Tensor, groups_S: Tensor) -> Tensor:
    n_G = sizes(groups_S).double()
    scale_K = ((n_G - 1) / n_G)[groups_S[answers_K]]
    return leave_one_out(scores_K, answers_K, groups_S) * scale_K.to(scores_K.dtype)


STEPS_SHAPED_BY: dict[str, Shaping] = {
    "unchanged": unchanged,
    "minus_mean": minus_mean,
    "leave_one_out": leave_one_out,
    "standardised": standardised,
}


def _from_first(scores_K: Tensor, groups_K: Tensor) -> Tensor:
    """Measured from the group's first step: equal scores leave exactly nothing, whatever a mean of them rounds to."""
    return scores_K - scores_K[torch.searchsorted(groups_K, groups_K)]


def _of_group(column_S: Tensor, groups_S: Tensor) -> Tensor:
    """The sum over its group, for each answer."""
    return for_groups(lambda column_GA: column_GA.sum(1), groups_S, column_S)[groups_S]
