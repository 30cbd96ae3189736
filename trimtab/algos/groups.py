"""Functions of groups of equal size, for groups of any sizes.

What sees the answers to one prompt against each other is written for a matrix, [groups, answers of each]. Here it is
given the groups of one size after another, out of columns over all S answers. `groups_S` says which group an answer
belongs to: 0, 1, 2 and so on, in order. Where all groups are equally large it sees all of them in one matrix.

`counted_S` says which answers are in their groups; the function sees no others. Unset: all are.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


def for_answers(
    function: Callable[..., Tensor], groups_S: Tensor, *columns: Tensor, counted_S: Tensor | None = None
) -> Tensor:
    """What a function of [groups, answers, ...] says of every answer; 0 of those that are not counted."""
    if counted_S is not None and not bool(counted_S.all()):
        all_S = columns[0].new_zeros(columns[0].shape)
        if bool(counted_S.any()):
            within_S = groups_S[counted_S].unique(return_inverse=True)[1]
            all_S[counted_S] = for_answers(function, within_S, *(column[counted_S] for column in columns))
        return all_S
    found = None
    for _, places_GA in _matrices(groups_S):
        values = function(*(column[places_GA] for column in columns))
        if found is None:
            found = values.new_empty(len(groups_S), *values.shape[2:])
        found[places_GA] = values
    assert found is not None, "there is no group"
    return found


def for_groups(
    function: Callable[..., Tensor],
    groups_S: Tensor,
    *columns: Tensor,
    counted_S: Tensor | None = None,
    empty: bool = False,
) -> Tensor:
    """What a function of [groups, answers, ...] says of every group. `empty`: what is said of a group without a
    counted answer."""
    if counted_S is not None and not bool(counted_S.all()):
        all_G = torch.full((int(groups_S[-1]) + 1,), empty)
        if bool(counted_S.any()):
            present, within_S = groups_S[counted_S].unique(return_inverse=True)
            all_G[present] = for_groups(function, within_S, *(column[counted_S] for column in columns))
        return all_G
    found = None
    for chosen_G, places_GA in _matrices(groups_S):
        values_G = function(*(column[places_GA] for column in columns))
        if found is None:
            found = values_G.new_empty(len(chosen_G))
        found[chosen_G] = values_G
    assert found is not None, "there is no group"
    return found


def sizes(groups_S: Tensor) -> Tensor:
    """How many answers each group has: [groups]."""
    return torch.bincount(groups_S)


def _matrices(groups_S: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For each size: which groups have it, and where their answers are."""
    sizes_G = sizes(groups_S)
    starts_G = sizes_G.cumsum(0) - sizes_G
    for size in sizes_G.unique().tolist():
        chosen_G = sizes_G == size
        yield chosen_G, starts_G[chosen_G, None] + torch.arange(size, device=groups_S.device)
