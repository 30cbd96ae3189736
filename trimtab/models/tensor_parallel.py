"""Cut the layers of a model over processes, by the table of families: each does a part of every layer's arithmetic.

All parameters become DTensors on the mesh's tensor dimension, those that are not cut too, so that splitting, filling,
saving and norms know where everything is. Works on a skeleton and on weights, with adapters inside, before the model is
split by FSDP2.
"""

import logging
from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from trimtab.distributed.blocks import blocks_of
from trimtab.errors import UserError
from trimtab.models.cut_layers import (
    Branching,
    DropoutOfPart,
    Embedding,
    Experts,
    Head,
    Inputs,
    Keys,
    Local,
    OfHeads,
    Outputs,
    SomeRows,
)
from trimtab.models.families import (
    EXPERTS,
    FAMILIES,
    INPUTS,
    KEYS,
    OF_HEADS,
    OUTPUTS,
    Way,
    check_can_be_cut,
    keys_used,
    way_of,
)
from trimtab.models.packed import PackedModel

WHOLE, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)
GATE_AND_UP = _StridedShard(1, split_factor=2)  # one above the other in every expert, and each is cut
INNER = Shard(2)


def cut(root: PackedModel, mesh: DeviceMesh) -> None:
    """Of a root module, everything; `mesh`: of the processes that share every layer."""
    if root.path != "packed":
        raise UserError(
            f"--ds_tensor_parallel_size: {type(root.inner).__name__} is run by its own attention here, and so cannot "
            "be cut; leave it out"
        )
    check_can_be_cut(root.config, mesh.size(), "--ds_tensor_parallel_size")
    # Whoever gathers such a tensor is told that it takes two exchanges.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    _Knife(root, mesh).cut()


class _Knife:
    def __init__(self, root: PackedModel, mesh: DeviceMesh):
        self.root, self.mesh, self.group = root, mesh, mesh.get_group()
        self.ways = FAMILIES[root.config.model_type]
        self._placed: dict[int, nn.Parameter] = {}  # a tied parameter stays one
        self._done: set[nn.Module] = set()
        self._kept: list[Tensor] = []  # as long as they live no other has their ids

    def cut(self) -> None:
        inner = self.root.inner
        for module, way in list(self._named()):
            base = module.base_layer if hasattr(module, "base_layer") else module
            assert isinstance(base, nn.Module)
            self._layer(base, way)
            if base is not module:
                self._adapters(module, base, way)
        embedding, head = inner.get_input_embeddings(), inner.get_output_embeddings()
        self._place(embedding, weight=ROWS)
        Embedding(embedding, self.group)
        if head is not None:
            self._place(head, weight=ROWS, bias=ROWS)
            Head(head, self.group)
        for module in list(self.root.modules()):
            if module not in self._done and module._parameters:
                self._place(module, **dict.fromkeys(module._parameters, WHOLE))
                Local(module, self.group)

    def _named(self) -> Iterator[tuple[nn.Module, Way]]:
        for name, module in self.root.named_modules():
            if way := way_of(name, self.ways):
                yield module, way

    def _layer(self, module: nn.Module, way: Way) -> None:
        if way == OUTPUTS or (way == KEYS and self._keys_divide):
            self._place(module, weight=ROWS, bias=ROWS)
            Outputs(module, self.group)
        elif way == KEYS:
            self._place(module, weight=WHOLE, bias=WHOLE)
            Keys(module, self.group, self._key_rows(module))
        elif way == INPUTS:
            self._place(module, weight=COLUMNS, bias=WHOLE)
            Inputs(module, self.group)
        elif way == OF_HEADS:
            self._place(module, weight=WHOLE)
            OfHeads(module, self.group)
        else:
            assert way == EXPERTS
            self._place(module, gate_up_proj=GATE_AND_UP, down_proj=INNER)
            Experts(module, self.group)

    def _adapters(self, layer: nn.Module, base: nn.Module, way: Way) -> None:
        """Low-rank ones, so that only [tokens, rank] is exchanged for them."""
        for name, first in layer.lora_A.items():
            second, dropout = layer.lora_B[name], layer.lora_dropout[name]
            if way == INPUTS:
                self._place(first, weight=COLUMNS)
                self._place(second, weight=WHOLE)
                Inputs(first, self.group)
                Local(second, self.group)
                if isinstance(dropout, nn.Dropout):
                    (block,) = blocks_of(first.weight)
                    layer.lora_dropout[name] = DropoutOfPart(dropout.p, first.weight.shape[1], block.slices[1])
                continue
            self._place(first, weight=WHOLE)
            Branching(first, self.group)
            if way == OUTPUTS or self._keys_divide:
                self._place(second, weight=ROWS)
                Local(second, self.group)
            else:
                self._place(second, weight=WHOLE)
                SomeRows(second, self.group, self._key_rows(base))

    @property
    def _keys_divide(self) -> bool:
        return self.root.config.num_key_value_heads % self.mesh.size() == 0

    def _key_rows(self, module: nn.Module) -> list[int]:
        """The outputs of a layer of keys that belong to the heads that are used here."""
        config = self.root.config
        heads, keys = config.num_attention_heads, config.num_key_value_heads
        width = module.weight.shape[0] // keys
        used = keys_used(heads, keys, self.mesh.size(), self.mesh.get_local_rank())
        return [row for key in used for row in range(key * width, (key + 1) * width)]

    def _place(self, module: nn.Module, **placements: Placement) -> None:
        self._done.add(module)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in self._placed:
                placed = distribute_tensor(parameter.data, self.mesh, [placements[name]], src_data_rank=None)
                self._placed[id(parameter)] = nn.Parameter(placed, parameter.requires_grad)
                self._kept.append(parameter)
            module._parameters[name] = self._placed[id(parameter)]
