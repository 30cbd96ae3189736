"""Tail methods, which make rare bad answers rarer (RePULSe: Zhao et al. 2025), and GCG, which looks for them.

REINFORCE with one return for a whole answer:

    R_i = r_i - lambda sum over t of (log p - log p_0)        the KL to the start is part of the return
    A_i = R_i - mean of the other returns of its group        or R_i - a constant
    L   = -(1 / answers) sum over answers i and tokens t of A_it log p(s_it)

A_it is A_i times the token's scale (group_rewards.token_scale). Every loss of RePULSe has the form of L: the push-down
term is L with other advantages, contrastive twist learning is L on log psi.

Self-normalised weights that turn a group's answers into a sample of the tilted policy sigma:

    sigma(s) = p(s) exp(beta r(s)) / Z                        beta < 0: bad answers that p can still give
    answers s_i of q:   log w_i = log p(s_i) - log q(s_i) + beta r(s_i),   omega = softmax of log w over the group
    effective sample size   1 / sum omega_i^2                 between 1 and n

With q = p, the base proposal, the ratio is 0 and omega = softmax(beta r). With q = sigma all weights are 1 / n.

RePULSe's push-down term lowers the probability of what the tilted policy samples:

    L_p = L_RL + kappa (1 / groups) sum over groups and answers i of omega_i log p(s_i)
    kappa = alpha / n  (per_sample)   or   alpha  (per_group)

E_sigma[grad log p] = grad log Z, so with token_sum this descends on kappa log E_p[exp(beta r)]. The answers are the
proposal's. On p's own answers, weighted without a ratio, it is the base proposal. Added to REINFORCE's loss, which is
a mean over answers, each answer's advantage is -kappa n omega_i.

Contrastive twist learning draws the proposal q towards sigma (Zhao et al. 2024):

    psi_t says how much likelier a prefix becomes under the target than under p:
        a proposal that is a model     log psi_t = log q(s_t | s_<t) - log p(s_t | s_<t),   p held fixed
        the modulation family          log psi_t is a head's output, and q is p psi, normalised over the vocabulary
    nu_it = softmax over the answers i of a group, at each step t, of
                sum over u <= t of (log p - log q)(s_iu)  +  log psi_it
    L_q   = (1 / answers) sum over i and t of (nu_it - omega_i) log psi_it

nu and omega are held fixed: L_q is L on log psi, with advantages omega - nu. The first term raises psi where the target
is; the second lowers it where p psi is. For a q that is a model, already normalised, the second has mean 0 (with
token_sum; with token_mean if all answers are equally long) and only takes away noise; with token_mean and answers of
different lengths its mean is not 0, and what is learnt changes without it. For a head it is what keeps psi from growing
without bound.

Rewards that punish bad answers harder than the reward itself does:

    minus_alpha_exp_beta_r    r - alpha exp(beta r)           beta < 0
    minus_alpha_ind           r - alpha [r < threshold]

The first adds alpha Z E_sigma[grad log p] to what REINFORCE descends on (the push-down term has the same without Z): as
bad answers become rare Z = E_p[exp(beta r)] falls to what the good ones leave of it, and so does the push.

Greedy coordinate gradient (Zou et al. 2023, arXiv 2307.15043): which tokens of a suffix to try next.

    L(x) = - 1/T sum_t log p(y_t | before, x, after, y_<t)        x: the suffix, y: what the model shall say
    g[l, v] = dL / d onehot(x)[l, v] = dL/de_l . E_v              e_l: the embedding at place l, E: all embeddings

A large negative g[l, v] promises a lower loss for v at place l. The promise is first-order only, so many candidates,
each with a few random places changed to random tokens among the most promising, are then evaluated exactly.
"""

import torch
from torch import Tensor

from trimtab.algos.group_rewards import answer_sums, for_answers, leave_one_out


def answer_returns(rewards_S: Tensor, kl_N: Tensor | None, coefficient: float, owners_N: Tensor) -> Tensor:
    """R of each answer, from its reward and the k1 estimate of its tokens' KL."""
    return rewards_S if kl_N is None else rewards_S - coefficient * answer_sums(kl_N, owners_N, len(rewards_S))


def reinforce_advantages(returns_GA: Tensor, baseline: float | None = None) -> Tensor:
    """A of each answer; without a `baseline` the group's other answers are it."""
    return leave_one_out(returns_GA) if baseline is None else returns_GA - baseline


