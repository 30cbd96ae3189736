"""Rewards of answers to their advantages, by the estimators of the RL jobs (config/objective_options.py, algos/)."""

from collections.abc import Sequence

import torch

from trimtab.algos.advantages import whiten
from trimtab.algos.group_rewards import SHAPED_BY, for_answers
from trimtab.api.suggesting import suggested
from trimtab.config.objective_options import ESTIMATORS
from trimtab.errors import UserError


def advantages(
    rewards: Sequence[float],
    group: int,
    estimator: str = "group_norm",
    *,
    lengths: Sequence[int] | None = None,
    no_advantage_std_norm: bool = False,
) -> list[float]:
    """The advantage of every answer, from the rewards of all.

    rewards    of all answers, those to one prompt beside each other
    group      answers to each prompt
    estimator  as --advantage_estimator: "group_norm" (GRPO), "dr_grpo", "rloo", "reinforce" (REINFORCE++) or
               "reinforce_baseline"
    lengths    trained tokens of each answer. One with 0 is in no group, mean or deviation, and its advantage is 0: give
               them where an episode may end before the model draws anything. The last two estimators bring advantages
               to mean 0 and deviation 1 over all tokens. Unset: every answer counts, and all alike
    no_advantage_std_norm
               the last two bring them to mean 0 only

    >>> trimtab.advantages([0, 1, 1, 1], group=2, estimator="rloo")
    [-1.0, 1.0, 0.0, 0.0]
    """
    if estimator not in ESTIMATORS:
        raise UserError(f"unknown estimator {estimator!r}; {suggested(estimator, ESTIMATORS)}")
    how = ESTIMATORS[estimator]
    if how.critic:
        raise UserError(
            f"estimator {estimator!r} needs a critic, which a Learner has not; take another, or trimtab.ppo"
        )
    rewards_S = _numbers(rewards, "rewards")
    if not isinstance(group, int) or group < 1 or len(rewards_S) % group:
        raise UserError(f"group is {group!r}, and there are {len(rewards_S)} rewards; give a number that divides them")
    if how.grouped and group < 2:
        raise UserError(f"estimator {estimator!r} compares the answers to a prompt; group must be above 1")
    counts_S = torch.ones(len(rewards_S), dtype=torch.int64)
    if lengths is not None:
        counts_S = _numbers(lengths, "lengths").long()
        if len(counts_S) != len(rewards_S) or counts_S.min() < 0:
            raise UserError("lengths must have a number of at least 0 for each reward")
        if not bool(counts_S.any()):
            raise UserError("lengths are all 0: there is nothing to learn from")
    groups_S = torch.arange(len(rewards_S)) // group
    shaped_S = for_answers(SHAPED_BY[how.group], groups_S, rewards_S, counted_S=counts_S > 0)
    if not how.whitened:
        if no_advantage_std_norm:
            raise UserError(
                f"no_advantage_std_norm has no effect: estimator {estimator!r} does not whiten; leave it out"
            )
        return shaped_S.tolist()
    whitened_N = whiten(shaped_S.repeat_interleave(counts_S), scale=not no_advantage_std_norm)
    return torch.where(counts_S > 0, whitened_N[counts_S.cumsum(0) - 1], 0).tolist()


def _numbers(values: Sequence[float], name: str) -> torch.Tensor:
    try:
        found = torch.tensor([float(value) for value in values], dtype=torch.float32)
    except (TypeError, ValueError):
        raise UserError(f"{name} must be a list of numbers") from None
    if not len(found):
        raise UserError(f"{name} is empty; give at least one number")
    if not bool(found.isfinite().all()):
        place = int((~found.isfinite()).nonzero()[0])
        raise UserError(f"{name}[{place}] is {float(found[place])}; all must be finite")
    return found
