"""Bytes that are alive while something is computed: what an allocator would have handed out, at each moment.

Every operation's results are looked at, and a storage counts from then until nobody holds it. What a kernel takes
and returns inside one call (workspaces of matrix products, partial sums of attention) is not seen.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
from trimtab.models.packed import PackedModel, cast_parameters, scoring
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
from trimtab.plan.workload import Rows


class LiveBytes(TorchDispatchMode):
    """Inside, `now` and `peak` count what has come into being since it was entered, without `known` tensors."""

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


# ---- experts of a mixture: which expert a token goes to follows from contents, and here are none: every expert
# gets as many tokens. What is kept is what Hugging Face's grouped products keep.


NAME = "trimtab_even"


def deal_evenly(model: nn.Module) -> None:
    """Let the experts of a skeleton run without a look at the routing, if it has any."""
    if not any(hasattr(module, "gate_up_proj") and hasattr(module, "has_gate") for module in model.modules()):
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if NAME not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(NAME, _even_experts)
    model.set_experts_implementation(NAME)


def _even_experts(experts: Any, hidden_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """E experts, each with as many rows of the T x K that were chosen."""
    tokens, most = chosen_TK.shape
    number = experts.gate_up_proj.shape[0]
    order = chosen_TK.new_empty(-(-tokens * most // number) * number)
    rows_ERD = hidden_TD[order].view(number, -1, hidden_TD.shape[-1])
    inner = experts._apply_gate(torch.bmm(rows_ERD, experts.gate_up_proj.transpose(1, 2)))
    out = torch.bmm(inner, experts.down_proj.transpose(1, 2)).flatten(0, 1)
    weighted = out * weights_TK.reshape(-1)[order][:, None]
    return weighted[order[: tokens * most]].view(tokens, most, -1).sum(1).to(hidden_TD.dtype)


# ---- a model without contents. A fake accelerator is the meta device, on which packed attention and the chunked head
# go the way they go on an accelerator. A fake CPU is torch's fake mode, in which they go the CPU's way.


class PretendedMainMemory(ActivationOffload):
    """What goes there takes no room here."""

    def _send_away(self, tensor: Tensor, before: OffloadedTensor | None) -> OffloadedTensor:
        return PretendedKept(tensor, before)


class PretendedKept(OffloadedTensor):
    def __init__(self, tensor: Tensor, before: OffloadedTensor | None):
        self.device, self.stream, self.before = tensor.device, None, before
        self._back, self._shape = None, (tensor.shape, tensor.dtype)

    def send_back(self) -> None:
        shape, dtype = self._shape
        self._back = torch.empty(shape, dtype=dtype, device=self.device) if self._back is None else self._back


@dataclass(frozen=True)
class PassBytes:
    kept: int
    """What the forward pass keeps for the backward pass: the activations."""
    peak: int
    """The most that is alive at once, activations included; weights and gradient sums are not."""


class Pretended:
    def __init__(self, model: PackedModel, options: TrainedModelOptions, *, accelerator: bool, frozen: bool = False):
        """`model`: a skeleton, which becomes this one's own; `frozen`: it only scores."""
        self.mode = contextlib.nullcontext() if accelerator else FakeTensorMode()
        self.device = torch.device("meta" if accelerator else "cpu")
        self.model, self.options = model, options
        self._sums: dict[str, Tensor] = {}
        self._hooked: set[str] = set()
        self._scored: dict[tuple[Rows, int], int] = {}
        model.config.pad_token_id = None  # else a model may look for it among the tokens, to warn
        register()
        model.inner.set_attn_implementation(ATTENTION)
        deal_evenly(model.inner)
        if frozen:
            model.requires_grad_(False)
        with self.mode:
            if not accelerator:
                _hollow(model)
            cast_parameters(model, torch.bfloat16 if options.bf16 else torch.float32)  # whatever its files hold
        if not frozen:
            enable_gradient_checkpointing(model, options)
        if not frozen and options.offload_activations and accelerator:
            model.activations = PretendedMainMemory(model)

    def weights(self) -> int:
        return sum(p.nbytes for p in self.model.parameters())

    def trained(self) -> int:
        """Parameters that are trained."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def masters(self) -> int:
        return sum(4 * p.numel() for p in self._trained() if p.dtype != torch.float32)

    def gradient_sums(self) -> int:
        return self.trained() * GRADIENT_DTYPES[self.options.grad_accum_dtype].itemsize

    def _trained(self) -> Iterator[nn.Parameter]:
        return (p for p in self.model.parameters() if p.requires_grad)

    @property
    def layers(self) -> int:
        return len(layers_of(self.model.inner))

    def training_pass(self, rows: Rows, tokens: int, recomputed: int | None = None) -> PassBytes:
        """A micro-batch after the first of a step: the gradient sums are there already. `recomputed`: how many of the
        layers recompute, if it is not the options that say it."""
        if recomputed is not None:
            set_checkpointed_layers(self.model.inner, recomputed)
        with self.mode:
            known = [*self.model.parameters(), *self.model.buffers(), *self._gradient_sums()]
            batch = self._batch(rows, tokens)
            self.model.train()
            with LiveBytes(known) as live:
                value = self._value(batch)
                kept = live.now
                value.backward()
            self._clear_gradients()
        return PassBytes(kept, live.peak)

    def plain_pass(self, rows: Rows, tokens: int) -> PassBytes:
        """The same where no layer recomputes."""
        layers = layers_of(self.model.inner) if self.options.gradient_checkpointing else []
        asked = [layer.gradient_checkpointing for layer in layers]
        for layer in layers:
            layer.gradient_checkpointing = False
        try:
            return self.training_pass(rows, tokens)
        finally:
            for layer, recomputes in zip(layers, asked, strict=True):
                layer.gradient_checkpointing = recomputes

    def scoring_pass(self, rows: Rows, tokens: int) -> int:
        """Counted once for a size, since it is the same however many layers recompute in training."""
        if (rows, tokens) not in self._scored:
            self._scored[rows, tokens] = self._scoring_pass(rows, tokens)
        return self._scored[rows, tokens]

    def _scoring_pass(self, rows: Rows, tokens: int) -> int:
        with self.mode, scoring(self.model):
            batch = self._batch(rows, tokens)
            with LiveBytes([*self.model.parameters(), *self.model.buffers()]) as live:
                self._value(batch)
        return live.peak

    def _batch(self, rows: Rows, tokens: int) -> TokenBatch:
        return TokenBatch.of(*rows.examples(tokens)).to(self.device)

    def _value(self, batch: TokenBatch) -> Tensor:
        out = self.model(batch)
        for name in ("log_probs_N", "scores_S"):
            out = getattr(out, name, out)
        return out.sum()

    def _gradient_sums(self) -> list[Tensor]:
        """What an earlier pass of the step has left, added up as the optimizer adds it up."""
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

    def _clear_gradients(self) -> None:
        self._sums.clear()
        for parameter in self._trained():
            parameter.grad = None


def _hollow(model: nn.Module) -> None:
    """Give every tensor of a skeleton a place on the CPU of the current fake mode; tied ones stay tied."""
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


# ---- a skeleton as narrow as what one process of a tensor-parallel model works with: its heads, its part of the
# feed-forward width, of every expert's and of the vocabulary. The residual stream keeps its width.


def narrow(model: PackedModel, parts: int) -> None:
    """In place, and only the shapes: contents there are none. A UserError: it cannot be cut so."""
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
        # Heads of keys that cannot be shared out are whole in every process, which uses some of them.
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
