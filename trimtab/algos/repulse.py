"""RePULSe's push-down term (Zhao et al. 2025): lower the probability of what the tilted policy samples.

    L_p = L_RL + kappa (1 / groups) sum over groups and answers i of omega_i log p(s_i)
    kappa = alpha / n  (per_sample)   or   alpha  (per_group)

E_sigma[grad log p] = grad log Z, so with token_sum this descends on kappa log E_p[exp(beta r)]. The answers are the
proposal's, with weights from tail_weights.py. On p's own answers, weighted without a ratio, it is the base proposal.
Added to REINFORCE's loss, which is a mean over answers, each answer's advantage is -kappa n omega_i.
"""

from torch import Tensor


def kappa(alpha: float, group: int, scale: str) -> float:
    """What the gradient of log Z is multiplied by. `per_sample` is the original's: omega sums to 1, and the mean over
    the answers divides by n once more."""
    if scale == "per_group":
        return alpha
    assert scale == "per_sample", scale
    return alpha / group


def annealed(start: float | None, end: float, progress: float) -> float:
    """Between two numbers of one sign, by the same factor for every part of the way; `progress`: from 0 to 1."""
    if start is None:
        return end
    return start * (end / start) ** progress


def push_down(weights_S: Tensor, kappa: float, group: float) -> Tensor:
    """Advantages of the answers before the scale of their tokens; `group`: n, or the mean of it."""
    return -kappa * group * weights_S
