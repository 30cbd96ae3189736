"""Tensor parallelism: each process of a group does a part of every layer's arithmetic.

A module keeps its class, its name and its code. While it works its parameters are this process's parts; collectives of
the group (distributed/collectives) copy what comes in and reduce or gather what goes out. So a model's own code runs,
in parts. A table of model families says which layer is split in which style, by the layers' names:

    ColwiseLinear    a linear layer split by its outputs
    RowwiseLinear    one split by its inputs: each process reads the outputs that it has, and the results are summed
    KeyValueLinear   as ColwiseLinear where every process gets as many heads of keys; else replicated, and each process
                     computes the heads that its queries read
    PerHead          a small layer that every process has whole and uses on its own heads
    ParallelExperts  a stack of experts, each of which is split: its first matrices by outputs, its last by inputs

What is not named is replicated and works alike in every process: norms, routers, score heads. The embedding and the
output head are found by Hugging Face's names and split by vocabulary. A family that is not in the table may join two
layers in one matrix, or normalise over all heads at once: look at its code before adding it here.

All parameters become DTensors on the mesh's tensor dimension, replicated ones too, so that sharding, loading, saving
and norms know where everything is. Works with weights and without, with adapters inside, before FSDP2 shards the model.
"""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from trimtab.distributed.collectives import all_gather, group_copy, group_gather, group_reduce
from trimtab.distributed.fsdp import blocks_of, local
from trimtab.errors import UserError

if TYPE_CHECKING:
    from trimtab.models.packed import PackedModel

Arguments = tuple[Any, ...]
ROWS, COLUMNS = Shard(0), Shard(1)


