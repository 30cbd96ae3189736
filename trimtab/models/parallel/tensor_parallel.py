"""Which layers of a model can be cut over processes, and how: a table of model families, by their names for layers.

    COLWISE   a linear layer cut by what it computes: each process has some of its outputs
    ROWWISE   one cut by what it reads: each process reads the outputs that it has, and their results are added up
    KEY_VALUE as COLWISE where every process gets as many heads of keys; else whole, and each uses those it needs
    PER_HEAD  a small layer that every process has whole and uses on its own heads
    EXPERTS   a stack of experts, each of which is cut: its first matrices as COLWISE, its last as ROWWISE

What is not named is whole and works alike in every process: norms, routers, score heads. The embedding and the output
head are found by Hugging Face's names and cut by vocabulary. A family that is not in the table may join two layers in
one matrix, or normalise over all heads at once: it has to be looked at before it is added here.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from trimtab.distributed.collectives import all_gather, group_copy, group_gather, group_reduce
from trimtab.distributed.fsdp import blocks_of, local
from trimtab.errors import UserError
from trimtab.models.packed import PackedModel

ParallelStyle = Literal["outputs", "inputs", "keys", "of heads", "experts"]
COLWISE: ParallelStyle = "outputs"
ROWWISE: ParallelStyle = "inputs"
KEY_VALUE: ParallelStyle = "keys"
PER_HEAD: ParallelStyle = "of heads"
EXPERTS: ParallelStyle = "experts"

ATTENTION: dict[str, ParallelStyle] = {
    "self_attn.q_proj": COLWISE,
    "self_attn.k_proj": KEY_VALUE,
    "self_attn.v_proj": KEY_VALUE,
    "self_attn.o_proj": ROWWISE,
}
NORMED_HEADS: dict[str, ParallelStyle] = {"self_attn.q_norm": PER_HEAD, "self_attn.k_norm": PER_HEAD}
MLP: dict[str, ParallelStyle] = {"mlp.gate_proj": COLWISE, "mlp.up_proj": COLWISE, "mlp.down_proj": ROWWISE}
SHARED_EXPERT: dict[str, ParallelStyle] = {
    name.replace("mlp.", "mlp.shared_expert."): style for name, style in MLP.items()
}
MIXTURE: dict[str, ParallelStyle] = {"mlp.experts": EXPERTS}

FAMILIES: dict[str, dict[str, ParallelStyle]] = {
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
"""By `model_type` in config.json. Layers of a kind that a model does not have are not looked for."""

INNER_OF_EXPERTS = ("moe_intermediate_size", "intermediate_size")


def check_tensor_parallel(config: Any, parts: int, told: str) -> None:
    """A UserError, in one line: this model cannot be cut into so many parts. `told`: of which model it is."""
    styles = FAMILIES.get(config.model_type)
    if styles is None:
        known = ", ".join(FAMILIES)
        raise UserError(f"{told}: layers of a {config.model_type} model cannot be cut; of {known} models they can")
    heads = config.num_attention_heads
    if heads % parts:
        fits = " or ".join(str(size) for size in range(2, heads + 1) if heads % size == 0)
        raise UserError(f"{told}: its {heads} attention heads cannot be shared out to {parts} processes, but to {fits}")
    if EXPERTS in styles.values():
        inner = next(getattr(config, name) for name in INNER_OF_EXPERTS if getattr(config, name, None))
        if inner % parts:
            raise UserError(f"{told}: its experts are {inner} wide, which {parts} processes cannot share")
    words = config.vocab_size
    if -(-words // parts) * (parts - 1) >= words:
        raise UserError(f"{told}: its vocabulary of {words} cannot be shared out to {parts} processes")


def style_of(name: str, styles: dict[str, ParallelStyle]) -> ParallelStyle | None:
    """How a module of a model is cut, by its name in it."""
    return next((style for layer, style in styles.items() if name.endswith(f".{layer}")), None)


def key_value_heads_used(heads: int, keys: int, parts: int, part: int) -> list[int]:
    """The heads of keys that a part's heads of queries read: each once, where each is read by as many; else one for
    every head of queries."""
    own = heads // parts
    read = [head * keys // heads for head in range(part * own, (part + 1) * own)]
    once = list(dict.fromkeys(read))
    return once if len({read.count(key) for key in once}) == 1 else read


# ---- Which words of the vocabulary a process has, where an embedding or an output head is cut.


@dataclass(frozen=True)
class VocabShard:
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
        """Among the words that are here, the place of each; and whether it is one of them (else the place is any)."""
        places = ids - self.first
        return places.clamp(0, self.count - 1), (places >= 0) & (places < self.count)


# ---- How a module works on this process's parts of its parameters, in the styles of models/families. A module keeps
# its class, its name and its code. While it works its parameters are this process's parts; what comes in and
# goes out is branched and joined (distributed/branches). So a model's own code runs, in parts.


Arguments = tuple[Any, ...]


class LocalParameters:
    """On what is here: of a module that is whole everywhere all of it, in every process alike."""

    def __init__(self, module: nn.Module, group: ProcessGroup):
        self.group = group
        self._parameters: dict[str, nn.Parameter | None] = {}
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after, always_call=True)

    def part(self, name: str, parameter: Tensor) -> Tensor | None:
        return local(parameter)

    def parts(self, module: nn.Module) -> dict[str, Tensor | None]:
        """What the module's parameters are while it works."""
        return {name: p if p is None else self.part(name, p) for name, p in module._parameters.items()}

    def of_whole_rows(self, largest_O: Tensor) -> Tensor:
        """From what is largest in a part of each row of the weight to what is largest in all of it."""
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
    """Every process has all of it and uses it on its own heads, so that gradients are still to be added up."""

    def part(self, name: str, parameter: Tensor) -> Tensor | None:
        return _part_to_be_added(parameter)


