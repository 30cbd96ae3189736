"""The models of a split run and what a pass of each takes. A pass of many equal layers is measured on two short copies.

What the forward pass keeps grows by the same amount with every layer; what is alive besides, at the worst moment, is
one layer's or the head's. So the bytes of a pass follow from those of a model with one layer and with two. Passes are
measured at doubling sizes; what lies between is on the chord, which is a little more than it takes.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import torch

from trimtab.models.load import TrainedModelOptions
from trimtab.models.lora import refuse_adapted_experts
from trimtab.models.packed import PackedModel
from trimtab.models.parallel.sharded_model import decoder_layers
from trimtab.models.policy import Policy
from trimtab.plan.fake_model import PassBytes, Pretended, narrow
from trimtab.plan.speed import multiplied
from trimtab.plan.workload import Rows, frozen_models, trained_models
from trimtab.rollout.factory import EngineMemory

SHORT = (1, 2)
LEAST = 32  # tokens of a pass that is measured


@dataclass(frozen=True)
class Found:
    """A model without weights, and what it is for."""

    name: str
    role: str
    model: PackedModel
    trained: bool = False
    offload: bool = False
    pass_tokens: int | None = None


def find_models(options: TrainedModelOptions) -> list[Found]:
    found = [Found(name, name, model, trained=True) for name, model in trained_models(options).items()]
    for frozen in frozen_models(options):
        role, _, model = frozen.name.partition(" model ")
        name = f"{role} model {Path(model).name}" if model else role
        found.append(Found(name, role, frozen.model, False, frozen.offload, frozen.pass_tokens))
    return found


class PlannedModel:
    def __init__(
        self,
        options: TrainedModelOptions,
        rows: Rows,
        copies: list[Found],
        *,
        tensor: int = 1,
        accelerator: bool = True,
    ):
        """`copies`: the model whole and, where it has more layers than that, with each number of SHORT ones. `tensor`:
        in how many its layers are cut; everything here is of one of them."""
        self.tensor = tensor
        for copy in copies if tensor > 1 else []:
            narrow(copy.model, tensor)
        whole = copies[0]
        self.name, self.role, self.trained, self.offload = whole.name, whole.role, whole.trained, whole.offload
        self.pass_tokens, self.rows = whole.pass_tokens, rows
        self.layers = decoder_layers(whole.model)
        alike = _all_alike(self.layers) and not isinstance(options.gradient_checkpointing_layers, int)
        if len(self.layers) > SHORT[1] and alike:
            for copy, layers in zip(copies[1:], SHORT, strict=True):
                shorten(copy.model, layers)
        else:
            copies = [whole]
        self._made = [
            Pretended(copy.model, options, accelerator=accelerator, frozen=not whole.trained) for copy in copies
        ]
        self._scoring_pass = lru_cache(maxsize=None)(self._measured_scoring)
        self._training_pass = lru_cache(maxsize=None)(self._measured_training)

    @property
    def whole(self) -> Pretended:
        return self._made[0]

    @cached_property
    def weights(self) -> int:
        """Bytes of the working weights."""
        return self.whole.weights()

    @cached_property
    def learnt(self) -> int:
        return self.whole.trained()

    @cached_property
    def multiplied(self) -> float:
        """Weights that a token's matrix products take."""
        return multiplied(self.whole)

    @cached_property
    def frozen_weights(self) -> int:
        return sum(p.nbytes for p in self.whole.model.parameters() if not p.requires_grad)

    @cached_property
    def layer_weights(self) -> int:
        """Bytes of the largest layer that is gathered at a time."""
        return max((sum(p.nbytes for p in layer.parameters()) for layer in self.layers), default=0)

    @cached_property
    def learnt_layer(self) -> int:
        """Trained parameters of the layer that has most."""
        return max((_learnt(layer) for layer in self.layers), default=0)

    @cached_property
    def learnt_root(self) -> int:
        return self.learnt - sum(_learnt(layer) for layer in self.layers)

    @cached_property
    def key_heads(self) -> int:
        """Heads of keys and values; of a cut layer those of one process."""
        text = self.whole.model.config.get_text_config()
        return max(1, (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) // self.tensor)

    @cached_property
    def head_bytes(self) -> int:
        """Of a token's keys, in one head."""
        text = self.whole.model.config.get_text_config()
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return width * next(self.whole.model.parameters()).element_size()

    @cached_property
    def root_weights(self) -> int:
        """Bytes of what belongs to no layer: embedding and head."""
        return self.weights - sum(p.nbytes for layer in self.layers for p in layer.parameters())

    def scoring_bytes(self, tokens: int) -> int:
        low, high, part = self._around(tokens)
        return round((1 - part) * self._scoring_pass(low) + part * self._scoring_pass(high))

    def training_bytes(self, tokens: int) -> PassBytes:
        low, high, part = self._around(tokens)
        one, other = self._training_pass(low), self._training_pass(high)
        return PassBytes(
            round((1 - part) * one.kept + part * other.kept), round((1 - part) * one.peak + part * other.peak)
        )

    def _around(self, tokens: int) -> tuple[int, int, float]:
        """Two sizes that are measured and how far between them this one is."""
        low = high = self.rows.longest
        while low > max(tokens, LEAST):
            low, high = -(-low // 2), low
        while high < tokens:
            low, high = high, 2 * high
        return low, high, (tokens - low) / (high - low) if high > low else 0.0

    def _measured_scoring(self, tokens: int) -> int:
        # Without gradients no layer's activations are kept: a short model's pass takes what the whole one's takes.
        return self._made[-1].scoring_pass(self.rows, tokens)

    def _measured_training(self, tokens: int) -> PassBytes:
        passes = [made.training_pass(self.rows, tokens) for made in self._made[-2:]]
        if len(passes) == 1:
            return passes[0]
        short, longer = passes
        grown = (longer.kept - short.kept) // (SHORT[1] - SHORT[0])
        kept = longer.kept + grown * (len(self.layers) - SHORT[1])
        return PassBytes(kept, kept + max(taken.peak - taken.kept for taken in passes))

    def engine_memory(self, tokens: int | None = None) -> EngineMemory:
        """`tokens`: whose keys and values it may keep, if that is said."""
        assert isinstance(self.whole.model, Policy)
        with self.whole.mode:
            return EngineMemory(self.whole.model, tokens)


def planned_models(
    options: TrainedModelOptions, rows: Rows, *, tensor: int = 1, accelerator: bool = True
) -> list[PlannedModel]:
    """The trained ones first."""
    copies = list(zip(*(find_models(options) for _ in range(1 + len(SHORT))), strict=True))
    for found, *_ in copies if options.lora_rank > 0 else []:
        refuse_adapted_experts(found.model)
    return [PlannedModel(options, rows, list(found), tensor=tensor, accelerator=accelerator) for found in copies]


def shorten(model: PackedModel, layers: int) -> None:
    """Leave the first layers of a model alone."""
    names = set(model.inner._no_split_modules or ())
    for module in model.inner.modules():
        if isinstance(module, torch.nn.ModuleList) and {type(child).__name__ for child in module} <= names:
            del module[layers:]
    model.config.get_text_config().num_hidden_layers = layers


def _all_alike(layers: list[torch.nn.Module]) -> bool:
    shapes = [[(name, p.shape) for name, p in layer.named_parameters()] for layer in layers]
    return all(found == shapes[0] for found in shapes)


def _learnt(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)
