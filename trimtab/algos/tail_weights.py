"""Self-normalised weights that turn a group's answers into a sample of the tilted policy (Zhao et al. 2025).

    sigma(s) = p(s) exp(beta r(s)) / Z                        beta < 0: bad answers that p can still give
    answers s_i of q:   log w_i = log p(s_i) - log q(s_i) + beta r(s_i),   omega = softmax of log w over the group
    effective sample size   1 / sum omega_i^2                 between 1 and n

With q = p, the base proposal, the ratio is 0 and omega = softmax(beta r). With q = sigma all weights are 1 / n.
"""

from torch import Tensor

from trimtab.algos.answers import sums


def log_ratios(policy_N: Tensor, proposal_N: Tensor, owners_N: Tensor, answers: int) -> Tensor:
    """log p(s) - log q(s) of each answer, from the log-probs of its tokens."""
    return sums(policy_N - proposal_N, owners_N, answers)


def tilted(rewards_GA: Tensor, beta: float, log_ratios_GA: Tensor | None = None) -> Tensor:
    """omega [groups, n]; without ratios the answers are p's own. The rewards are raw: neither transformed nor less
    KL."""
    log_weights_GA = beta * rewards_GA
    if log_ratios_GA is not None:
        log_weights_GA = log_weights_GA + log_ratios_GA
    return log_weights_GA.softmax(1)


def effective_samples(weights_GA: Tensor) -> Tensor:
    """Of each group: [groups]."""
    return 1 / weights_GA.square().sum(1)
