"""A model's weights under the names of Hugging Face's files, one tensor after another, to save or send them.

    HFWeights       every tensor once; a tied head is left out
    MergedWeights   the weights of a model with adapters, merged
    AdapterWeights  only the adapters under PEFT's names, for an engine that has the base model

Most tensors are stored as they are. Families with another storage format (Mixtral's experts) are converted back layer
by layer, like Hugging Face does. Each tensor of a sharded model is gathered in its turn and freed before the next; no
process holds all. All processes must read the same tensors in the same order.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.distributed.fsdp import reshard_model, whole
from trimtab.distributed.weight_transfer import TensorSpec, tensor_specs
from trimtab.models.policy import Policy
from trimtab.models.reward import HEAD, renamed

Group = tuple[list[str], dict[str, Tensor]]
"""Names of tensors that are converted together, and the results as fake tensors in the order of the file."""
ADAPTER = "default"  # PEFT's name of the only adapter


class HFWeights:
    """The weights of a model in Hugging Face's storage format."""

    def __init__(self, model: nn.Module, *, bf16: bool, head: str = HEAD):
        """`head`: the name of a score head in the files."""
        self.model, self.bf16, self.head = model, bf16, head
        self.state = self.state_dict()
        self.groups = list(self._groups())

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors to store: each once, without those that the model excludes from saving."""
        tied = [
            target
            for target, source in self.model.all_tied_weights_keys.items()
            if self.model.get_parameter(target) is self.model.get_parameter(source)
        ]
        left_out = {*tied, *(self.model._keys_to_ignore_on_save or ())}
        return {name: tensor for name, tensor in self.model.state_dict().items() if name not in left_out}

    def gathered(self, name: str) -> Tensor:
        tensor = whole(self.state[name])
        return tensor.to(self.dtype(tensor))

    def dtype(self, tensor: Tensor) -> torch.dtype:
        return torch.bfloat16 if self.bf16 and tensor.is_floating_point() else tensor.dtype

    def read(self, group: Group, take: Callable[[Tensor], Tensor | None] = lambda tensor: tensor) -> dict[str, Tensor]:
        """Gather a group and convert it. `take` maps each gathered tensor to the one to keep; None drops it."""
        names, after = group
        kept = {name: tensor for name in names if (tensor := take(self.gathered(name))) is not None}
        if len(kept) < len(names):
            return {}
        return dict(zip(after, kept.values())) if len(names) == len(after) == 1 else self.to_hf(kept)

    def to_hf(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return {renamed(name, HEAD, self.head): t for name, t in revert_weight_conversion(self.model, tensors).items()}

    def _groups(self) -> Iterator[Group]:
        converted, groups = self._is_converted(), dict[str, list[str]]()
        for name in self.state:
            layer = re.match(r".*?\.\d+\.", name) if converted else None
            groups.setdefault(layer[0] if layer else name, []).append(name)
        for names in groups.values():
            shapes = {name: self.state[name] for name in names}
            fake = {name: torch.empty(t.shape, dtype=self.dtype(t), device="meta") for name, t in shapes.items()}
            yield names, self.to_hf(fake)

    def _is_converted(self) -> bool:
        """Whether stored tensors differ from the model's in more than their names."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        conversions = getattr(self.model, "_weight_conversions", None)
        if conversions is None:
            conversions = get_model_conversion_mapping(self.model, add_legacy=False)
        return any(isinstance(conversion, WeightConverter) for conversion in conversions)


class MergedWeights(HFWeights):
    """The weights of a model with adapters, merged into an equivalent model without them."""

    def state_dict(self) -> dict[str, Tensor]:
        self._layers: dict[str, nn.Module] = {}
        found: dict[str, Tensor] = {}
        for name, tensor in self.model.named_parameters():  # tied ones once
            if ".lora_" in name:
                continue
            plain = name.replace(".base_layer.", ".")
            if plain != name and name.endswith(".weight"):
                self._layers[plain] = self.model.get_submodule(name.removesuffix(".base_layer.weight"))
            found[plain] = tensor
        return found

    def gathered(self, name: str) -> Tensor:
        tensor = super().gathered(name)
        layer: Any = self._layers.get(name)
        if layer is None:
            return tensor
        if ADAPTER in layer.lora_embedding_A:
            down, up, transposed = layer.lora_embedding_A[ADAPTER], layer.lora_embedding_B[ADAPTER], True
        else:
            down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            transposed = getattr(layer, "fan_in_fan_out", False)
        down, up = (whole(t).to(self.dtype(t)).float() for t in (down, up))
        added = layer.scaling[ADAPTER] * (up @ down)
        merged = tensor.float() + (added.T if transposed else added).to(tensor.device)
        return merged.to(tensor.dtype)


class AdapterWeights(HFWeights):
    """Only the adapters of a model, under PEFT's names."""

    def state_dict(self) -> dict[str, Tensor]:
        named = {name: t for name, t in self.model.named_parameters() if ".lora_" in name}
        plain = (name.replace(f".{ADAPTER}.", ".").removesuffix(f".{ADAPTER}") for name in named)
        return dict(zip((f"base_model.model.{name}" for name in plain), named.values()))

    def to_hf(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors

    def _is_converted(self) -> bool:
        return False


class WeightExport:
    """A policy's weights for another engine."""

    def __init__(self, policy: Policy, *, bf16: bool, adapters: bool = False):
        """`adapters`: send only the adapters, not merged weights."""
        self.policy = policy
        adapted = hasattr(policy.model, "peft_config")
        self.adapters = adapters and adapted
        # While a policy is gathered its parameters are other objects, and may be outdated.
        reshard_model(policy)
        kind = AdapterWeights if self.adapters else MergedWeights if adapted else HFWeights
        self.stored = kind(policy.inner, bf16=bf16)

    def described(self) -> list[TensorSpec]:
        """Names, dtypes and shapes in the order of `tensors`."""
        return tensor_specs((name, tensor) for _, after in self.stored.groups for name, tensor in after.items())

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors in order. Every process must consume all of them."""
        reshard_model(self.policy)
        self.stored.state = self.stored.state_dict()
        for group in self.stored.groups:
            found = self.stored.read(group)
            for name in group[1]:
                yield name, found.pop(name)

    def adapter_config(self) -> dict[str, Any]:
        """The content of PEFT's adapter_config.json, as plain values."""
        config = self.policy.model.peft_config[ADAPTER].to_dict()
        return json.loads(json.dumps(config, default=lambda v: sorted(v) if isinstance(v, set) else str(v)))
