"""Group baselines (GRPO, Dr. GRPO, RLOO): rewards relative to a prompt's other answers; of answers, steps and turns.

Whole answers, [groups, n] -> [groups, n]:

    leave_one_out    R - (sum of the others) / (n - 1)  =  n / (n - 1) (R - mean)   RLOO: Ahmadian et al. 2024
    minus_mean       R - mean              REINFORCE++ with a baseline: Hu et al. 2025; Dr. GRPO: Liu et al. 2025
    standardised     (R - mean) / (std + 1e-9), unbiased std                        GRPO: Shao et al. 2024
    unchanged        R

Answers that are all rewarded alike get exactly 0 from the first three, and so does one that is alone in its group.

Steps within answers (--step_reward steps), K steps of all answers -> K shaped rewards:

    r_j              the score of step j, at the step's last token
    A_t              sum over the steps j that end at token t or later of the shaped r_j
    standardised     (r_j - mean) / (std + 1e-9), mean and unbiased std over all steps of the group's answers
                                                       DeepSeekMath, process supervision: Shao et al. 2024
    leave_one_out    r_j - b,   b the mean over all steps of the group's other answers
    minus_mean       (n - 1) / n (r_j - b): as for whole answers, where R - mean is (n - 1) / n of leave_one_out's
    unchanged        r_j

A step counts by how much better it is than other steps, so an answer gains nothing by having many of them. b does not
depend on the answer itself: where a score depends on the text up to its step alone, the mean gradient of leave_one_out
is that of E[sum_j r_j] - b E[number of steps] with b held fixed at its mean. Where all steps of a group are scored
alike, or no other answer has a step, the result is exactly 0.

Turns of an episode (--turn_reward returns), where a token answers for what comes from its turn on:

    r_k              the reward of turn k, at its last token; a reward of the whole episode, at the episode's last token
    G_t              sum of the rewards that come at token t or later;  R the sum of all, G of the first token
    A_t              G_t - b,   b what the estimator takes from R (above): nothing, the mean R of the group, or
                     that of its other episodes                                      = (R - b) - what came before t
    standardised     (G_t - mean) / (D + 1e-9),   D^2 the sum over the n episodes of the mean over their turns of
                     (G - mean)^2, divided by n - 1; with rewards at the end alone the deviation of R

b depends on what the episode did from t on through R alone, so the mean gradient of leave_one_out is that of E[R], and
that of minus_mean (n - 1) / n of it, as for whole episodes. To compare a k-th turn with the k-th turns of the group
would be biased: how many there are depends on where the policy stops, so that turns count by their number (verl#7244).
Where all totals of a group are alike, rewarded turns leave advantages in its tokens all the same, whose mean is 0.
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

# ---- answers and their tokens: `owners_N` says which answer a token is of


def answer_sums(values_N: Tensor, owners_N: Tensor, answers: int) -> Tensor:
    """The sum over the tokens of each answer: [answers]."""
    return values_N.new_zeros(answers).index_add(0, owners_N, values_N)


def token_scale(owners_N: Tensor, answers: int, reduction: str) -> Tensor:
    """What each token's weight is multiplied by: [N].

    token_mean    a weight w of an answer of T tokens gives each of them w / T: the answer's mean log-prob counts w
    token_sum     each of them w: the answer's log-prob counts w

    Only token_sum makes the gradient of an answer that of its log-probability; with token_mean, tokens of short answers
    count more. Where all answers are equally long the two differ by a constant.
    """
    if reduction == "token_sum":
        return torch.ones(len(owners_N), device=owners_N.device)
    assert reduction == "token_mean", reduction
    return 1 / torch.bincount(owners_N, minlength=answers)[owners_N]


# ---- functions of groups of equal size, for groups of any sizes
#
# What sees the answers to one prompt against each other is written for a matrix, [groups, answers of each]. It is
# called once for the groups of each size, out of columns over all S answers. `groups_S` says which group an answer
# belongs to: 0, 1, 2 and so on, in order. `counted_S` says which answers are in their groups; the function sees no
# others. Unset: all are.


def for_answers(
    function: Callable[..., Tensor], groups_S: Tensor, *columns: Tensor, counted_S: Tensor | None = None
) -> Tensor:
    """The values of a function of [groups, answers, ...] for every answer; 0 for answers that are not counted."""
    if counted_S is None or bool(counted_S.all()):
        return _by_size(function, groups_S, columns, per_group=False)
    all_S = columns[0].new_zeros(columns[0].shape)
    if bool(counted_S.any()):
        within_S = groups_S[counted_S].unique(return_inverse=True)[1]
        all_S[counted_S] = for_answers(function, within_S, *(column[counted_S] for column in columns))
    return all_S


def for_groups(
    function: Callable[..., Tensor],
    groups_S: Tensor,
    *columns: Tensor,
    counted_S: Tensor | None = None,
    empty: bool = False,
) -> Tensor:
    """The values of a function of [groups, answers, ...] for every group; `empty` for groups without a counted
    answer."""
    if counted_S is None or bool(counted_S.all()):
        return _by_size(function, groups_S, columns, per_group=True)
    all_G = torch.full((int(groups_S[-1]) + 1,), empty)
    if bool(counted_S.any()):
        present, within_S = groups_S[counted_S].unique(return_inverse=True)
        all_G[present] = for_groups(function, within_S, *(column[counted_S] for column in columns))
    return all_G


def _by_size(
    function: Callable[..., Tensor], groups_S: Tensor, columns: Iterable[Tensor], *, per_group: bool
) -> Tensor:
    """Call the function once for the groups of each size."""
    sizes_G = torch.bincount(groups_S)
    starts_G = sizes_G.cumsum(0) - sizes_G
    found = None
    for size in sizes_G.unique().tolist():
        chosen_G = sizes_G == size
        places_GA = starts_G[chosen_G, None] + torch.arange(size, device=groups_S.device)
        values = function(*(column[places_GA] for column in columns))
        if found is None:
            found = values.new_empty(
                len(sizes_G) if per_group else len(groups_S), *values.shape[1 if per_group else 2 :]
            )
        found[chosen_G if per_group else places_GA] = values
    assert found is not None, "there is no group"
    return found


# ---- whole answers


def unchanged(rewards_GA: Tensor) -> Tensor:
    return rewards_GA


def minus_mean(rewards_GA: Tensor) -> Tensor:
    return rewards_GA - _means(rewards_GA)


def leave_one_out(rewards_GA: Tensor) -> Tensor:
    samples = rewards_GA.shape[1]
    return minus_mean(rewards_GA) * (samples / max(samples - 1, 1))


def standardised(rewards_GA: Tensor) -> Tensor:
    deviations_GA = minus_mean(rewards_GA)
    if rewards_GA.shape[1] == 1:  # one reward has no deviation
        return deviations_GA
    return deviations_GA / (deviations_GA.std(1, keepdim=True) + 1e-9)


SHAPED_BY: dict[str, Callable[[Tensor], Tensor]] = {
    "unchanged": unchanged,
    "minus_mean": minus_mean,
    "leave_one_out": leave_one_out,
    "standardised": standardised,
}


def compared(rewards_GA: Tensor) -> Tensor:
    """1 for answers that have others in their group, 0 for one alone."""
    return torch.full_like(rewards_GA, float(rewards_GA.shape[1] > 1))


def equal_groups(rewards_GA: Tensor) -> Tensor:
    """Which groups' rewards are all equal: they say nothing about which answer is better."""
    return (rewards_GA == rewards_GA[:, :1]).all(1)


