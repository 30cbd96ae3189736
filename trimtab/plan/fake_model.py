"""Fake models, whose passes are run to measure memory: any size, in a second, on any machine.

Memory is not a formula for each architecture: a forward and backward pass runs on fake tensors, and live bytes are
counted. A fake accelerator is torch's meta device, on which packed attention and the chunked head take the
accelerator's path; a fake CPU is torch's FakeTensorMode, in which they take the CPU's.

The memory of many equal layers follows from two short copies of the model, with one layer and with two. Activations
grow by the same amount with every layer; the rest of the peak belongs to one layer or to the head.
"""

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from trimtab.data.batches import TokenBatch
from trimtab.distributed.fsdp import GRADIENT_DTYPES, accumulate_in
from trimtab.models.activation_memory import (
    ActivationOffload,
    OffloadedTensor,
    enable_gradient_checkpointing,
    layers_of,
    set_checkpointed_layers,
)
from trimtab.models.attention import NAME as ATTENTION
from trimtab.models.attention import register
from trimtab.models.load import TrainedModelOptions
from trimtab.models.lora import refuse_adapted_experts
from trimtab.models.packed import PackedModel, cast_parameters, scoring
from trimtab.models.parallel.sharded_model import decoder_layers
from trimtab.models.parallel.tensor_parallel import (
    FAMILIES,
    KeyValueLinear,
    ParallelExperts,
    PerHead,
    RowwiseLinear,
    check_tensor_parallel,
    key_value_heads_used,
    style_of,
)
from trimtab.models.policy import Policy
from trimtab.plan.workload import JobModel, RowShape, job_models
from trimtab.rollout.factory import EngineMemory


