"""A model without contents whose passes can be run for the memory they take: any size, in a second, on any machine.

A pretended accelerator is torch's meta device, on which packed attention and the chunked head go the way they go on an
accelerator. A pretended CPU is torch's fake mode, in which they go the CPU's way, kernel by kernel.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trimtab.config.groups import UpdateOptions
from trimtab.data.batches import TokenBatch
from trimtab.distributed.sharding import GRADIENT_DTYPES
from trimtab.models.attention import NAME as ATTENTION
from trimtab.models.attention import register
from trimtab.models.load import TrainedModelOptions, cast_parameters
from trimtab.models.offloading import Kept, MainMemory
from trimtab.models.packed import PackedModel, scoring
from trimtab.models.recomputing import layers_of, recompute, spread
from trimtab.plan.experts import deal_evenly
from trimtab.plan.live import LiveBytes
from trimtab.plan.work import Rows
from trimtab.train.optimiser import Optimiser


class PretendedMainMemory(MainMemory):
    """What goes there takes no room here."""

    def _send_away(self, tensor: Tensor, before: Kept | None) -> Kept:
        return PretendedKept(tensor, before)


class PretendedKept(Kept):
    def __init__(self, tensor: Tensor, before: Kept | None):
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
        self.optimiser: Optimiser | None = None
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
            recompute(model, options)
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
            spread(self.model.inner, recomputed)
        with self.mode:
            optimiser = self._optimiser()
            gradients = [p.grad for p in self._trained() if p.grad is not None]
            known = [*self.model.parameters(), *self.model.buffers(), *gradients]
            known += [*optimiser.masters.values(), *optimiser.accumulated.values()]
            batch = self._batch(rows, tokens)
            self.model.train()
            with LiveBytes(known) as live:
                value = self._value(batch)
                kept = live.now
                value.backward()
            optimiser.clear_gradients()
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

    def _optimiser(self) -> Optimiser:
        """The real one, whose hooks take gradients out of a backward pass, with sums that an earlier pass has left."""
        settings = replace(UpdateOptions(), lr_scheduler="constant")
        dtype = GRADIENT_DTYPES[self.options.grad_accum_dtype]
        if self.optimiser is None:  # its hooks stay, so there is one
            arguments = {"learning_rate": 0.0, "fused": False, "gradient_dtype": dtype}
            self.optimiser = Optimiser(self.model.model, settings, 1, **arguments)
        optimiser = self.optimiser
        for name, parameter in optimiser.working.items():
            if parameter.dtype == dtype:
                parameter.grad = torch.empty_like(parameter)
            else:
                optimiser.accumulated[name] = torch.empty_like(parameter, dtype=dtype)
        return optimiser


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
