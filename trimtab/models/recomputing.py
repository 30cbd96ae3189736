"""Gradient checkpointing: layers that compute again in the backward pass what their forward pass did not keep.

A layer that recomputes keeps its input, and of what it computes what is asked for:

    nothing    everything is computed again
    attention  not what attention's kernel gave
    products   not what attention's kernel and the matrix products gave: norms, rotations and activations only

Gradients are the same, bit for bit. Attention that runs without a kernel of its own (with a soft cap, say) is made of
products.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from trimtab.config.groups import BackwardOptions
from trimtab.errors import UserError
from trimtab.models.packed import PackedModel

ATTENTION = (
    "_flash_attention_forward",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")


def recompute(module: PackedModel, options: BackwardOptions) -> None:
    """As the options say; without --gradient_checkpointing nothing."""
    if not options.gradient_checkpointing:
        return
    reentrant = options.gradient_checkpointing_use_reentrant
    arguments: dict[str, Any] = {"use_reentrant": reentrant}
    if options.gradient_checkpointing_keep != "nothing":
        kept = _operators(ATTENTION)
        if options.gradient_checkpointing_keep == "products":
            kept |= _operators(PRODUCTS)
        arguments["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_policy, kept))
    module.inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
    if reentrant:
        module.inner.enable_input_require_grads()  # a frozen embedding would cut the reentrant graph
    number = options.gradient_checkpointing_layers
    if isinstance(number, int):  # auto, where nobody has planned: all
        spread(module.inner, number)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of a Hugging Face model, split over processes or not."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]


def spread(model: nn.Module, number: int) -> None:
    """Have so many of the layers recompute; all were asked to."""
    layers = layers_of(model)
    if number > len(layers):
        name = type(model).__name__
        raise UserError(f"--gradient_checkpointing_layers {number}: {name} has {len(layers)} layers; ask for fewer")
    for place, layer in enumerate(layers):
        layer.gradient_checkpointing = (place + 1) * number // len(layers) > place * number // len(layers)


def _policy(kept: set[Any], _: Any, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE


def _operators(names: tuple[str, ...]) -> set[Any]:
    return {getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name)}