class LiveBytes(TorchDispatchMode):
    """Counts live bytes allocated inside the context, `now` and at the `peak`, without `known` tensors. Memory that a
    kernel allocates and frees inside one call (workspaces of matrix products, partial sums of attention) is not
    counted."""

    def __init__(self, known: Iterable[Tensor] = ()):
        super().__init__()
        self.now = self.peak = 0
        self._storages = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: tuple = (), named: dict | None = None) -> Any:
        result = function(*arguments, **(named or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._storages:
            return
        self._storages.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, storage: int, size: int) -> None:
        self._storages.discard(storage)
        self.now -= size


class FakeActivationOffload(ActivationOffload):
    """Activation offload on fake tensors, without copies."""

    def _send_away(self, tensor: Tensor, before: OffloadedTensor | None) -> OffloadedTensor:
        return FakeOffloadedTensor(tensor, before)


class FakeOffloadedTensor(OffloadedTensor):
    def __init__(self, tensor: Tensor, before: OffloadedTensor | None):
        self.device, self.stream, self.before = tensor.device, None, before
        self._back, self._shape = None, (tensor.shape, tensor.dtype)

    def send_back(self) -> None:
        shape, dtype = self._shape
        self._back = torch.empty(shape, dtype=dtype, device=self.device) if self._back is None else self._back


@dataclass(frozen=True)
class PassBytes:
    """Memory of one forward and backward pass."""

    kept: int
    """Activations saved for the backward pass."""
    head: int
    """The most bytes alive at once up to the head's backward pass, with activations, without weights and gradient
    sums."""
    layers: int
    """The same while gradients pass the layers."""
    embedding: int
    """The same after the layers."""

    @property
    def peak(self) -> int:
        return max(self.head, self.layers, self.embedding)


class FakeModel:
    """A model on fake tensors, whose training and scoring passes measure memory."""

    def __init__(self, model: PackedModel, options: TrainedModelOptions, *, accelerator: bool, frozen: bool = False):
        """`model`: a model without weights, which is changed in place; `frozen`: it only scores."""
        self.mode = contextlib.nullcontext() if accelerator else FakeTensorMode()
        self.device = torch.device("meta" if accelerator else "cpu")
        self.model, self.options = model, options
        self._sums: dict[str, Tensor] = {}
        self._hooked: set[str] = set()
        model.config.pad_token_id = None  # otherwise a model may search the token ids for it, to print a warning
        register()
        model.inner.set_attn_implementation(ATTENTION)
        route_evenly(model.inner)
        if frozen:
            model.requires_grad_(False)
        with self.mode:
            if not accelerator:
                _make_fake(model)
            cast_parameters(model, torch.bfloat16 if options.bf16 else torch.float32)  # whatever dtype its files have
        if not frozen:
            enable_gradient_checkpointing(model, options)
        offloads = not frozen and options.offload_activations and accelerator
        self._main_memory = FakeActivationOffload(model) if offloads else None

    @property
    def layers(self) -> int:
        return len(layers_of(self.model.inner))

    @property
    def recomputing_layers(self) -> int:
        """The number of layers with gradient checkpointing; all, if a plan may choose it."""
        number = self.options.gradient_checkpointing_layers
        if not self.options.gradient_checkpointing:
            return 0
        return number if isinstance(number, int) else self.layers

    def training_pass(self, rows: RowShape, tokens: int, recomputed: int | None = None) -> PassBytes:
        """Measure a micro-batch after the first of a step, with the first one's gradient sums. `recomputed`: the number
        of layers with gradient checkpointing, by default from the options; activations may be offloaded for these."""
        recomputed = self.recomputing_layers if recomputed is None else recomputed
        if self.options.gradient_checkpointing:
            set_checkpointed_layers(self.model.inner, recomputed)
        self.model.activations = self._main_memory if recomputed else None
        with self.mode:
            known = [*self.model.parameters(), *self.model.buffers(), *self._gradient_sums()]
            batch = self._batch(rows, tokens)
            self.model.train()
            with LiveBytes(known) as live, self._peaks(live) as peaks:
                value = self._value(batch)
                kept = live.now
                value.backward()
            self._sums.clear()
            for parameter in self._trained():
                parameter.grad = None
        return PassBytes(kept, *peaks)

    @contextlib.contextmanager
    def _peaks(self, live: LiveBytes) -> Iterator[list[int]]:
        """Collect the peaks before gradients reach the last layer, until they leave the first, and after that."""
        peaks: list[int] = []
        layers = layers_of(self.model.inner)

        def end_part(number: int) -> None:
            if len(peaks) == number:
                peaks.append(live.peak)
                live.peak = live.now

        def watch(number: int, states: Any) -> None:
            states = next(iter(states), None) if isinstance(states, tuple) else states
            if isinstance(states, Tensor) and states.requires_grad:
                states.register_hook(lambda _: end_part(number))

        hooks = [
            layers[-1].register_forward_hook(lambda _, __, out: watch(0, out)),
            layers[0].register_forward_pre_hook(lambda _, given: watch(1, given)),
        ]
        try:
            yield peaks
        finally:
            for hook in hooks:
                hook.remove()
            peaks += [live.peak] * (3 - len(peaks))  # frozen embeddings end with the layers

    def scoring_pass(self, rows: RowShape, tokens: int) -> int:
        with self.mode, scoring(self.model):
            batch = self._batch(rows, tokens)
            with LiveBytes([*self.model.parameters(), *self.model.buffers()]) as live:
                self._value(batch)
        return live.peak

    def _trained(self) -> Iterator[nn.Parameter]:
        return (p for p in self.model.parameters() if p.requires_grad)

    def _batch(self, rows: RowShape, tokens: int) -> TokenBatch:
        return TokenBatch.of(*rows.examples(tokens)).to(self.device)

    def _value(self, batch: TokenBatch) -> Tensor:
        out = self.model(batch)
        for name in ("log_probs_N", "scores_S"):
            out = getattr(out, name, out)
        return out.sum()

    def _gradient_sums(self) -> list[Tensor]:
        """Gradient sums of an earlier pass of the step, in the optimizer's layout."""
        dtype = GRADIENT_DTYPES[self.options.grad_accum_dtype]
        for name, parameter in self.model.model.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.dtype == dtype:
                parameter.grad = torch.empty_like(parameter)
                continue
            if name not in self._hooked:
                accumulate_in(dtype, parameter, self._sums, name)
                self._hooked.add(name)
            self._sums[name] = torch.empty_like(parameter, dtype=dtype)
        return [*(p.grad for p in self._trained() if p.grad is not None), *self._sums.values()]


def _make_fake(model: nn.Module) -> None:
    """Replace every meta tensor by a fake CPU tensor of the current fake mode; tied ones stay tied."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype)
                    if isinstance(tensor, nn.Parameter):
                        empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = empty
                tensors[name] = made[id(tensor)]


# ---- a model of a plan


class PlannedModel:
    """A model of a job, or one tensor-parallel part of it: its sizes, and the memory of its passes, measured once
    each."""

    def __init__(
        self,
        options: TrainedModelOptions,
        rows: RowShape,
        found: JobModel,
        spare: Callable[[], PackedModel],
        *,
        tensor: int = 1,
        accelerator: bool = True,
    ):
        """`spare`: returns a second copy of the fake model, which is shortened to measure passes."""
        self.name, self.role, self.trained = found.name, found.role, found.trained
        self.offload, self.pass_tokens, self.rows, self.tensor = found.offload, found.pass_tokens, rows, tensor
        self._spare, self._options, self._accelerator = spare, options, accelerator
        self._passes: dict[tuple[int, int | None], Any] = {}
        self.whole = self._fake(found.skeleton)
        self.layers = self.whole.layers
        self.config = config = found.skeleton.config.get_text_config()
        self.size: int = config.hidden_size * config.num_hidden_layers
        """Layers x hidden size, of the whole model."""
        self._layers = layers = decoder_layers(found.skeleton)
        self.weights = _bytes(found.skeleton)
        """Bytes of the working weights; of those"""
        self.frozen_weights = sum(p.nbytes for p in found.skeleton.parameters() if not p.requires_grad)
        self.layer_weights = max(map(_bytes, layers), default=0)  # of the largest layer
        self.root_weights = self.weights - sum(map(_bytes, layers))  # of embedding and head
        self.learnt = _learnt(found.skeleton)
        """Trained parameters; of those"""
        self.learnt_layer = max(map(_learnt, layers), default=0)
        self.learnt_root = self.learnt - sum(map(_learnt, layers))
        embedding = _untied_embedding(found.skeleton)
        self.learnt_head = self.learnt_root - (
            embedding.numel() if embedding is not None and embedding.requires_grad else 0
        )
        inside = [p for layer in layers_of(found.skeleton) for p in layer.parameters() if p.requires_grad]
        self.matrices = [p.numel() for p in inside if p.ndim == 2] if options.optimizer == "muon" else []
        """Sizes of the trained matrices of layers that have Muon."""
        self.key_heads = max(1, (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) // tensor)
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.token_keys = width * next(found.skeleton.parameters()).element_size()
        """Bytes of a token's keys in one layer and one head."""

    def _fake(self, skeleton: PackedModel) -> FakeModel:
        if self.tensor > 1:
            narrow(skeleton, self.tensor)
        return FakeModel(skeleton, self._options, accelerator=self._accelerator, frozen=not self.trained)

    @cached_property
    def _measured(self) -> list[FakeModel]:
        """The models whose passes are run: with one and with two layers, or the whole one if layers differ."""
        shapes = [[(name, p.shape) for name, p in layer.named_parameters()] for layer in self._layers]
        if len(shapes) <= 2 or any(found != shapes[0] for found in shapes):
            return [self.whole]
        shorten(two := self._spare(), 2)
        shorten(one := copy.deepcopy(two), 1)
        return [self._fake(one), self._fake(two)]

    @cached_property
    def multiplied(self) -> float:
        """Number of weights in a token's matrix products: all but an untied embedding, and of experts only those that a
        token is routed to."""
        inner = self.whole.model.inner
        embedding = _untied_embedding(self.whole.model)
        every = sum(p.numel() for p in inner.parameters()) - (0 if embedding is None else embedding.numel())
        experts = [p for name, p in inner.named_parameters() if ".experts." in name and p.ndim == 3]
        return every - sum(p.numel() * (1 - self.config.num_experts_per_tok / p.shape[0]) for p in experts)

    def engine_memory(self, tokens: int | None = None) -> EngineMemory:
        """`tokens`: size of the KV cache, if the options set it."""
        assert isinstance(self.whole.model, Policy)
        with self.whole.mode:
            return EngineMemory(self.whole.model, tokens)

    @cached_property
    def kv_token_bytes(self) -> int:
        return self.engine_memory().token_bytes

    # ---- passes

    def scoring_bytes(self, tokens: int) -> int:
        """Peak bytes of a scoring pass. No activations are saved, so a short model's pass needs as much as the whole
        one's."""
        if (tokens, None) not in self._passes:
            self._passes[tokens, None] = self._measured[-1].scoring_pass(self.rows, tokens)
        return self._passes[tokens, None]

    def training_bytes(self, tokens: int, recomputed: int | None = None) -> PassBytes:
        """Memory of a training pass; `recomputed`: the number of layers with gradient checkpointing, by default from
        the options."""
        recomputed = self.whole.recomputing_layers if recomputed is None else recomputed
        if (tokens, recomputed) not in self._passes:
            self._passes[tokens, recomputed] = self._training_bytes(tokens, recomputed)
        return self._passes[tokens, recomputed]

    def _training_bytes(self, tokens: int, recomputed: int) -> PassBytes:
        if self._measured == [self.whole]:
            return self.whole.training_pass(self.rows, tokens, recomputed)
        layers = self.layers
        if 0 < recomputed < layers:
            none, every = self.training_bytes(tokens, 0), self.training_bytes(tokens, layers)
            kept = none.kept + (every.kept - none.kept) * recomputed // layers
            return _with_additions(kept, none, every)
        one, two = (
            model.training_pass(self.rows, tokens, model.layers if recomputed else 0) for model in self._measured
        )
        kept = two.kept + (two.kept - one.kept) * (layers - 2)
        return _with_additions(kept, one, two)


def _with_additions(kept: int, *passes: PassBytes) -> PassBytes:
    """With these activations, and what the passes add to theirs; there are none left at the embedding."""
    head, layers = (max(getattr(p, name) - p.kept for p in passes) for name in ("head", "layers"))
    return PassBytes(kept, kept + head, kept + layers, max(p.embedding for p in passes))


def planned_models(
    options: TrainedModelOptions, rows: RowShape, *, tensor: int = 1, accelerator: bool = True
) -> list[PlannedModel]:
    """The models of a job, trained ones first. UserError: one cannot be split into `tensor` parts."""
    found = job_models(options)
    for model in found if options.lora_rank > 0 else []:
        refuse_adapted_experts(model.skeleton, "are not planned")
    again = cache(lambda: job_models(options))
    spares = [partial(lambda number: again()[number].skeleton, number) for number in range(len(found))]
    return [
        PlannedModel(options, rows, model, spare, tensor=tensor, accelerator=accelerator)
        for model, spare in zip(found, spares)
    ]


def shorten(model: PackedModel, layers: int) -> None:
    """Remove all but the first layers of a model."""
    names = set(model.inner._no_split_modules or ())
    for module in model.inner.modules():
        if isinstance(module, nn.ModuleList) and {type(child).__name__ for child in module} <= names:
            del module[layers:]
    model.config.get_text_config().num_hidden_layers = layers


def _untied_embedding(model: PackedModel) -> nn.Parameter | None:
    """The embedding, if it is not the head, too."""
    embedding, head = model.inner.get_input_embeddings().weight, model.inner.get_output_embeddings()
    return None if head is not None and head.weight is embedding else embedding


def _bytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


def _learnt(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


# ---- experts, and tensor-parallel parts


EVEN_EXPERTS = "trimtab_even"


def route_evenly(model: nn.Module) -> None:
    """Replace the routing of a fake model's experts, if any: routing depends on values, which fake tensors do not have,
    so every expert gets the same number of tokens."""
    if not any(hasattr(module, "gate_up_proj") and hasattr(module, "has_gate") for module in model.modules()):
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if EVEN_EXPERTS not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(EVEN_EXPERTS, _even_experts)
    model.set_experts_implementation(EVEN_EXPERTS)


def _even_experts(experts: Any, hidden_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """E experts, each with an equal share of the T x K routed rows; it saves the same activations as Hugging Face's
    grouped products."""
    tokens, most = chosen_TK.shape
    number = experts.gate_up_proj.shape[0]
    order = chosen_TK.new_empty(-(-tokens * most // number) * number)
    rows_ERD = hidden_TD[order].view(number, -1, hidden_TD.shape[-1])
    inner = experts._apply_gate(torch.bmm(rows_ERD, experts.gate_up_proj.transpose(1, 2)))
    out = torch.bmm(inner, experts.down_proj.transpose(1, 2)).flatten(0, 1)
    weighted = out * weights_TK.reshape(-1)[order][:, None]
    return weighted[order[: tokens * most]].view(tokens, most, -1).sum(1).to(hidden_TD.dtype)


def narrow(model: PackedModel, parts: int) -> None:
    """Shrink a fake model to one tensor-parallel part: its heads, and its part of the feed-forward width, of every
    expert's and of the vocabulary. The residual stream keeps its width. UserError: the model cannot be split so."""
    config = model.config
    check_tensor_parallel(config, parts, f"--ds_tensor_parallel_size {parts}")
    ways, made = FAMILIES[config.model_type], _Narrower(parts)
    for name, module in list(model.named_modules()):
        way = style_of(name, ways)
        if way is None or way is PerHead:
            continue
        base = getattr(module, "base_layer", module)
        if way is ParallelExperts:
            made.cut(base, "gate_up_proj", 1)
            made.cut(base, "down_proj", 2)
            continue
        # Key heads that cannot be divided are replicated in every process, which uses some of them.
        heads, keys = config.num_attention_heads, config.num_key_value_heads
        used = len(key_value_heads_used(heads, keys, parts, 0)) / keys if way is KeyValueLinear else None
        made.linear(base, 1 if way is RowwiseLinear else 0, used)
        for first in getattr(module, "lora_A", {}).values():
            if way is RowwiseLinear:
                made.linear(first, 1)
        for second in getattr(module, "lora_B", {}).values():
            if way is not RowwiseLinear:
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
        """`share`: the fraction of the dimension to keep, by default 1 / parts."""
        parameter = module._parameters[name]
        assert parameter is not None
        if id(parameter) not in self._made:
            shape = list(parameter.shape)
            size = shape[dimension]
            shape[dimension] = -(-size // self.parts) if share is None else round(size * share)
            empty = torch.empty(shape, dtype=parameter.dtype, device="meta")
            self._made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        module._parameters[name] = self._made[id(parameter)]
