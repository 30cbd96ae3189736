"""Rewards that punish bad answers harder than the reward itself does.

    minus_alpha_exp_beta_r    r - alpha exp(beta r)           beta < 0
    minus_alpha_ind           r - alpha [r < threshold]

The first adds alpha Z E_sigma[grad log p] to what REINFORCE descends on (repulse.py has the same without Z): as bad
answers become rare Z = E_p[exp(beta r)] falls to what the good ones leave of it, and so does the push.
"""

import torch
from torch import Tensor


def minus_exponential(rewards: Tensor, alpha: float, beta: float) -> Tensor:
    return rewards - alpha * torch.exp(beta * rewards)


def minus_indicator(rewards: Tensor, alpha: float, threshold: float) -> Tensor:
    return rewards - alpha * (rewards < threshold)
