"""Tensor parallelism: each process of a group computes a part of every layer.

A module keeps its class, name and code. During its forward pass its parameters are this process's parts; hooks with the
group's collectives (distributed/collectives) copy its inputs and reduce or gather its outputs. So a model's own code
runs on parts. A table of model families assigns a style to each layer by name:

    ColwiseLinear    a linear layer split by outputs
    RowwiseLinear    a linear layer split by inputs: each process uses its part of them, and the results are summed
    KeyValueLinear   like ColwiseLinear if the key heads are divisible; otherwise replicated, and each process computes
                     the heads that its queries use
    PerHead          a small replicated layer that each process applies to its own heads
    ParallelExperts  a stack of experts, each of them split: the first matrices by outputs, the last by inputs

All other layers are replicated and compute the same in every process: norms, routers, score heads. The embedding and
the output head are found by Hugging Face's accessors and split by vocabulary. A family outside the table may fuse two
layers in one matrix, or normalize over all heads at once: read its code before adding it here.

All parameters become DTensors on the mesh's tensor dimension, replicated ones too, so that sharding, loading, saving
and norms have the layout of each. It works with and without weights, with adapters inside, before FSDP2 shards the
model.
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

from trimtab.distributed.fsdp import blocks_of, local
from trimtab.distributed.process_group import all_gather, group_copy, group_gather, group_reduce
from trimtab.errors import UserError

if TYPE_CHECKING:
    from trimtab.models.packed import PackedModel

Arguments = tuple[Any, ...]
ROWS, COLUMNS = Shard(0), Shard(1)


@dataclass(frozen=True)
class VocabShard:
    """This process's part of the vocabulary in a split embedding or output head."""

    first: int
    count: int
    widths: list[int]  # sizes of all parts, in rank order
    group: ProcessGroup

    @classmethod
    def of(cls, weight: Tensor) -> "VocabShard | None":
        """The part that a matrix [vocabulary, D] has in this process; None: it is not split."""
        if not isinstance(weight, DTensor):
            return None
        assert weight.device_mesh.ndim == 1, "must be gathered in all but the tensor dimension"
        words, parts, part = weight.shape[0], weight.device_mesh.size(), weight.device_mesh.get_local_rank()
        most = -(-words // parts)
        widths = [min(most, words - place * most) for place in range(parts)]
        assert weight.to_local().shape[0] == widths[part]
        return cls(part * most, widths[part], widths, weight.device_mesh.get_group())

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The index of each id in this part, and whether it is in this part (if not, the index is arbitrary)."""
        places = ids - self.first
        return places.clamp(0, self.count - 1), (places >= 0) & (places < self.count)


# ---- styles: hooks that run a module on this process's parts of its parameters


class LocalParameters:
    """The base style: use the local part of each parameter; for a replicated module that is all of it."""

    placements: ClassVar[dict[str, Placement]] = {}  # of parameters; the others are replicated

    def __init__(self, module: nn.Module, group: ProcessGroup):
        self.group = group
        self._parameters: dict[str, nn.Parameter | None] = {}
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after, always_call=True)

    def part(self, name: str, parameter: Tensor) -> Tensor | None:
        return local(parameter)

    def parts(self, module: nn.Module) -> dict[str, Tensor | None]:
        """The module's parameters during its forward pass."""
        return {name: p if p is None else self.part(name, p) for name, p in module._parameters.items()}

    def of_whole_rows(self, largest_O: Tensor) -> Tensor:
        """The largest value of each whole row of the weight, from that of this process's part."""
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
    """A replicated module that each process applies to its own heads, so that gradients must be summed."""

    def part(self, name: str, parameter: Tensor) -> Tensor | None:
        return _with_partial_gradient(parameter)


class SelectedOutputs(PerHead):
    """A replicated linear layer of which each process computes some of the outputs."""

    def __init__(self, module: nn.Module, group: ProcessGroup, rows: list[int]):
        super().__init__(module, group)
        self.rows = torch.tensor(rows, device="cpu")  # explicitly, since a fake model is built under the meta device

    def part(self, name: str, parameter: Tensor) -> Tensor | None:
        return _with_partial_gradient(parameter).index_select(0, self.rows.to(parameter.device))


class ColwiseLinear(LocalParameters):
    placements: ClassVar[dict[str, Placement]] = {"weight": ROWS, "bias": ROWS}

    def enter(self, *arguments: Any) -> Arguments:
        return (group_copy(arguments[0], self.group), *arguments[1:])


class KeyValueLinear(ColwiseLinear, SelectedOutputs):
    placements: ClassVar[dict[str, Placement]] = {}


class RowwiseLinear(LocalParameters):
    """A linear layer split by inputs. Its bias is added once, to the sum."""

    placements: ClassVar[dict[str, Placement]] = {"weight": COLUMNS}

    def part(self, name: str, parameter: Tensor) -> Tensor | None:
        return None if name == "bias" else local(parameter)

    def of_whole_rows(self, largest_O: Tensor) -> Tensor:
        return all_gather(largest_O, self.group).amax(0)

    def leave(self, result: Tensor) -> Tensor:
        total, bias = group_reduce(result, self.group), self._parameters.get("bias")
        return total if bias is None else total + local(bias)


class ParallelExperts(LocalParameters):
    """Experts with inputs (tokens, experts of each token, their weights): routing is replicated, the experts are
    split."""

    # Every expert's gate and up projections are stacked in one matrix, and each is split.
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
    """The first matrix of an adapter on a layer split by outputs."""

    def leave(self, result: Tensor) -> Tensor:
        return group_copy(result, self.group)


class LoraUp(LocalParameters):
    """The second matrix of an adapter on a layer split by outputs."""

    placements: ClassVar[dict[str, Placement]] = {"weight": ROWS}


class ShardedDropout(nn.Dropout):
    """Dropout on a part of the columns: all processes draw the same mask of all columns, as one process would."""

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
    """An output head that gathers all logits if called as a module; models/lm_head computes log-probs without that."""

    def __init__(self, module: nn.Linear, group: ProcessGroup):
        super().__init__(module, group)
        shard = VocabShard.of(module.weight)
        assert shard is not None
        self.widths = shard.widths

    def leave(self, result: Tensor) -> Tensor:
        return group_gather(result, self.group, self.widths)


def local_style(module: nn.Module) -> LocalParameters | None:
    """The style applied to a module; None: none."""
    hooks = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
    return next((style for style in hooks if isinstance(style, LocalParameters)), None)


def _with_partial_gradient(parameter: Tensor) -> Tensor:
    """A replicated parameter whose gradient is only this process's share of the sum."""
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
"""Styles by `model_type` of config.json. Layers that a model lacks are ignored."""

INNER_OF_EXPERTS = ("moe_intermediate_size", "intermediate_size")


def check_tensor_parallel(config: Any, parts: int, what: str) -> None:
    """Raise UserError if this model cannot be split over this many processes. `what`: names the model in the
    message."""
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


def supports_tensor_parallel(config: Any, parts: int) -> bool:
    """Whether this model can be split over this many processes."""
    try:
        check_tensor_parallel(config, parts, "")
    except UserError:
        return False
    return True


def style_of(name: str, styles: dict[str, Style]) -> Style | None:
    """The style of a module, by its name in the model."""
    return next((style for layer, style in styles.items() if name.endswith(f".{layer}")), None)


def key_value_heads_used(heads: int, keys: int, parts: int, part: int) -> list[int]:
    """The key heads that a part's query heads use: each once, if all are used equally often; otherwise one for every
    query head."""
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
    # torch warns that gathering a strided shard takes two collectives.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    _TensorParallelizer(root, mesh).run()


class _TensorParallelizer:
    def __init__(self, root: "PackedModel", mesh: DeviceMesh):
        self.root, self.mesh = root, mesh
        self._placed: dict[int, tuple[Tensor, nn.Parameter]] = {}  # by id; keeping the old tensor keeps its id unique
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
        """Split a layer's adapters such that only [tokens, rank] is communicated for them."""
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
                self._apply(second, SelectedOutputs if rows else LoraUp, *rows)

    def _key_rows(self, module: nn.Module) -> list[int]:
        """The output rows of a key or value layer for the heads that this process uses."""
        heads, keys = self.root.config.num_attention_heads, self.root.config.num_key_value_heads
        width = module.weight.shape[0] // keys
        used = key_value_heads_used(heads, keys, self.mesh.size(), self.mesh.get_local_rank())
        return [row for key in used for row in range(key * width, (key + 1) * width)]

    def _apply(self, module: nn.Module, style: Style, *arguments: Any) -> None:
        """Turn a module's parameters into DTensors (tied ones once) and apply a style to it."""
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
