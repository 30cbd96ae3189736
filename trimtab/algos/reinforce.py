"""REINFORCE with one return for a whole answer (Williams 1992), as RePULSe and its baselines use it (Zhao et al. 2025).

    R_i = r_i - lambda sum over t of (log p - log p_0)        the KL to the start is part of the return
    A_i = R_i - mean of the other returns of its group        or R_i - a constant
    L   = -(1 / answers) sum over answers i and tokens t of A_it log p(s_it)

A_it is A_i times the token's scale (answers.py). Every loss of RePULSe has the form of L: its push-down term is L with
the advantages of repulse.py, contrastive twist learning is L on log psi with those of ctl.py.
"""

from torch import Tensor

from trimtab.algos.answers import sums
from trimtab.algos.group_rewards import leave_one_out


def returns(rewards_S: Tensor, kl_N: Tensor | None, coefficient: float, owners_N: Tensor) -> Tensor:
    """R of each answer, from its reward and the k1 estimate of its tokens' KL."""
    return rewards_S if kl_N is None else rewards_S - coefficient * sums(kl_N, owners_N, len(rewards_S))


def advantages(returns_GA: Tensor, baseline: float | None = None) -> Tensor:
    """A of each answer; without a `baseline` the group's other answers are it."""
    return leave_one_out(returns_GA) if baseline is None else returns_GA - baseline


def loss(log_probs_N: Tensor, advantages_N: Tensor) -> Tensor:
    """The share of each token in L, before the division by the number of answers."""
    return -advantages_N * log_probs_N