class ColwiseLinear(LocalParameters):
    """A linear layer cut by its outputs."""

    def enter(self, *arguments: Any) -> Arguments:
        return (group_copy(arguments[0], self.group), *arguments[1:])


class SelectedRows(PerHead):
    """A linear layer that every process has whole, and of which it computes some outputs."""

    def __init__(self, module: nn.Module, group: ProcessGroup, rows: list[int]):
        super().__init__(module, group)
        self.rows = torch.tensor(rows, device="cpu")  # a skeleton is built on another device

    def part(self, name: str, parameter: Tensor) -> Tensor | None:
        return _part_to_be_added(parameter).index_select(0, self.rows.to(parameter.device))


class KeyValueLinear(SelectedRows):
    """One of them whose input is what all have."""

    def enter(self, *arguments: Any) -> Arguments:
        return (group_copy(arguments[0], self.group), *arguments[1:])


class RowwiseLinear(LocalParameters):
    """A linear layer cut by its inputs. A bias is added once, to the sum."""

    def part(self, name: str, parameter: Tensor) -> Tensor | None:
        return None if name == "bias" else local(parameter)

    def of_whole_rows(self, largest_O: Tensor) -> Tensor:
        return all_gather(largest_O, self.group).amax(0)

    def leave(self, result: Tensor) -> Tensor:
        total, bias = group_reduce(result, self.group), self._parameters.get("bias")
        return total if bias is None else total + local(bias)


class ParallelExperts(LocalParameters):
    """(tokens, the experts of each, their weights): what experts are told by is alike, what they do is a part."""

    def enter(self, *arguments: Any) -> Arguments:
        hidden, chosen, weights = arguments
        return group_copy(hidden, self.group), chosen, group_copy(weights, self.group)

    def leave(self, result: Tensor) -> Tensor:
        return group_reduce(result, self.group)


class LoraDown(LocalParameters):
    """The first matrix of an adapter beside a layer that is cut by its outputs."""

    def leave(self, result: Tensor) -> Tensor:
        return group_copy(result, self.group)


class VocabParallelEmbedding(LocalParameters):
    """Each process has the rows of some words."""

    def __init__(self, module: nn.Embedding, group: ProcessGroup):
        super().__init__(module, group)
        self.words = _words(module)
        if module.padding_idx is not None:  # the row that gets no gradient
            place = module.padding_idx - self.words.first
            module.padding_idx = place if 0 <= place < self.words.count else None
        self._here: Tensor | None = None

    def enter(self, *arguments: Any) -> Arguments:
        places, self._here = self.words.places(arguments[0])
        return (places,)

    def leave(self, result: Tensor) -> Tensor:
        here, self._here = self._here, None
        assert here is not None
        return group_reduce(result * here[..., None], self.group)


class VocabParallelHead(ColwiseLinear):
    """Each process has some words. Called as a module it gathers all logits; log-probs are made without them
    (models/lm_head)."""

    def __init__(self, module: nn.Linear, group: ProcessGroup):
        super().__init__(module, group)
        self.words = _words(module)

    def leave(self, result: Tensor) -> Tensor:
        return group_gather(result, self.group, self.words.widths)


class ShardedDropout(nn.Dropout):
    """On some columns of what is dropped from: all processes draw the mask of all columns alike, as one would."""

    def __init__(self, p: float, width: int, columns: slice):
        super().__init__(p)
        self.width, self.columns = width, columns

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return input
        mask = nn.functional.dropout(input.new_ones(*input.shape[:-1], self.width), self.p)
        return input * mask[..., self.columns]


def local_style(module: nn.Module) -> LocalParameters | None:
    """How a module works on its parts; None: it is not cut."""
    hooks = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
    return next((style for style in hooks if isinstance(style, LocalParameters)), None)


def _words(module: nn.Embedding | nn.Linear) -> VocabShard:
    words = VocabShard.of(module.weight)
    assert words is not None
    return words


def _part_to_be_added(parameter: Tensor) -> Tensor:
    """All of a parameter, whose gradient is only this process's share."""
    return parameter.to_local(grad_placements=[Partial()])


