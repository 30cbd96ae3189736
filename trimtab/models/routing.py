"""Routing in mixtures of experts: which experts tokens choose, counted for metrics and recorded for comparisons.

transformers calls stacked experts as (hidden states, numbers of the chosen experts, their weights), whatever the
router; fused layers (fused_layer.py) call the same hooks.
"""

import contextlib
import functools
import inspect
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from trimtab.distributed.process_group import Peers
from trimtab.models.fused_layer import is_mixture


class ExpertLoad:
    """Tokens that each expert of a layer was given."""

    def __init__(self) -> None:
        self.counts: dict[nn.Module, Tensor] = {}

    def __call__(self, experts: nn.Module, given: tuple, named: dict[str, Tensor]) -> None:
        chosen = (named["top_k_index"] if "top_k_index" in named else given[1]).detach().flatten().long()
        count = next(experts.parameters()).shape[0]
        if experts not in self.counts:
            self.counts[experts] = torch.zeros(count + 1, dtype=torch.int64, device=chosen.device)
        # Tokens of experts in other processes are numbered after the last.
        self.counts[experts].scatter_add_(0, chosen.clamp_max(count), torch.ones_like(chosen))

    def figures(self, peers: Peers) -> dict[str, Tensor]:
        """Means over layers: the load of the busiest expert, 1 if all have the same; the share of experts without a
        token. Of each, this process's part of the sum over `peers`, for all of their tokens."""
        if not self.counts:
            return {}
        loads = [peers.sum(counts)[:-1].double() for counts in self.counts.values()]
        busiest = torch.stack([load.max() / load.mean().clamp_min(1e-30) for load in loads])
        idle = torch.stack([(load == 0).double().mean() for load in loads])
        return {"expert_max_load": busiest.mean() / peers.size, "idle_experts": idle.mean() / peers.size}


@contextlib.contextmanager
def counted_experts(model: nn.Module) -> Iterator[ExpertLoad]:
    """Count the tokens of every expert. Compiled layers are not counted."""
    load = ExpertLoad()
    hooks = [
        module.register_forward_pre_hook(load, with_kwargs=True)
        for module in model.modules()
        if _takes_choices(type(module))  # type: ignore[arg-type]
    ]
    try:
        yield load
    finally:
        for hook in hooks:
            hook.remove()


@functools.cache
def _takes_choices(kind: type[nn.Module]) -> bool:
    return list(inspect.signature(kind.forward).parameters)[2:3] == ["top_k_index"]


# ---- recorded choices


Routes = dict[nn.Module, list[Tensor]]
"""Experts that each router chose, call by call [T, K]."""


def routers_of(model: nn.Module) -> list[nn.Module]:
    """Of mixtures that fused layers know."""
    return [mlp.gate for mlp in model.modules() if is_mixture(mlp)]


@contextlib.contextmanager
def recorded_routes(model: nn.Module) -> Iterator[Routes]:
    """Record the experts that the routers' modules choose. Two experts are often equally likely in bf16, so two correct
    layers may choose differently."""
    found: Routes = {router: [] for router in routers_of(model)}
    hooks = [
        router.register_forward_hook(lambda module, _, out: found[module].append(out[2].detach())) for router in found
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def replayed_routes(found: Routes) -> Iterator[None]:
    """Let modules or fused layers choose the recorded experts, with their own weights."""
    for router, choices in found.items():
        router.replayed = iter(choices)
    hooks = [router.register_forward_hook(_replay) for router in found]
    try:
        yield
    finally:
        for router, hook in zip(found, hooks):
            hook.remove()
            del router.replayed


def _replay(router: nn.Module, _: tuple, out: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    logits_TE, weights_TK, _ = out
    chosen_TK = next(router.replayed)
    shares_TK = logits_TE.float().softmax(-1).gather(1, chosen_TK.long())
    if getattr(router, "norm_topk_prob", True):
        shares_TK = shares_TK / shares_TK.sum(1, keepdim=True)
    return logits_TE, shares_TK.to(weights_TK.dtype), chosen_TK
