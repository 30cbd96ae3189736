"""Contrastive twist learning of a proposal (Zhao et al. 2024): q is drawn towards sigma (tail_weights.py).

    psi_t says how much likelier a prefix becomes under the target than under p:
        a proposal that is a model     log psi_t = log q(s_t | s_<t) - log p(s_t | s_<t),   p held fixed
        the modulation family          log psi_t is a head's output, and q is p psi, normalised over the vocabulary
    nu_it = softmax over the answers i of a group that have a token t, of
                sum over u <= t of (log p - log q)(s_iu)  +  log psi_it
    L_q   = (1 / answers) sum over i and t of (nu_it - omega_i) log psi_it

nu and omega are held fixed: L_q is REINFORCE's loss (reinforce.py) on log psi, with advantages omega - nu. The first
term raises psi where the target is; the second lowers it where p psi is. For a q that is a model, already normalised,
the second has mean 0 (with token_sum; with token_mean if all answers are equally long) and only takes away noise.
For a head it is what keeps psi from growing without bound.
"""

import torch
from torch import Tensor


def step_weights(log_ratio_N: Tensor, log_twist_N: Tensor, owners_N: Tensor, answers: int, group: int) -> Tensor:
    """nu of each token. `log_ratio_N` is log p - log q of the tokens; answers are aligned at their first token."""
    lengths_S = torch.bincount(owners_N, minlength=answers)
    positions_N = torch.arange(len(owners_N), device=owners_N.device) - (lengths_S.cumsum(0) - lengths_S)[owners_N]
    ratios_ST = log_ratio_N.new_zeros(answers, int(lengths_S.max()))
    ratios_ST[owners_N, positions_N] = log_ratio_N
    prefix_N = ratios_ST.cumsum(1)[owners_N, positions_N]
    # An answer that has ended takes no part in later steps.
    scores_ST = torch.full_like(ratios_ST, -torch.inf)
    scores_ST[owners_N, positions_N] = prefix_N + log_twist_N
    weights_ST = scores_ST.view(answers // group, group, -1).softmax(1).flatten(0, 1)
    return weights_ST[owners_N, positions_N]


def advantages(weights_GN: Tensor, step_weights_N: Tensor | None, owners_N: Tensor) -> Tensor:
    """omega_i - nu_it of each token, before the token's scale; without `step_weights_N` the second term is left out."""
    weights_N = weights_GN.flatten()[owners_N]
    return weights_N if step_weights_N is None else weights_N - step_weights_N


def modulated(policy_logits_NV: Tensor, log_twist_NV: Tensor) -> Tensor:
    """log q over the vocabulary, of the modulation family."""
    return (policy_logits_NV + log_twist_NV).log_softmax(-1)
