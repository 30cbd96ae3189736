"""A skeleton as narrow as what one process of a tensor-split model works with, by the table of families: its heads, its
part of the feed-forward width, of every expert's and of the vocabulary. The residual stream keeps its width."""

import torch
from torch import nn

from trimtab.models.families import EXPERTS, FAMILIES, INPUTS, KEYS, OF_HEADS, check_can_be_cut, keys_used, way_of
from trimtab.models.packed import PackedModel


def narrow(model: PackedModel, parts: int) -> None:
    """In place, and only the shapes: contents there are none. A UserError: it cannot be cut so."""
    config = model.config
    check_can_be_cut(config, parts, f"--ds_tensor_parallel_size {parts}")
    ways, made = FAMILIES[config.model_type], _Narrower(parts)
    for name, module in list(model.named_modules()):
        way = way_of(name, ways)
        if way is None or way == OF_HEADS:
            continue
        base = getattr(module, "base_layer", module)
        if way == EXPERTS:
            made.cut(base, "gate_up_proj", 1)
            made.cut(base, "down_proj", 2)
            continue
        # Heads of keys that cannot be shared out are whole in every process, which uses some of them.
        heads, keys = config.num_attention_heads, config.num_key_value_heads
        used = len(keys_used(heads, keys, parts, 0)) / keys if way == KEYS else None
        made.linear(base, 1 if way == INPUTS else 0, used)
        for first in getattr(module, "lora_A", {}).values():
            if way == INPUTS:
                made.linear(first, 1)
        for second in getattr(module, "lora_B", {}).values():
            if way != INPUTS:
                made.linear(second, 0, used)
    embedding, head = model.inner.get_input_embeddings(), model.inner.get_output_embeddings()
    made.cut(embedding, "weight", 0)
    if head is not None:
        made.linear(head, 0)


class _Narrower:
    def __init__(self, parts: int):
        self.parts = parts
        self._made: dict[int, nn.Parameter] = {}  # tied ones stay tied

    def linear(self, module: nn.Module, dimension: int, share: float | None = None) -> None:
        self.cut(module, "weight", dimension, share)
        if dimension == 0 and module._parameters.get("bias") is not None:
            self.cut(module, "bias", 0, share)
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape

    def cut(self, module: nn.Module, name: str, dimension: int, share: float | None = None) -> None:
        """`share`: of a dimension, if it is not one of the parts."""
        parameter = module._parameters[name]
        assert parameter is not None
        if id(parameter) not in self._made:
            shape = list(parameter.shape)
            size = shape[dimension]
            shape[dimension] = -(-size // self.parts) if share is None else round(size * share)
            empty = torch.empty(shape, dtype=parameter.dtype, device="meta")
            self._made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        module._parameters[name] = self._made[id(parameter)]
