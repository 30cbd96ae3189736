"""From tokens to the answers they belong to, and back: `owners_N` says which answer a token is of.

    token_mean    a weight w of an answer of T tokens gives each of them w / T: the answer's mean log-prob counts w
    token_sum     each of them w: the answer's log-prob counts w

Only token_sum makes the gradient of an answer that of its log-probability; with token_mean, tokens of short answers
count more. Where all answers are equally long the two differ by a constant.
"""

import torch
from torch import Tensor


def sums(values_N: Tensor, owners_N: Tensor, answers: int) -> Tensor:
    """The sum over the tokens of each answer: [answers]."""
    return values_N.new_zeros(answers).index_add(0, owners_N, values_N)


def token_scale(owners_N: Tensor, answers: int, reduction: str) -> Tensor:
    """What each token's weight is multiplied by: [N]."""
    if reduction == "token_sum":
        return torch.ones(len(owners_N), device=owners_N.device)
    assert reduction == "token_mean", reduction
    return 1 / torch.bincount(owners_N, minlength=answers)[owners_N]