# ---- Cut the layers of a model over processes, by the table of families: each does a part of every layer's
# arithmetic. All parameters become DTensors on the mesh's tensor dimension, those that are not cut too, so that
# splitting, filling, saving and norms know where everything is. Works on a skeleton and on weights, with
# adapters inside, before the model is split by FSDP2.


WHOLE, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)
GATE_AND_UP = _StridedShard(1, split_factor=2)  # one above the other in every expert, and each is cut
INNER = Shard(2)


def apply_tensor_parallel(root: PackedModel, mesh: DeviceMesh) -> None:
    """Of a root module, everything; `mesh`: of the processes that share every layer."""
    if root.path != "packed":
        raise UserError(
            f"--ds_tensor_parallel_size: {type(root.inner).__name__} is run by its own attention here, and so cannot "
            "be cut; leave it out"
        )
    check_tensor_parallel(root.config, mesh.size(), "--ds_tensor_parallel_size")
    # Whoever gathers such a tensor is told that it takes two exchanges.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    _TensorParallelizer(root, mesh).apply()


class _TensorParallelizer:
    def __init__(self, root: PackedModel, mesh: DeviceMesh):
        self.root, self.mesh, self.group = root, mesh, mesh.get_group()
        self.styles = FAMILIES[root.config.model_type]
        self._placed: dict[int, nn.Parameter] = {}  # a tied parameter stays one
        self._done: set[nn.Module] = set()
        self._kept: list[Tensor] = []  # as long as they live no other has their ids

    def apply(self) -> None:
        inner = self.root.inner
        for module, style in list(self._named()):
            base = module.base_layer if hasattr(module, "base_layer") else module
            assert isinstance(base, nn.Module)
            self._layer(base, style)
            if base is not module:
                self._adapters(module, base, style)
        embedding, head = inner.get_input_embeddings(), inner.get_output_embeddings()
        self._place(embedding, weight=ROWS)
        VocabParallelEmbedding(embedding, self.group)
        if head is not None:
            self._place(head, weight=ROWS, bias=ROWS)
            VocabParallelHead(head, self.group)
        for module in list(self.root.modules()):
            if module not in self._done and module._parameters:
                self._place(module, **dict.fromkeys(module._parameters, WHOLE))
                LocalParameters(module, self.group)

    def _named(self) -> Iterator[tuple[nn.Module, ParallelStyle]]:
        for name, module in self.root.named_modules():
            if style := style_of(name, self.styles):
                yield module, style

    def _layer(self, module: nn.Module, style: ParallelStyle) -> None:
        if style == COLWISE or (style == KEY_VALUE and self._keys_divide):
            self._place(module, weight=ROWS, bias=ROWS)
            ColwiseLinear(module, self.group)
        elif style == KEY_VALUE:
            self._place(module, weight=WHOLE, bias=WHOLE)
            KeyValueLinear(module, self.group, self._key_rows(module))
        elif style == ROWWISE:
            self._place(module, weight=COLUMNS, bias=WHOLE)
            RowwiseLinear(module, self.group)
        elif style == PER_HEAD:
            self._place(module, weight=WHOLE)
            PerHead(module, self.group)
        else:
            assert style == EXPERTS
            self._place(module, gate_up_proj=GATE_AND_UP, down_proj=INNER)
            ParallelExperts(module, self.group)

    def _adapters(self, layer: nn.Module, base: nn.Module, style: ParallelStyle) -> None:
        """Low-rank ones, so that only [tokens, rank] is exchanged for them."""
        for name, first in layer.lora_A.items():
            second, dropout = layer.lora_B[name], layer.lora_dropout[name]
            if style == ROWWISE:
                self._place(first, weight=COLUMNS)
                self._place(second, weight=WHOLE)
                RowwiseLinear(first, self.group)
                LocalParameters(second, self.group)
                if isinstance(dropout, nn.Dropout):
                    (block,) = blocks_of(first.weight)
                    layer.lora_dropout[name] = ShardedDropout(dropout.p, first.weight.shape[1], block.slices[1])
                continue
            self._place(first, weight=WHOLE)
            LoraDown(first, self.group)
            if style == COLWISE or self._keys_divide:
                self._place(second, weight=ROWS)
                LocalParameters(second, self.group)
            else:
                self._place(second, weight=WHOLE)
                SelectedRows(second, self.group, self._key_rows(base))

    @property
    def _keys_divide(self) -> bool:
        return self.root.config.num_key_value_heads % self.mesh.size() == 0

    def _key_rows(self, module: nn.Module) -> list[int]:
        """The outputs of a layer of keys that belong to the heads that are used here."""
        config = self.root.config
        heads, keys = config.num_attention_heads, config.num_key_value_heads
        width = module.weight.shape[0] // keys
        used = key_value_heads_used(heads, keys, self.mesh.size(), self.mesh.get_local_rank())
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