def within(scores_GA: Tensor, low: float, high: float) -> Tensor:
    """Which groups dynamic filtering keeps: neither hopeless nor solved, low < mean < high."""
    means_G = _means(scores_GA)[:, 0]
    return (low < means_G) & (means_G < high)


def _means(values_GA: Tensor) -> Tensor:
    """Measured from the first value: a rounded mean of equal values would leave a deviation, which a std of the same
    size turns into an advantage of 1."""
    first_G1 = values_GA[:, :1]
    return first_G1 + (values_GA - first_G1).mean(1, keepdim=True)


# ---- steps within answers


Shaping = Callable[[Tensor, Tensor, Tensor], Tensor]  # (scores_K, answers_K, groups_S) -> shaped rewards [K]


def steps_unchanged(scores_K: Tensor, answers_K: Tensor, groups_S: Tensor) -> Tensor:
    return scores_K


def steps_standardised(scores_K: Tensor, answers_K: Tensor, groups_S: Tensor) -> Tensor:
    """`answers_K`: which answer a step belongs to, in order; `groups_S`: which group an answer belongs to."""
    groups_K = groups_S[answers_K]
    steps_G = torch.bincount(groups_K)
    deviations_K = _from_first(scores_K, groups_K)
    deviations_K = deviations_K - (answer_sums(deviations_K, groups_K, len(steps_G)) / steps_G)[groups_K]
    variance_G = answer_sums(deviations_K.square(), groups_K, len(steps_G)) / (steps_G - 1).clamp(min=1)
    return deviations_K / (variance_G.sqrt() + 1e-9)[groups_K]


