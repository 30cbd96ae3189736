"""The layers of Llama-like models (Llama, Mistral, Qwen2, Qwen3) with few launches, from the modules' own weights.

A model is recognised by its structure and then believed only after its hidden states on a few tokens, read and decoded,
equal those of its own modules. Anything else runs through its modules. A projection that is more than a plain Linear
(an adapter) is called as the module it is; int8 weights have kernels of their own.
"""

from functools import partial

import torch
from torch import Tensor, nn

from trimtab.distributed.device import has_kernels
from trimtab.models.policy import Policy
from trimtab.rollout.builtin.cache import KVCache, KVShape
from trimtab.rollout.builtin.int8 import int8_weights
from trimtab.rollout.builtin.runner import Runner

LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
ROWS_OF_JOINED_PRODUCTS = 1024  # beyond, each product fills the device by itself


class FusedLayers:
    def __init__(self, backbone: nn.Module, arguments: list[dict]):
        """`arguments`: what each layer asks its attention for."""
        self.backbone, self.arguments = backbone, arguments

    def hidden(self, ids_T: Tensor, positions_T: Tensor, cache: KVCache, places_T: Tensor, attend) -> Tensor:
        """Last hidden states [T, D]; `attend(layer, query, key, value, arguments)` sees the cache filled."""
        from trimtab.rollout.builtin.kernels.layers import add_norm, rotate_and_store

        backbone = self.backbone
        stream = backbone.embed_tokens(ids_T)
        cos, sin = (x[0].contiguous() for x in backbone.rotary_emb(stream[None], position_ids=positions_T[None]))
        new = None
        for index, layer in enumerate(backbone.layers):
            attention, norm = layer.self_attn, layer.input_layernorm
            x = add_norm(new, stream, norm.weight, norm.variance_epsilon)
            query, key, value = (part.unflatten(1, (-1, cos.shape[1])) for part in _projections(attention, x))
            keys, values = cache.keys[index], cache.values[index]
            rotate_and_store(query, key, value, cos, sin, keys, values, places_T, _head_norms(attention))
            mixed = attend(index, query, key, value, self.arguments[index])
            norm = layer.post_attention_layernorm
            x = add_norm(_summands(attention.o_proj, mixed.flatten(1)), stream, norm.weight, norm.variance_epsilon)
            new = _summands(layer.mlp.down_proj, _opened(layer.mlp, x))
        return add_norm(new, stream, backbone.norm.weight, backbone.norm.variance_epsilon)


def _projections(attention: nn.Module, x_TD: Tensor) -> tuple[Tensor, ...]:
    from trimtab.rollout.builtin.kernels.int8 import can_multiply, int8_product
    from trimtab.rollout.builtin.kernels.linear import can_join, joined_linear

    modules = [attention.q_proj, attention.k_proj, attention.v_proj]
    weights = int8_weights(modules)
    if weights is not None and can_multiply(x_TD, weights):
        joined = int8_product(x_TD, weights)
    elif len(x_TD) <= ROWS_OF_JOINED_PRODUCTS and can_join(x_TD, modules):
        joined = joined_linear(x_TD, modules)
    else:
        return tuple(module(x_TD) for module in modules)
    return joined.split([module.out_features for module in modules], 1)


def _summands(module: nn.Module, x_TD: Tensor) -> Tensor:
    """What the module gives [T, D], or parts of its sum [parts, T, D]."""
    from trimtab.rollout.builtin.kernels.int8 import can_multiply, int8_product

    weights = int8_weights([module])
    if weights is not None and can_multiply(x_TD, weights):
        return int8_product(x_TD, weights, parts=True)
    return module(x_TD)


def _opened(mlp: nn.Module, x_TD: Tensor) -> Tensor:
    from trimtab.rollout.builtin.kernels.int8 import can_multiply, int8_gated
    from trimtab.rollout.builtin.kernels.layers import gated
    from trimtab.rollout.builtin.kernels.linear import can_join, gated_linear

    modules = [mlp.gate_proj, mlp.up_proj]
    weights = int8_weights(modules)
    if weights is not None and weights[0].bias_O is None and can_multiply(x_TD, weights):
        return int8_gated(x_TD, *weights)
    if len(x_TD) <= ROWS_OF_JOINED_PRODUCTS and modules[0].bias is None and can_join(x_TD, modules):
        return gated_linear(x_TD, *modules)
    return gated(*(module(x_TD) for module in modules))


def _head_norms(attention: nn.Module) -> tuple[Tensor, Tensor, float] | None:
    if not hasattr(attention, "q_norm"):
        return None
    return attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon


# ---- which models


def recognised(policy: Policy, shape: KVShape, arguments: list[dict]) -> FusedLayers | None:
    """The policy's layers fused, where the device has kernels and the numbers are its own."""
    backbone = policy.inner.base_model
    if not has_kernels(policy.device) or not looks_like_llama(backbone):
        return None
    used = ("scaling", "sliding_window", "softcap")
    fused = FusedLayers(backbone, [{name: asked.get(name) for name in used} for asked in arguments])
    expected, found = (_few_hidden_states(policy, shape, layers) for layers in (None, fused))
    tolerance = 1e-3 if shape.dtype == torch.float32 else 5e-2  # rounding, over all layers
    return fused if (found - expected).norm() <= tolerance * expected.norm() else None


@torch.no_grad()
def _few_hidden_states(policy: Policy, shape: KVShape, fused: FusedLayers | None) -> Tensor:
    ids = [(7 * i + 3) % policy.head.out_features for i in range(10)]
    tensor = partial(torch.tensor, device=policy.device)
    with Runner(policy, KVCache(shape, 1, 16, policy.device), fused) as runner:
        read = runner.read([(ids[:-1], 0, [1])])
        decoded = runner.decode(tensor(ids[-1:]), tensor([len(ids) - 1]), tensor([[1]]))
    return torch.cat([read, decoded]).float()


def looks_like_llama(backbone: nn.Module) -> bool:
    names = {"embed_tokens", "layers", "norm", "rotary_emb"}
    silu = getattr(backbone.config, "hidden_act", None) in ("silu", "swish")
    return silu and names == _children(backbone) and all(_is_known_layer(layer) for layer in backbone.layers)


def _is_known_layer(layer: nn.Module) -> bool:
    if _children(layer) != LAYER:
        return False
    heads_normed = _children(layer.self_attn) == ATTENTION | HEAD_NORMS
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [layer.self_attn.q_norm, layer.self_attn.k_norm] if heads_normed else []
    return (
        (heads_normed or _children(layer.self_attn) == ATTENTION)
        and _children(layer.mlp) == MLP
        and all(hasattr(norm, "variance_epsilon") and norm.weight.ndim == 1 for norm in norms)
    )


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}
