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
from trimtab.errors import UserError
from trimtab.models.attention import PackedPass, carried
from trimtab.models.lora import base_layer


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


ROUTER = {"top_k", "num_experts", "hidden_dim", "norm_topk_prob"}


def routers_of(model: nn.Module) -> list[nn.Module]:
    """Routers that give the most likely experts their softmax, in the order of the layers."""
    mixtures = (module for module in model.modules() if {"gate", "experts"} <= dict(module.named_children()).keys())
    gates = (base_layer(mixture.gate) for mixture in mixtures)  # all-linear adapts these, too
    return [gate for gate in gates if is_softmax_router(gate)]


def routed_layers(model: nn.Module) -> tuple[int, ...]:
    """The numbers of the decoder layers with these routers."""
    routers = set(routers_of(model))
    names = (name for name, module in model.named_modules() if module in routers)
    return tuple(int(part) for name in names for part in name.split(".") if part.isdigit())


def is_softmax_router(router: nn.Module) -> bool:
    """Those with groups of experts, factors or biases have more attributes; others call sigmoid."""
    tensors = router._parameters.keys() | router._buffers.keys()
    settings = {name for name in vars(router) if not name.startswith("_")} - {"training", "replayed"}
    if tensors != {"weight"} or router._modules or "top_k" not in settings or not settings <= ROUTER:
        return False
    called = inspect.unwrap(type(router).forward).__code__.co_names
    return "softmax" in called and "sigmoid" not in called


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


RouterOutput = tuple[Tensor, Tensor, Tensor]
"""Logits [T, E], and weights and numbers [T, K] of the chosen experts."""


def _replay(router: nn.Module, _: tuple, out: RouterOutput) -> RouterOutput:
    return _with_experts(router, out, next(router.replayed))


def _with_experts(router: nn.Module, out: RouterOutput, chosen_TK: Tensor) -> RouterOutput:
    """These experts instead of the router's own, with the weights it gives them; gradients reach the router."""
    logits_TE, weights_TK, _ = out
    shares_TK = logits_TE.float().softmax(-1).gather(1, chosen_TK.long())
    if getattr(router, "norm_topk_prob", True):
        shares_TK = shares_TK / shares_TK.sum(1, keepdim=True)
    return logits_TE, shares_TK.to(weights_TK.dtype), chosen_TK


# ---- choices of an engine, in scoring and training


def replay_routes_of_batches(model: nn.Module) -> None:
    """Let the routers choose the experts of `TokenBatch.routes_TLK` in passes over batches that have them, and in their
    backward passes. A token without known experts chooses by itself. Other passes, as of an engine, are as before."""
    for layer, router in enumerate(routers_of(model)):
        router.register_forward_hook(functools.partial(_replay_in_batch, layer))


def _replay_in_batch(layer: int, router: nn.Module, _: tuple, out: RouterOutput) -> RouterOutput | None:
    current = carried(router)
    given_TK = current.routes_of(layer) if isinstance(current, PackedPass) else None
    if given_TK is None:
        return None
    unknown = torch.iinfo(given_TK.dtype).max
    return _with_experts(router, out, torch.where(given_TK == unknown, out[2], given_TK.to(out[2].dtype)))


def check_routes(model: nn.Module, routes_TLK: Tensor) -> None:
    """Refuse experts of another model, as a recording may have them."""
    routers = routers_of(model)
    own = len(routers), routers[0].top_k
    experts, known = len(routers[0].weight), routes_TLK[routes_TLK != torch.iinfo(routes_TLK.dtype).max]
    if routes_TLK.shape[1:] != own or bool(((known < 0) | (known >= experts)).any()):
        layers, chosen = routes_TLK.shape[1:]
        raise UserError(
            f"the recorded experts are of another model: {layers} layers with {chosen} experts a token, and this one "
            f"has {own[0]} with {own[1]} of {experts}; give --routing_replay off"
        )
