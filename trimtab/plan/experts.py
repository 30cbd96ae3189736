"""Experts of a mixture in a pretended pass. Which expert a token goes to follows from contents, and here there are
none: every expert gets as many tokens. What is kept is what Hugging Face's grouped products keep, whoever gets them."""

from typing import Any

import torch
from torch import Tensor, nn

NAME = "trimtab_even"


def deal_evenly(model: nn.Module) -> None:
    """Let the experts of a skeleton run without a look at the routing, if it has any."""
    if not any(hasattr(module, "gate_up_proj") and hasattr(module, "has_gate") for module in model.modules()):
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if NAME not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(NAME, _even_experts)
    model.set_experts_implementation(NAME)


def _even_experts(experts: Any, hidden_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """E experts, each with as many rows of the T x K that were chosen."""
    tokens, most = chosen_TK.shape
    number = experts.gate_up_proj.shape[0]
    order = chosen_TK.new_empty(-(-tokens * most // number) * number)
    rows_ERD = hidden_TD[order].view(number, -1, hidden_TD.shape[-1])
    inner = experts._apply_gate(torch.bmm(rows_ERD, experts.gate_up_proj.transpose(1, 2)))
    out = torch.bmm(inner, experts.down_proj.transpose(1, 2)).flatten(0, 1)
    weighted = out * weights_TK.reshape(-1)[order][:, None]
    return weighted[order[: tokens * most]].view(tokens, most, -1).sum(1).to(hidden_TD.dtype)
