"""Contrastive twist learning of a proposal (Zhao et al. 2024): q is drawn towards sigma (tail_weights.py).

    psi_t says how much likelier a prefix becomes under the target than under p:
        a proposal that is a model     log psi_t = log q(s_t | s_<t) - log p(s_t | s_<t),   p held fixed
        the modulation family          log psi_t is a head's output, and q is p psi, normalised over the vocabulary
    nu_it = softmax over the answers i of a group, at each step t, of
                sum over u <= t of (log p - log q)(s_iu)  +  log psi_it
    L_q   = (1 / answers) sum over i and t of (nu_it - omega_i) log psi_it

nu and omega are held fixed: L_q is REINFORCE's loss (reinforce.py) on log psi, with advantages omega - nu. The first
term raises psi where the target is; the second lowers it where p psi is. For a q that is a model, already normalised,
the second has mean 0 (with token_sum; with token_mean if all answers are equally long) and only takes away noise;
with token_mean and answers of different lengths its mean is not 0, and what is learnt changes without it.
For a head it is what keeps psi from growing without bound.

Answers are aligned at their first token, and one that has ended keeps the score of its last token: its share of the
probability is still there at later steps. Without it a group with q = p and beta = 0 would still have a gradient, and
a head would have no fixed point.
"""

import torch
from torch import Tensor

from trimtab.algos.groups import for_answers


def step_weights(log_ratio_N: Tensor, log_twist_N: Tensor, owners_N: Tensor, groups_S: Tensor) -> Tensor:
    """nu of each token. `log_ratio_N` is log p - log q of the tokens; `groups_S`: which group an answer belongs to."""
    lengths_S = torch.bincount(owners_N, minlength=len(groups_S))
    starts_S = lengths_S.cumsum(0) - lengths_S
    positions_N = torch.arange(len(owners_N), device=owners_N.device) - starts_S[owners_N]
    steps_T = torch.arange(int(lengths_S.max()), device=owners_N.device)
    places_ST = starts_S[:, None] + torch.minimum(steps_T, lengths_S[:, None] - 1)  # past the end: the last token
    prefix_N = log_ratio_N[places_ST].cumsum(1)[owners_N, positions_N]
    scores_ST = (prefix_N + log_twist_N)[places_ST]
    weights_ST = for_answers(lambda scores_GAT: scores_GAT.softmax(1), groups_S, scores_ST)
    return weights_ST[owners_N, positions_N]


def advantages(weights_S: Tensor, step_weights_N: Tensor | None, owners_N: Tensor) -> Tensor:
    """omega_i - nu_it of each token, before the token's scale; without `step_weights_N` the second term is left out."""
    weights_N = weights_S[owners_N]
    return weights_N if step_weights_N is None else weights_N - step_weights_N


def modulated(policy_logits_NV: Tensor, log_twist_NV: Tensor) -> Tensor:
    """log q over the vocabulary, of the modulation family."""
    return (policy_logits_NV + log_twist_NV).log_softmax(-1)
