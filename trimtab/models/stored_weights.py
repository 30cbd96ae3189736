"""The tensors of a model under the names that Hugging Face's files have, one group after another.

Most are stored as they are. Kinds of models that are stored in another form (Mixtral's experts) are turned back layer
by layer, as Hugging Face does. Of a model that is split, every process must ask for the same tensors in the same order.
"""

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from trimtab.distributed.sharding import whole
from trimtab.models.reward import HEAD, renamed

Group = tuple[list[str], dict[str, Tensor]]
"""Names of tensors that are turned back together, and what becomes of them: on meta, in the order of the file."""


class StoredWeights:
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
            yield names, self.turned_back(hollow)

    def gathered(self, name: str) -> Tensor:
        tensor = whole(self.state[name])
        return tensor.to(self.dtype(tensor))

    def dtype(self, tensor: Tensor) -> torch.dtype:
        return torch.bfloat16 if self.bf16 and tensor.is_floating_point() else tensor.dtype

    def turned_back(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
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
