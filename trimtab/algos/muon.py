"""Muon: the update of a hidden matrix is its momentum, made nearly orthogonal.

    B <- m B + (1 - m) G,   U = m B + (1 - m) G                       Nesterov momentum; Jordan et al. 2024
    O = NS(U):   X = U / |U|, then five times   A = X X^T,   X <- a X + (b A + c A^2) X         Newton-Schulz
    W <- (1 - rate x decay) W - rate x scale x O

NS brings every singular value of U near 1 (between 0.7 and 1.2) and keeps its singular vectors. An update of R rows and
C columns then has entries of mean square 1 / max(R, C) or so, and

    scale      match_rms_adamw   0.2 sqrt(max(R, C)) makes it as large as AdamW's: learning rate and decay fit both;
                                 Moonlight, Liu et al. 2025
               original          sqrt(max(1, R / C)); Jordan et al. 2024

All is as in `torch.optim.Muon`, to the bit. That one takes whole matrices; here momentum and weights may be shards, so
the part that needs a whole matrix (`orthogonalised`) is a function of its own.
"""

import math

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
SMALLEST = 1e-7  # norm


def orthogonalised(update: Tensor) -> Tensor:
    """NS of a whole matrix, in bf16."""
    a, b, c = COEFFICIENTS
    x = update.bfloat16()
    if is_tall := update.size(0) > update.size(1):
        x = x.T
    x = x / x.norm().clamp(min=SMALLEST)
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def rate_scale(kind: str, rows: int, columns: int) -> float:
    if kind == "original":
        return math.sqrt(max(1, rows / columns))
    assert kind == "match_rms_adamw", kind
    return 0.2 * math.sqrt(max(rows, columns))
