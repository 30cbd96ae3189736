"""Fused layers of Llama-like models (Llama, Mistral, Qwen2, Qwen3): few launches, using the modules' weights.

model_runner.py decides which models have them. Linear layers with LoRA and with int8 weights have their own kernels;
other projections are called as modules.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from trimtab.models.fused_layer import LoraLinear, apply_experts, apply_linear, head_norms, is_mixture, lora_linear
from trimtab.models.precompile import is_noting
from trimtab.models.pretrained import first_line
from trimtab.rollout.builtin.kv_cache import KVCache
from trimtab.rollout.builtin.linear import int8_weights

logger = logging.getLogger(__name__)

ROWS_OF_JOINED_PRODUCTS = 1024  # above, each product alone fills the device
CONSTANT = {"default", "linear", "llama3", "yarn"}  # rope types that do not depend on the sequence's length

Angles: TypeAlias = tuple[Tensor, Tensor]


class FusedLayers:
    """The decoder layers of one model."""

    def __init__(self, backbone: nn.Module, arguments: list[dict], exact: bool = False):
        """`arguments`: of each layer's attention call; `exact`: results do not depend on the number of rows, as those
        of the trainer's fused layers."""
        self.backbone, self.arguments, self.exact = backbone, arguments, exact
        self.all: Sequence[int] = range(len(backbone.layers))
        self.failed = False

    @contextlib.contextmanager
    def one_of_each_kind(self) -> Iterator[None]:
        """Inside, layers that need the same kernels as an earlier one are left out."""
        kinds: dict[tuple, int] = {}
        for index, layer in enumerate(self.backbone.layers):
            kinds.setdefault((type(layer.mlp), *self.arguments[index].values()), index)
        whole, self.all = self.all, list(kinds.values())
        try:
            yield
        finally:
            self.all = whole

    def give_up_after(self, error: Exception) -> bool:
        """Whether a kernel failed to compile or launch. If so, the modules are used from now on, unless results are
        promised to be those of these kernels (--exact)."""
        from triton import TritonError

        if isinstance(error, TritonError) and not self.exact and not is_noting():
            logger.warning("the model's layers are no longer fused and generate more slowly: %s", first_line(error))
            self.failed = True
        return self.failed

    @property
    def device(self) -> torch.device:
        return self.embedding_VD.device

    @property
    def embedding_VD(self) -> Tensor:
        return self.backbone.embed_tokens.weight

    def angles(self, positions_T: Tensor) -> Angles:
        """Cosines and sines of these positions [T, W]."""
        like = self.embedding_VD[:1, None]
        cos, sin = self.backbone.rotary_emb(like, position_ids=positions_T[None])
        return cos[0].contiguous(), sin[0].contiguous()

    def all_angles(self, positions: int) -> Angles | None:
        """Cosines and sines of the first positions; None if they depend on the pass."""
        embedding = self.backbone.embed_tokens
        if type(embedding) is not nn.Embedding or getattr(self.backbone.rotary_emb, "rope_type", None) not in CONSTANT:
            return None
        return self.angles(torch.arange(positions, device=embedding.weight.device))

    def hidden(self, ids_T: Tensor, positions_T: Tensor, cache: KVCache, slot_mapping_T: Tensor, attend) -> Tensor:
        """Last hidden states [T, D]; `attend(layer, query, key, value, arguments)` is called after keys and values are
        stored."""
        stream = self.backbone.embed_tokens(ids_T)
        return self.run_layers(self.all, stream, self.angles(positions_T), cache, slot_mapping_T, attend)

    def run_layers(
        self, layers: Sequence[int], stream: Tensor, angles: Angles, cache: KVCache, slot_mapping_T: Tensor, attend
    ) -> Tensor:
        """Run these layers on the residual stream [T, D], in place; returns it normed."""
        from trimtab.models.layer_kernels import fused_add_rms_norm

        backbone = self.backbone
        new = None
        for index in layers:
            layer = backbone.layers[index]
            attention, norm = layer.self_attn, layer.input_layernorm
            x = fused_add_rms_norm(new, stream, norm.weight, norm.variance_epsilon)
            heads = qkv_rope(attention, x, angles, cache.keys[index], cache.values[index], slot_mapping_T)
            mixed = attend(index, *heads, self.arguments[index])
            norm = layer.post_attention_layernorm
            new = linear_partials(attention.o_proj, mixed.flatten(1), exact=self.exact)
            x = fused_add_rms_norm(new, stream, norm.weight, norm.variance_epsilon)
            new = self.run_mlp(layer.mlp, x)
        return fused_add_rms_norm(new, stream, backbone.norm.weight, backbone.norm.variance_epsilon)

    def run_mlp(self, mlp: nn.Module, x_TD: Tensor) -> Tensor:
        """The MLP's output [T, D], or parts of it."""
        if is_mixture(mlp):
            return apply_experts(mlp, x_TD)
        return linear_partials(mlp.down_proj, gate_up(mlp, x_TD), exact=self.exact)


