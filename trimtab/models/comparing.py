"""Two ways to run a layer beside each other, given the same: what compiled layers, and fused ones, are believed by.

Over all layers of a model in half precision rounding adds up: of a random one with 32 layers, gradients may be off by a
tenth and nothing be wrong. Of one layer it leaves so little that a wrong one stands out. A token that goes to another
expert by the last bit of its router is not wrong either, so the worst tenth of the tokens is not looked at.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.distributed.sharding import local

Forward = Callable[..., Any]

ADDED = {torch.float32: 1e-3, torch.bfloat16: 0.03, torch.float16: 0.03}
"""How far a token may be off, as a share of what the layer adds to it; beside that by as much as it is rounded."""
WEIGHTS = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
"""How far the gradients of a layer's weights may be off, all together, as a share of them."""
LOOKED_AT = 0.9  # of the tokens


@dataclass(frozen=True)
class Given:
    """By one forward pass, and by its backward pass where the model learns."""

    out_TD: Tensor
    back_TD: Tensor | None
    weights: list[Tensor]


@dataclass
class Comparison:
    """Of all layers in one pass of a model, without gradients."""

    learns: bool
    problem: str = ""  # of the first layer that has one

    def of(self, layer: nn.Module, plain: Forward, compiled: Forward, arguments: Sequence[Any], named: Any) -> Any:
        """What the plain forward pass gives."""
        hidden_TD, *others = arguments
        if not self.problem:
            slope_TD = torch.arange(hidden_TD.numel(), device=hidden_TD.device).mul(0.7).sin().view_as(hidden_TD)
            slope_TD = slope_TD.to(hidden_TD.dtype)  # any gradient will do
            theirs, ours = (self._given(layer, call, hidden_TD, slope_TD, others, named) for call in (plain, compiled))
            self.problem = _difference(ours, theirs, hidden_TD, slope_TD)
        return plain(hidden_TD, *others, **named)

    def _given(
        self, layer: nn.Module, call: Forward, hidden_TD: Tensor, slope_TD: Tensor, others: list[Any], named: Any
    ) -> Given:
        with torch.set_grad_enabled(self.learns):
            start = hidden_TD.detach().requires_grad_(self.learns)
            out = call(start, *others, **named)
            out = out[0] if isinstance(out, tuple) else out
            if not out.requires_grad:
                return Given(out, None, [])
            weights = [weight for weight in layer.parameters() if weight.requires_grad]
            back, *found = torch.autograd.grad(out, [start, *weights], slope_TD, allow_unused=True)
        return Given(out.detach(), back, [local(gradient) for gradient in found if gradient is not None])


def _difference(ours: Given, theirs: Given, hidden_TD: Tensor, slope_TD: Tensor) -> str:
    """What is too far off; empty: nothing."""
    if (ours.back_TD is None) != (theirs.back_TD is None) or len(ours.weights) != len(theirs.weights):
        return "compiled ones give other gradients"
    off = {"values": _most(off_by(ours.out_TD, theirs.out_TD, hidden_TD))}
    if ours.back_TD is not None and theirs.back_TD is not None:
        off["gradients"] = _most(off_by(ours.back_TD, theirs.back_TD, slope_TD))
    if theirs.weights:
        a, b = (torch.cat([w.flatten().float() for w in given.weights]) for given in (ours, theirs))
        off["gradients of weights"] = ((a - b).norm() / (WEIGHTS[hidden_TD.dtype] * b.norm()).clamp_min(1e-30)).item()
    for what, times in off.items():
        if not times <= 1:  # also what is no number
            return f"{what} of compiled ones are off by {times:.2g} times what rounding explains"
    return ""


def off_by(ours_TD: Tensor, theirs_TD: Tensor, before_TD: Tensor) -> Tensor:
    """How far each token that a layer was given is off after it, beside how far it may be [T]."""
    ours, theirs, before = (x.float().flatten(0, -2) for x in (ours_TD, theirs_TD, before_TD))
    rounded_T = torch.finfo(theirs_TD.dtype).eps * theirs.norm(dim=1)
    allowed_T = ADDED[theirs_TD.dtype] * (theirs - before).norm(dim=1) + rounded_T
    return (ours - theirs).norm(dim=1) / allowed_T.clamp_min(1e-30)


def _most(off_T: Tensor) -> float:
    return off_T.quantile(LOOKED_AT).item()
