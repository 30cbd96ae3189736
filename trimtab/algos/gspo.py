"""GSPO (Zheng et al. 2025): PPO's clipped surrogate with one ratio for a whole answer.

    rho = exp(mean over the answer's tokens of log pi - log pi_old),   L = -min(rho A, clip(rho, 1 - low, 1 + high) A)

The loss of an answer is handed out to its tokens alike, so its mean over answers is their mean over the tokens of each
answer, then over answers. With answers of one token it is PPO.
"""

from torch import Tensor

from trimtab.algos import policy_loss
from trimtab.algos.answers import sums


def clipped(
    log_probs_N: Tensor, old_N: Tensor, advantages_N: Tensor, owners_N: Tensor, answers: int, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Loss of each token, and which tokens a clip has cut off from the gradient."""
    lengths_S = sums(log_probs_N.new_ones(len(log_probs_N)), owners_N, answers)
    mean_S = sums(log_probs_N - old_N, owners_N, answers) / lengths_S
    advantages_S = sums(advantages_N, owners_N, answers) / lengths_S
    loss_S, clipped_S = policy_loss.clipped(mean_S, mean_S.new_zeros(answers), advantages_S, low, high)
    return loss_S[owners_N], clipped_S[owners_N]