def qkv_rope(
    attention: nn.Module, x_TD: Tensor, angles: Angles, keys: Tensor, values: Tensor, slot_mapping_T: Tensor
) -> tuple[Tensor, ...]:
    """Query, key and value [T, heads, W] with rotary positions; stores keys and values in their pages."""
    from trimtab.models.layer_kernels import rope_and_cache
    from trimtab.rollout.builtin.kernels.fused_linear import few_rows_heads_apply, small_batch_qkv_rope

    modules = [attention.q_proj, attention.k_proj, attention.v_proj]
    width = angles[0].shape[1]
    if few_rows_heads_apply(x_TD, modules, width) and not hasattr(attention, "q_norm"):
        made = small_batch_qkv_rope(x_TD, modules, angles, keys, values, slot_mapping_T, head_norms(attention))
        parts = made.split([module.out_features for module in modules], 1)
        return tuple(part.unflatten(1, (-1, width)) for part in parts)
    query, key, value = (part.unflatten(1, (-1, width)) for part in _projections(attention, x_TD))
    rope_and_cache(query, key, value, *angles, keys, values, slot_mapping_T, head_norms(attention))
    return query, key, value


def _projections(attention: nn.Module, x_TD: Tensor) -> tuple[Tensor, ...]:
    from trimtab.rollout.builtin.kernels.fused_linear import (
        can_join,
        few_rows_apply,
        merged_linear,
        small_batch_linears,
    )
    from trimtab.rollout.builtin.kernels.int8_linear import can_multiply, int8_product
    from trimtab.rollout.builtin.kernels.lora_linear import lora_product

    modules = [attention.q_proj, attention.k_proj, attention.v_proj]
    weights = int8_weights(modules)
    if weights is not None and can_multiply(x_TD, weights):
        joined = int8_product(x_TD, weights)
    elif (layers := _described(modules, x_TD)) is not None:
        joined = lora_product(x_TD, layers)
    elif few_rows_apply(x_TD, modules):
        return tuple(small_batch_linears(x_TD, modules))
    elif len(x_TD) <= ROWS_OF_JOINED_PRODUCTS and can_join(x_TD, modules):
        joined = merged_linear(x_TD, modules)
    else:
        return tuple(apply_linear(module, x_TD) for module in modules)
    return joined.split([module.out_features for module in modules], 1)


def linear_partials(module: nn.Module, x_TD: Tensor, *, exact: bool) -> Tensor:
    """The output of a linear module [T, D], or parts that sum to it [parts, T, D]; `exact`: in one part."""
    from trimtab.rollout.builtin.kernels.fused_linear import few_rows_apply, small_batch_split_k
    from trimtab.rollout.builtin.kernels.int8_linear import can_multiply, int8_product
    from trimtab.rollout.builtin.kernels.lora_linear import lora_product

    if few_rows_apply(x_TD, [module]) and module.bias is None:
        return small_batch_split_k(x_TD, module, exact=exact)
    weights = int8_weights([module])
    if weights is not None and can_multiply(x_TD, weights):
        return int8_product(x_TD, weights, parts=True)
    if (layers := _described([module], x_TD)) is not None:
        return lora_product(x_TD, layers, parts=True, exact=exact)
    return apply_linear(module, x_TD)


def gate_up(mlp: nn.Module, x_TD: Tensor) -> Tensor:
    from trimtab.models.layer_kernels import gated
    from trimtab.rollout.builtin.kernels.fused_linear import can_join, few_rows_apply, gated_linear, small_batch_gate_up
    from trimtab.rollout.builtin.kernels.int8_linear import can_multiply, int8_gated
    from trimtab.rollout.builtin.kernels.lora_linear import lora_gated

    modules = [mlp.gate_proj, mlp.up_proj]
    if few_rows_apply(x_TD, modules) and modules[0].bias is None:
        return small_batch_gate_up(x_TD, *modules)
    weights = int8_weights(modules)
    if weights is not None and weights[0].bias_O is None and can_multiply(x_TD, weights):
        return int8_gated(x_TD, *weights)
    if (layers := _described(modules, x_TD)) is not None and layers[0].bias_O is None:
        return lora_gated(x_TD, *layers)
    if len(x_TD) <= ROWS_OF_JOINED_PRODUCTS and can_join(x_TD, modules) and modules[0].bias is None:
        return gated_linear(x_TD, *modules)
    return gated(*(apply_linear(module, x_TD) for module in modules))


def _described(modules: list[nn.Module], x_TD: Tensor) -> list[LoraLinear] | None:
    """The layers for the LoRA kernels, if these apply. Without adapters, only if they are faster."""
    from trimtab.rollout.builtin.kernels.lora_linear import is_wide, lora_applies

    layers = [layer for module in modules if (layer := lora_linear(module)) is not None]
    if len(layers) < len(modules) or not lora_applies(x_TD, layers):
        return None
    plain = all(type(module) is nn.Linear for module in modules)
    return layers if not plain or is_wide(x_TD, layers) else None
