"""The load-balancing loss of mixture-of-experts routers (Switch Transformer, equations 4 to 6, over all layers).

    L = E * sum_e f_e P_e

f_e: share of (token, layer) pairs that send one of their k choices to expert e; P_e: mean router probability of e.
f is a count and has no gradient. The loss of a step is the token-weighted mean over its micro-batches, so unlike the
main loss it depends on how the step is cut.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def load_balancing_loss(
    router_logits: tuple[Tensor, ...], top_k: int, add_up: Callable[[Tensor], Tensor] = lambda sums: sums
) -> Tensor:
    """`router_logits`: one [tokens, experts] tensor a layer, real tokens only. `add_up`: sums over all tokens of the
    micro-batch from sums over these, where these are not all."""
    probabilities = torch.stack([layer.float().softmax(-1) for layer in router_logits])  # [layers, tokens, experts]
    experts = probabilities.shape[-1]
    chosen = torch.bincount(probabilities.topk(top_k, dim=-1).indices.flatten(), minlength=experts)
    pairs = chosen.new_full((1,), probabilities.shape[0] * probabilities.shape[1])
    sums = add_up(torch.cat([chosen.float(), pairs.float(), probabilities.sum((0, 1))]))
    chosen, pairs, mass = sums.split([experts, 1, experts])
    return experts * ((chosen.detach() / pairs.detach()) * (mass / pairs.detach())).sum()