def steps_leave_one_out(scores_K: Tensor, answers_K: Tensor, groups_S: Tensor) -> Tensor:
    groups_K, answers = groups_S[answers_K], len(groups_S)
    deviations_K = _from_first(scores_K, groups_K)
    totals_S, steps_S = answer_sums(deviations_K, answers_K, answers), torch.bincount(answers_K, minlength=answers)
    of_others_S = (_of_group(column_S, groups_S) - column_S for column_S in (totals_S, steps_S))
    totals_K, steps_K = (column_S[answers_K] for column_S in of_others_S)
    return torch.where(steps_K > 0, deviations_K - totals_K / steps_K.clamp(min=1), 0)


def steps_minus_mean(scores_K: Tensor, answers_K: Tensor, groups_S: Tensor) -> Tensor:
    n_G = torch.bincount(groups_S).double()
    scale_K = ((n_G - 1) / n_G)[groups_S[answers_K]]
    return steps_leave_one_out(scores_K, answers_K, groups_S) * scale_K.to(scores_K.dtype)


STEPS_SHAPED_BY: dict[str, Shaping] = {
    "unchanged": steps_unchanged,
    "minus_mean": steps_minus_mean,
    "leave_one_out": steps_leave_one_out,
    "standardised": steps_standardised,
}


def _from_first(scores_K: Tensor, groups_K: Tensor) -> Tensor:
    """Measured from the group's first step: equal scores leave exactly nothing, whatever a mean of them rounds to."""
    return scores_K - scores_K[torch.searchsorted(groups_K, groups_K)]


def _of_group(column_S: Tensor, groups_S: Tensor) -> Tensor:
    """The sum over its group, for each answer."""
    return for_groups(lambda column_GA: column_GA.sum(1), groups_S, column_S)[groups_S]


# ---- turns of an episode


def rewards_before_turn(rewards_K: Tensor, episodes_K: Tensor) -> Tensor:
    """What each turn's episode was given before it. `episodes_K`: which one a turn belongs to, in order."""
    upto_K = rewards_K.double().cumsum(0) - rewards_K
    firsts_K = torch.searchsorted(episodes_K, episodes_K)
    return (upto_K - upto_K[firsts_K]).to(rewards_K.dtype)


def turn_deviations(
    totals_E: Tensor, rewards_K: Tensor, episodes_K: Tensor, groups_E: Tensor, counted_E: Tensor | None = None
) -> Tensor:
    """D of each episode's group, for `standardised`; `counted_E`: of which episodes (groups.for_answers)."""

    def mean(totals_GA: Tensor) -> Tensor:
        return totals_GA.mean(1, keepdim=True).expand_as(totals_GA)

    means_E = for_answers(mean, groups_E, totals_E, counted_S=counted_E)
    to_come_K = totals_E[episodes_K] - rewards_before_turn(rewards_K, episodes_K)
    squares_K = (to_come_K - means_E[episodes_K]).square()
    turns_E = torch.bincount(episodes_K, minlength=len(totals_E))
    own_E = answer_sums(squares_K, episodes_K, len(totals_E)) / turns_E.clamp(min=1)
    squares_E = torch.where(turns_E > 0, own_E, (totals_E - means_E).square())

    def deviation(squares_GA: Tensor) -> Tensor:
        return (squares_GA.sum(1, keepdim=True) / max(squares_GA.shape[1] - 1, 1)).sqrt().expand_as(squares_GA)

    return for_answers(deviation, groups_E, squares_E, counted_S=counted_E)


def turn_end_rewards(
    shaped_E: Tensor,
    unit_E: Tensor,
    rewards_K: Tensor,
    episodes_K: Tensor,
    clip: tuple[float, float] | None = None,
) -> Tensor:
    """What stands on the last token of each turn, so that sums from a token on are its turn's G - b. `shaped_E`: R - b
    of each episode; `unit_E`: what a reward of 1 is in that; `clip`: lowest and highest G - b."""
    to_come_K = shaped_E[episodes_K] - unit_E[episodes_K] * rewards_before_turn(rewards_K, episodes_K)
    if clip is not None:
        to_come_K = to_come_K.clamp(*clip)
    goes_on_K = F.pad(episodes_K[1:] == episodes_K[:-1], (0, 1))
    return torch.where(goes_on_K, to_come_K - F.pad(to_come_K[1:], (0, 1)), to_come_K)