@dataclass(frozen=True)
class VocabShard:
    """The words of the vocabulary that this process has of a split embedding or output head."""

    first: int
    count: int
    widths: list[int]  # how many each process has, in rank order
    group: ProcessGroup

    @classmethod
    def of(cls, weight: Tensor) -> "VocabShard | None":
        """By the rows of a matrix [vocabulary, D] that lie here. None: all of them do."""
        if not isinstance(weight, DTensor):
            return None
        assert weight.device_mesh.ndim == 1, "read while it is gathered but for the tensor dimension"
        words, parts, part = weight.shape[0], weight.device_mesh.size(), weight.device_mesh.get_local_rank()
        most = -(-words // parts)
        widths = [min(most, words - place * most) for place in range(parts)]
        assert weight.to_local().shape[0] == widths[part]
        return cls(part * most, widths[part], widths, weight.device_mesh.get_group())

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The place of each id among the words that are here, and whether it is one of them (else the place is any)."""
        places = ids - self.first
        return places.clamp(0, self.count - 1), (places >= 0) & (places < self.count)


# ---- styles: how a module works on this process's parts of its parameters


class LocalParameters:
    """On what is here: of a replicated module all of it, in every process alike."""

    placements: ClassVar[dict[str, Placement]] = {}  # of parameters; the others are replicated

    def __init__(self, module: nn.Module, group: ProcessGroup):
        self.group = group
        self._parameters: dict[str, nn.Parameter | None] = {}
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after, always_call=True)

    def part(self, name: str, parameter: Tensor) -> Tensor | None:
        return local(parameter)

    def parts(self, module: nn.Module) -> dict[str, Tensor | None]:
        """The module's parameters while it works."""
        return {name: p if p is None else self.part(name, p) for name, p in module._parameters.items()}

    def of_whole_rows(self, largest_O: Tensor) -> Tensor:
        """From the largest value in a part of each row of the weight to the largest in all of it."""
        return largest_O

    def enter(self, *arguments: Any) -> Arguments:
        return arguments

    def leave(self, result: Tensor) -> Tensor:
        return result

    def _before(self, module: nn.Module, arguments: Arguments) -> Arguments:
        arguments = self.enter(*arguments)
        self._parameters = dict(module._parameters)
        module._parameters.update(self.parts(module))
        return arguments

    def _after(self, module: nn.Module, arguments: Arguments, result: Tensor | None) -> Tensor | None:
        module._parameters.update(self._parameters)
        result = None if result is None else self.leave(result)  # None: it failed
        self._parameters = {}
        return result


class PerHead(LocalParameters):
    """A replicated module that each process uses on its own heads, so that gradients are still to be summed."""

    def part(self, name: str, parameter: Tensor) -> Tensor | None:
        return _with_partial_gradient(parameter)


class SelectedRows(PerHead):
    """A replicated linear layer of which each process computes some outputs."""

    def __init__(self, module: nn.Module, group: ProcessGroup, rows: list[int]):
        super().__init__(module, group)
        self.rows = torch.tensor(rows, device="cpu")  # a model without weights is built on another device

    def part(self, name: str, parameter: Tensor) -> Tensor | None:
        return _with_partial_gradient(parameter).index_select(0, self.rows.to(parameter.device))


class ColwiseLinear(LocalParameters):
    placements: ClassVar[dict[str, Placement]] = {"weight": ROWS, "bias": ROWS}

    def enter(self, *arguments: Any) -> Arguments:
        return (group_copy(arguments[0], self.group), *arguments[1:])


class KeyValueLinear(ColwiseLinear, SelectedRows):
    placements: ClassVar[dict[str, Placement]] = {}


class RowwiseLinear(LocalParameters):
    """A bias is added once, to the sum."""

    placements: ClassVar[dict[str, Placement]] = {"weight": COLUMNS}

    def part(self, name: str, parameter: Tensor) -> Tensor | None:
        return None if name == "bias" else local(parameter)

    def of_whole_rows(self, largest_O: Tensor) -> Tensor:
        return all_gather(largest_O, self.group).amax(0)

    def leave(self, result: Tensor) -> Tensor:
        total, bias = group_reduce(result, self.group), self._parameters.get("bias")
        return total if bias is None else total + local(bias)


class ParallelExperts(LocalParameters):
    """Takes (tokens, the experts of each, their weights): the routing is alike in all processes, the work is split."""

    # Gate and up projections are one above the other in every expert, and each is split.
    placements: ClassVar[dict[str, Placement]] = {
        "gate_up_proj": _StridedShard(1, split_factor=2),
        "down_proj": Shard(2),
    }

    def enter(self, *arguments: Any) -> Arguments:
        hidden, chosen, weights = arguments
        return group_copy(hidden, self.group), chosen, group_copy(weights, self.group)

    def leave(self, result: Tensor) -> Tensor:
        return group_reduce(result, self.group)


class LoraDown(LocalParameters):
    """The first matrix of an adapter on a layer that is split by its outputs."""

    def leave(self, result: Tensor) -> Tensor:
        return group_copy(result, self.group)


class LoraUp(LocalParameters):
    """The second matrix of it."""

    placements: ClassVar[dict[str, Placement]] = {"weight": ROWS}


class ShardedDropout(nn.Dropout):
    """Of some columns: all processes draw the mask of all columns alike, as one would."""

    def __init__(self, p: float, width: int, columns: slice):
        super().__init__(p)
        self.width, self.columns = width, columns

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return input
        mask = nn.functional.dropout(input.new_ones(*input.shape[:-1], self.width), self.p)
        return input * mask[..., self.columns]


class VocabParallelEmbedding(LocalParameters):
    placements: ClassVar[dict[str, Placement]] = {"weight": ROWS}

    def __init__(self, module: nn.Embedding, group: ProcessGroup):
        super().__init__(module, group)
        shard = VocabShard.of(module.weight)
        assert shard is not None
        if module.padding_idx is not None:  # the row that gets no gradient
            place = module.padding_idx - shard.first
            module.padding_idx = place if 0 <= place < shard.count else None
        self.shard, self._here = shard, torch.empty(0)

    def enter(self, *arguments: Any) -> Arguments:
        places, self._here = self.shard.places(arguments[0])
        return (places,)

    def leave(self, result: Tensor) -> Tensor:
        return group_reduce(result * self._here[..., None], self.group)


class VocabParallelHead(ColwiseLinear):
    """Called as a module it gathers all logits; models/lm_head makes log-probs without them."""

    def __init__(self, module: nn.Linear, group: ProcessGroup):
        super().__init__(module, group)
        shard = VocabShard.of(module.weight)
        assert shard is not None
        self.widths = shard.widths

    def leave(self, result: Tensor) -> Tensor:
        return group_gather(result, self.group, self.widths)


def local_style(module: nn.Module) -> LocalParameters | None:
    """How a module works on its parts; None: it is not split."""
    hooks = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
    return next((style for style in hooks if isinstance(style, LocalParameters)), None)


def _with_partial_gradient(parameter: Tensor) -> Tensor:
    """All of a replicated parameter, whose gradient is only this process's share."""
    return parameter.to_local(grad_placements=[Partial()])


# ---- families

Style = type[LocalParameters]
ATTENTION: dict[str, Style] = {
    "self_attn.q_proj": ColwiseLinear,
    "self_attn.k_proj": KeyValueLinear,
    "self_attn.v_proj": KeyValueLinear,
    "self_attn.o_proj": RowwiseLinear,
}
NORMED_HEADS: dict[str, Style] = {"self_attn.q_norm": PerHead, "self_attn.k_norm": PerHead}
MLP: dict[str, Style] = {"mlp.gate_proj": ColwiseLinear, "mlp.up_proj": ColwiseLinear, "mlp.down_proj": RowwiseLinear}
SHARED_EXPERT = {name.replace("mlp.", "mlp.shared_expert."): style for name, style in MLP.items()}
MIXTURE: dict[str, Style] = {"mlp.experts": ParallelExperts}

FAMILIES: dict[str, dict[str, Style]] = {
    "llama": ATTENTION | MLP,
    "mistral": ATTENTION | MLP,
    "qwen2": ATTENTION | MLP,
    "qwen3": ATTENTION | NORMED_HEADS | MLP,
    "gemma": ATTENTION | MLP,
    "gemma2": ATTENTION | MLP,
    "gemma3_text": ATTENTION | NORMED_HEADS | MLP,
    "mixtral": ATTENTION | MIXTURE,
    "qwen2_moe": ATTENTION | MLP | MIXTURE | SHARED_EXPERT,
    "qwen3_moe": ATTENTION | NORMED_HEADS | MLP | MIXTURE,
}
"""By `model_type` in config.json. Layers that a model does not have are not looked for."""

INNER_OF_EXPERTS = ("moe_intermediate_size", "intermediate_size")


def check_tensor_parallel(config: Any, parts: int, what: str) -> None:
    """A UserError, in one line, if this model cannot be split over this many processes. `what`: which model it is."""
    styles = FAMILIES.get(config.model_type)
    if styles is None:
        known = ", ".join(FAMILIES)
        raise UserError(f"{what}: layers of a {config.model_type} model cannot be cut; of {known} models they can")
    heads = config.num_attention_heads
    if heads % parts:
        fits = " or ".join(str(size) for size in range(2, heads + 1) if heads % size == 0)
        raise UserError(f"{what}: its {heads} attention heads cannot be shared out to {parts} processes, but to {fits}")
    if ParallelExperts in styles.values():
        inner = next(getattr(config, name) for name in INNER_OF_EXPERTS if getattr(config, name, None))
        if inner % parts:
            raise UserError(f"{what}: its experts are {inner} wide, which {parts} processes cannot share")
    words = config.vocab_size
    if -(-words // parts) * (parts - 1) >= words:
        raise UserError(f"{what}: its vocabulary of {words} cannot be shared out to {parts} processes")


def style_of(name: str, styles: dict[str, Style]) -> Style | None:
    """How a module of a model is split, by its name in it."""
    return next((style for layer, style in styles.items() if name.endswith(f".{layer}")), None)


def key_value_heads_used(heads: int, keys: int, parts: int, part: int) -> list[int]:
    """The heads of keys that a part's heads of queries read: each once, where each is read by as many; else one for
    every head of queries."""
    own = heads // parts
    read = [head * keys // heads for head in range(part * own, (part + 1) * own)]
    once = list(dict.fromkeys(read))
    return once if len({read.count(key) for key in once}) == 1 else read


# ---- application


def apply_tensor_parallel(root: "PackedModel", mesh: DeviceMesh) -> None:
    """Split all layers of a root module over the processes of `mesh`."""
    if root.path != "packed":
        raise UserError(
            f"--ds_tensor_parallel_size: {type(root.inner).__name__} is run by its own attention here, and so cannot "
            "be cut; leave it out"
        )
    check_tensor_parallel(root.config, mesh.size(), "--ds_tensor_parallel_size")
    # It warns that gathering such a tensor takes two collectives.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    _TensorParallelizer(root, mesh).run()


class _TensorParallelizer:
    def __init__(self, root: "PackedModel", mesh: DeviceMesh):
        self.root, self.mesh = root, mesh
        self._placed: dict[int, tuple[Tensor, nn.Parameter]] = {}  # by id, which the old tensor keeps taken
        self._done: set[nn.Module] = set()

    def run(self) -> None:
        styles, config = FAMILIES[self.root.config.model_type], self.root.config
        named = [(module, style_of(name, styles)) for name, module in self.root.named_modules()]
        for module, style in named:
            if style is None:
                continue
            base = module.base_layer if hasattr(module, "base_layer") else module
            assert isinstance(base, nn.Module)
            if style is KeyValueLinear and config.num_key_value_heads % self.mesh.size() == 0:
                style = ColwiseLinear
            rows = [self._key_rows(base)] if style is KeyValueLinear else []
            self._apply(base, style, *rows)
            if base is not module:
                self._adapters(module, style, rows)
        embedding, head = self.root.inner.get_input_embeddings(), self.root.inner.get_output_embeddings()
        self._apply(embedding, VocabParallelEmbedding)
        if head is not None:
            self._apply(head, VocabParallelHead)
        for module in list(self.root.modules()):
            if module not in self._done and module._parameters:
                self._apply(module, LocalParameters)

    def _adapters(self, layer: nn.Module, style: Style, rows: list[list[int]]) -> None:
        """Low-rank ones, so that only [tokens, rank] is exchanged for them."""
        for name, first in layer.lora_A.items():
            second, dropout = layer.lora_B[name], layer.lora_dropout[name]
            if style is RowwiseLinear:
                self._apply(first, RowwiseLinear)
                self._apply(second, LocalParameters)
                if isinstance(dropout, nn.Dropout):
                    (block,) = blocks_of(first.weight)
                    layer.lora_dropout[name] = ShardedDropout(dropout.p, first.weight.shape[1], block.slices[1])
            else:
                self._apply(first, LoraDown)
                self._apply(second, SelectedRows if rows else LoraUp, *rows)

    def _key_rows(self, module: nn.Module) -> list[int]:
        """The outputs of a layer of keys that belong to the heads that are used here."""
        heads, keys = self.root.config.num_attention_heads, self.root.config.num_key_value_heads
        width = module.weight.shape[0] // keys
        used = key_value_heads_used(heads, keys, self.mesh.size(), self.mesh.get_local_rank())
        return [row for key in used for row in range(key * width, (key + 1) * width)]

    def _apply(self, module: nn.Module, style: Style, *arguments: Any) -> None:
        """Make a module's parameters DTensors, a tied one once, and have it work in this style."""
        self._done.add(module)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in self._placed:
                placement = style.placements.get(name, Replicate())
                placed = distribute_tensor(parameter.data, self.mesh, [placement], src_data_rank=None)
                self._placed[id(parameter)] = parameter, nn.Parameter(placed, parameter.requires_grad)
            module._parameters[name] = self._placed[id(parameter)][1]
        style(module, self.mesh.get_group(), *arguments)
