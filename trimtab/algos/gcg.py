"""Greedy coordinate gradient (Zou et al. 2023, arXiv 2307.15043): which tokens of a suffix to try next.

    L(x) = - 1/T sum_t log p(y_t | before, x, after, y_<t)        x: the suffix, y: what the model shall say
    g[l, v] = dL / d onehot(x)[l, v] = dL/de_l . E_v              e_l: the embedding at place l, E: all embeddings

A large negative g[l, v] promises a lower loss for v at place l. The promise is first-order only, so many candidates,
each with a few random places changed to random tokens among the most promising, are then evaluated exactly.
"""

import torch
from torch import Tensor


def token_gradient(gradient_LD: Tensor, embeddings_VD: Tensor) -> Tensor:
    """dL / d onehot [L, V], from the gradient at the suffix's embeddings."""
    return gradient_LD.float() @ embeddings_VD.float().T


def promising(gradient_LV: Tensor, k: int, forbidden_V: Tensor) -> Tensor:
    """The k tokens of each place whose gradient is the most negative, forbidden ones left out [L, k]."""
    allowed = int((~forbidden_V).sum())
    return gradient_LV.masked_fill(forbidden_V, float("inf")).topk(min(k, allowed), largest=False).indices


def candidates(suffix_L: Tensor, tokens_LK: Tensor, count: int, replaced: int, generator: torch.Generator) -> Tensor:
    """`count` copies of the suffix [count, L], each with `replaced` places changed. All drawn on the host."""
    length, k = tokens_LK.shape
    places_CR = torch.rand(count, length, generator=generator).argsort(1)[:, :replaced]
    choices_CR = torch.randint(k, places_CR.shape, generator=generator)
    return suffix_L.repeat(count, 1).scatter(1, places_CR, tokens_LK[places_CR, choices_CR])