# ---- weights of the tilted policy


def log_ratios(policy_N: Tensor, proposal_N: Tensor, owners_N: Tensor, answers: int) -> Tensor:
    """log p(s) - log q(s) of each answer, from the log-probs of its tokens."""
    return answer_sums(policy_N - proposal_N, owners_N, answers)


def tilted_weights(rewards_GA: Tensor, beta: float, log_ratios_GA: Tensor | None = None) -> Tensor:
    """omega [groups, n]; without ratios the answers are p's own. The rewards are raw: neither transformed nor less
    KL."""
    log_weights_GA = beta * rewards_GA
    if log_ratios_GA is not None:
        log_weights_GA = log_weights_GA + log_ratios_GA
    return log_weights_GA.softmax(1)


def effective_samples(weights_GA: Tensor) -> Tensor:
    """Of each group: [groups]."""
    return 1 / weights_GA.square().sum(1)


# ---- the push-down term


def push_down_factor(alpha: float, group: int, scale: str) -> float:
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


def push_down_advantages(weights_S: Tensor, kappa: float, group: float) -> Tensor:
    """Advantages of the answers before the scale of their tokens; `group`: n, or the mean of it."""
    return -kappa * group * weights_S


# ---- contrastive twist learning


def twist_step_weights(log_ratio_N: Tensor, log_twist_N: Tensor, owners_N: Tensor, groups_S: Tensor) -> Tensor:
    """nu of each token. `log_ratio_N` is log p - log q of the tokens; `groups_S`: which group an answer belongs to.

    Answers are aligned at their first token, and one that has ended keeps the score of its last token: its share of the
    probability is still there at later steps. Without it a group with q = p and beta = 0 would still have a gradient,
    and a head would have no fixed point.
    """
    lengths_S = torch.bincount(owners_N, minlength=len(groups_S))
    starts_S = lengths_S.cumsum(0) - lengths_S
    positions_N = torch.arange(len(owners_N), device=owners_N.device) - starts_S[owners_N]
    steps_T = torch.arange(int(lengths_S.max()), device=owners_N.device)
    places_ST = starts_S[:, None] + torch.minimum(steps_T, lengths_S[:, None] - 1)  # past the end: the last token
    prefix_N = log_ratio_N[places_ST].cumsum(1)[owners_N, positions_N]
    scores_ST = (prefix_N + log_twist_N)[places_ST]
    weights_ST = for_answers(lambda scores_GAT: scores_GAT.softmax(1), groups_S, scores_ST)
    return weights_ST[owners_N, positions_N]


def ctl_advantages(weights_S: Tensor, step_weights_N: Tensor | None, owners_N: Tensor) -> Tensor:
    """omega_i - nu_it of each token, before the token's scale; without `step_weights_N` the second term is left out."""
    weights_N = weights_S[owners_N]
    return weights_N if step_weights_N is None else weights_N - step_weights_N


# ---- transformed rewards


def minus_exponential(rewards: Tensor, alpha: float, beta: float) -> Tensor:
    return rewards - alpha * torch.exp(beta * rewards)


def minus_indicator(rewards: Tensor, alpha: float, threshold: float) -> Tensor:
    return rewards - alpha * (rewards < threshold)


# ---- greedy coordinate gradient


def token_gradient(gradient_LD: Tensor, embeddings_VD: Tensor) -> Tensor:
    """dL / d onehot [L, V], from the gradient at the suffix's embeddings."""
    return gradient_LD.float() @ embeddings_VD.float().T


def promising_tokens(gradient_LV: Tensor, k: int, forbidden_V: Tensor) -> Tensor:
    """The k tokens of each place whose gradient is the most negative, forbidden ones left out [L, k]."""
    allowed = int((~forbidden_V).sum())
    return gradient_LV.masked_fill(forbidden_V, float("inf")).topk(min(k, allowed), largest=False).indices


def candidate_suffixes(
    suffix_L: Tensor, tokens_LK: Tensor, count: int, replaced: int, generator: torch.Generator
) -> Tensor:
    """`count` copies of the suffix [count, L], each with `replaced` places changed. All drawn on the host."""
    length, k = tokens_LK.shape
    places_CR = torch.rand(count, length, generator=generator).argsort(1)[:, :replaced]
    choices_CR = torch.randint(k, places_CR.shape, generator=generator)
    return suffix_L.repeat(count, 1).scatter(1, places_CR, tokens_LK[places_CR, choices_CR])
