"""The tensors of a model under the names that Hugging Face's files have, one group after another.

Most are stored as they are. Kinds of models that are stored in another form (Mixtral's experts) are turned back layer
by layer, as Hugging Face does. Of a model that is split, every process must ask for the same tensors in the same order.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.distributed.fsdp import split_again, whole
from trimtab.distributed.weight_transfer import TensorSpec, tensor_specs
from trimtab.models.policy import Policy
from trimtab.models.reward import HEAD, renamed

Group = tuple[list[str], dict[str, Tensor]]
"""Names of tensors that are turned back together, and what becomes of them: on meta, in the order of the file."""


class HFWeights:
    def __init__(self, model: nn.Module, *, bf16: bool, head: str = HEAD):
        """`head`: what a score head is to be called."""
        self.model, self.bf16, self.head = model, bf16, head
        self.state = self.tensors()

    def tensors(self) -> dict[str, Tensor]:
        """What is stored: each tensor once, and nothing that the model says is not stored."""
        tied = [
            target
            for target, source in self.model.all_tied_weights_keys.items()
            if self.model.get_parameter(target) is self.model.get_parameter(source)
        ]
        left_out = {*tied, *(self.model._keys_to_ignore_on_save or ())}
        return {name: tensor for name, tensor in self.model.state_dict().items() if name not in left_out}

    def groups(self) -> Iterator[Group]:
        for names in self._groups():
            shapes = {name: self.state[name] for name in names}
            hollow = {name: torch.empty(t.shape, dtype=self.dtype(t), device="meta") for name, t in shapes.items()}
            yield names, self.to_hf(hollow)

    def gathered(self, name: str) -> Tensor:
        tensor = whole(self.state[name])
        return tensor.to(self.dtype(tensor))

    def dtype(self, tensor: Tensor) -> torch.dtype:
        return torch.bfloat16 if self.bf16 and tensor.is_floating_point() else tensor.dtype

    def to_hf(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return {renamed(name, HEAD, self.head): t for name, t in revert_weight_conversion(self.model, tensors).items()}

    def _groups(self) -> list[list[str]]:
        if not self._is_converted():
            return [[name] for name in self.state]
        groups: dict[str, list[str]] = {}
        for name in self.state:
            layer = re.match(r".*?\.\d+\.", name)
            groups.setdefault(layer[0] if layer else name, []).append(name)
        return list(groups.values())

    def _is_converted(self) -> bool:
        """Whether turning back makes other tensors, and not only other names."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        conversions = getattr(self.model, "_weight_conversions", None)
        if conversions is None:
            conversions = get_model_conversion_mapping(self.model, add_legacy=False)
        return any(isinstance(conversion, WeightConverter) for conversion in conversions)


# ---- A policy's weights as another engine takes them: under the names of Hugging Face files, tensor after tensor.
# whole every parameter, frozen ones too; a head that is tied comes once, as the embedding merged the same of a
# policy with adapters, each added to what it adapts adapters the adapters alone, as PEFT names them, for an
# engine that holds the model under them Of a split policy each tensor is gathered when its turn comes and let go
# when the next one's does; no process holds all.


ADAPTER = "default"  # PEFT's name of the only one


class WeightExport:
    def __init__(self, policy: Policy, *, bf16: bool, adapters: bool = False):
        """`adapters`: hand over these alone, instead of merged into the rest."""
        self.policy, self.bf16 = policy, bf16
        self.adapted = hasattr(policy.model, "peft_config")
        self.adapters = adapters and self.adapted
        # Of a policy that is gathered the parameters are other objects, and perhaps old ones.
        split_again(policy)
        if self.adapters:
            return
        self.stored = (MergedWeights if self.adapted else HFWeights)(policy.inner, bf16=bf16)
        self._groups = list(self.stored.groups())

    def described(self) -> list[TensorSpec]:
        """Names, types and shapes, in the order in which they come."""
        if self.adapters:
            named = self._adapters().items()
            return tensor_specs((name, torch.empty(t.shape, dtype=self._dtype(t), device="meta")) for name, t in named)
        return tensor_specs((name, tensor) for _, after in self._groups for name, tensor in after.items())

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every process must take them all."""
        split_again(self.policy)
        if self.adapters:
            for name, tensor in self._adapters().items():
                yield name, whole(tensor).to(self._dtype(tensor))
            return
        self.stored.state = self.stored.tensors()
        for names, after in self._groups:
            gathered = {name: self.stored.gathered(name) for name in names}
            if len(names) > 1 or len(after) > 1:
                gathered = self.stored.to_hf(gathered)
            else:
                gathered = dict(zip(after, gathered.values()))
            for name in after:
                yield name, gathered.pop(name)

    def adapter_config(self) -> dict[str, Any]:
        """What PEFT writes beside adapters, in plain values."""
        config = self.policy.model.peft_config[ADAPTER].to_dict()
        return json.loads(json.dumps(config, default=lambda v: sorted(v) if isinstance(v, set) else str(v)))

    def _adapters(self) -> dict[str, Tensor]:
        named = self.policy.inner.named_parameters()
        return {f"base_model.model.{_as_stored(name)}": tensor for name, tensor in named if ".lora_" in name}

    def _dtype(self, tensor: Tensor) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else tensor.dtype


class MergedWeights(HFWeights):
    """Of a model with adapters inside: what it would be without them if it answered the same."""

    def tensors(self) -> dict[str, Tensor]:
        self._layers: dict[str, nn.Module] = {}
        found: dict[str, Tensor] = {}
        for name, tensor in self.model.named_parameters():  # a tied one once
            if ".lora_" in name:
                continue
            plain = name.replace(".base_layer.", ".")
            if plain != name and name.endswith(".weight"):
                self._layers[plain] = self.model.get_submodule(name.removesuffix(".base_layer.weight"))
            found[plain] = tensor
        return found

    def gathered(self, name: str) -> Tensor:
        tensor = super().gathered(name)
        layer = self._layers.get(name)
        if layer is None:
            return tensor
        merged = tensor.float() + self._added(layer).to(tensor.device)
        return merged.to(tensor.dtype)

    def _added(self, layer: Any) -> Tensor:
        """By the adapter, in fp32: scale x B A."""
        if ADAPTER in layer.lora_embedding_A:
            down, up, turned = layer.lora_embedding_A[ADAPTER], layer.lora_embedding_B[ADAPTER], True
        else:
            down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            turned = getattr(layer, "fan_in_fan_out", False)
        down, up = (whole(t).to(self.dtype(t)).float() for t in (down, up))
        added = layer.scaling[ADAPTER] * (up @ down)
        return added.T if turned else added


def _as_stored(name: str) -> str:
    return name.replace(f".{ADAPTER}.", ".").removesuffix(f".{ADAPTER}")
