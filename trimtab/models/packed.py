"""`PackedModel`: the padding-free forward pass of a decoder-only Hugging Face model; base of policy, reward and critic.

The path is chosen once, at load (selfcheck):
- packed:  sequences in one row, with our attention;
- padded:  sequences as padded rows, with the model's own attention;
- logits:  padded rows and the model's own output, for unknown heads. Correct for any model, but needs much memory.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from trimtab.data.batches import TokenBatch
from trimtab.distributed.process_group import group_reduce
from trimtab.distributed.supervision import own_heartbeat
from trimtab.models import recurrent
from trimtab.models.activation_memory import ActivationOffload
from trimtab.models.attention import AttentionContext, PackedPass, PackedRow, unpadded
from trimtab.models.parallel.context_parallel import ContextParallel, ContextRow, Routers, TokenLocations
from trimtab.models.rotary import SequenceLengths, token_lengths

Path = Literal["packed", "padded", "logits"]
NOISE = ("jitter_noise", "input_jitter_noise", "moe_jitter_eps")
"""Of modules: by how much they change what they read, at random, in train mode."""
DRAWS = "router_jitter_noise"
"""Of PhiMoE's routers: how near an expert must be to the best one to be drawn in train mode."""


@dataclass
class RowStates:
    """Hidden states [N, D] of the requested tokens: all of them, or this process's."""

    states_ND: Tensor
    routers: Routers  # of all tokens of the row, or of this process's
    located: TokenLocations | None = None

    def own(self, values_N: Tensor) -> Tensor:
        """The values of this process's tokens, out of those of all requested tokens."""
        return values_N if self.located is None else values_N.index_select(0, self.located.here)

    def whole(self, values: Tensor) -> Tensor:
        """Values [N, ...] of all requested tokens, from those of each process's."""
        return values if self.located is None else self.located.gather(values)


def backbone_of(causal: nn.Module) -> nn.Module:
    """A Hugging Face model without its head."""
    return causal.model if causal.base_model is causal else causal.base_model  # Llama 4's prefix names nothing


class PackedModel(nn.Module):
    """A root module: a Hugging Face model (or a PEFT model around one), with access to its hidden states."""

    def __init__(self, model: nn.Module, path: Path = "packed"):
        super().__init__()
        self.model = model
        self.path = path
        self.not_packed = ""  # why another path was chosen
        self.not_exact = "not asked for"  # why its layers do not run on the engine's kernels (--exact)
        self.attention = PackedPass()
        self.context: ContextParallel | None = None  # the group that shares a row; None: this process alone
        self.rotary = SequenceLengths.install(self.inner)
        recurrent.install(self.inner)
        self.activations: ActivationOffload | None = None  # offload of activations; None: they stay on the device

    @property
    def inner(self) -> nn.Module:
        """The Hugging Face model, with adapters inside if there are any."""
        return self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model

    @property
    def config(self):
        return self.inner.config

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def hidden(self, batch: TokenBatch, *, router: bool = False) -> tuple[Tensor, Routers]:
        """Last hidden state of every token [T, D] and, if requested, each layer's router logits [T, experts]."""
        own_heartbeat.move()
        assert self.context is None, "context parallel: use `read`"
        if self.path == "packed":
            row = PackedRow.of(batch.spans, batch.ids_T.device)
            with self.rotary.of(token_lengths(batch.spans)):
                return self._run(row, batch.ids_T, batch.positions_T, router, batch.routes_TLK)
        rows = PaddedRows.of(batch, positions=self.rotary.shortest is not None)
        self.attention.begin(self.inner, None, rows.routes_TLK)
        with self.rotary.of(rows.lengths), self.attention.running():
            out = self._backbone(router, **rows.inputs)
        routers = tuple(r.view(-1, r.shape[-1])[rows.flat_T] for r in out.router_logits) if router else None
        return out.last_hidden_state.flatten(0, 1)[rows.flat_T], routers

    def read(self, batch: TokenBatch, rows_N: Tensor, *, router: bool = False) -> RowStates:
        """Like `hidden` for some tokens of the row; under context parallelism, for those among them in this process."""
        if self.context is None:
            hidden_TD, routers = self.hidden(batch, router=router)
            return RowStates(hidden_TD.index_select(0, rows_N), routers)
        own_heartbeat.move()
        row = ContextRow(batch.spans, self.context, batch.ids_T.device)
        lengths = token_lengths(batch.spans)[row.rows.cpu().numpy()] if self.rotary.shortest is not None else None
        with self.rotary.of(lengths):
            columns = (batch.ids_T, batch.positions_T, batch.routes_TLK)
            ids_T, positions_T, routes_TLK = (None if column is None else column[row.rows] for column in columns)
            hidden_TD, routers = self._run(row, ids_T, positions_T, router, routes_TLK)
        located = TokenLocations.of(row, rows_N)
        hidden_ND = hidden_TD.index_select(0, row.place_T[rows_N[located.here]])
        return RowStates(hidden_ND, routers and tuple(r[: row.tokens] for r in routers), located)

    def _run(
        self, row: AttentionContext, ids_T: Tensor, positions_T: Tensor, router: bool, routes_TLK: Tensor | None
    ) -> tuple[Tensor, Routers]:
        self.attention.begin(self.inner, row, routes_TLK)
        inputs = {"input_ids": ids_T[None], "attention_mask": unpadded(ids_T[None]), "position_ids": positions_T[None]}
        with self.attention.running():
            out = self._backbone(router, **inputs)
        return out.last_hidden_state[0], out.router_logits if router else None

    def own_logits(self, batch: TokenBatch, padding: int | None = None) -> "tuple[PaddedRows, Tensor]":
        """Padded rows and the model's own output for them. `padding`: the token that the model's code treats as
        padding."""
        self.attention.row = None
        rows = PaddedRows.of(batch, positions=self.rotary.shortest is not None)
        if padding is not None:
            rows.inputs["input_ids"].masked_fill_(rows.inputs["attention_mask"] == 0, padding)
        with self.rotary.of(rows.lengths):
            return rows, self.inner(**rows.inputs, use_cache=False).logits

    def _backbone(self, router: bool, **arguments: Any) -> Any:
        if router:
            arguments["output_router_logits"] = True
        away = self.activations if torch.is_grad_enabled() else None
        with contextlib.nullcontext() if away is None else away.instead():
            return backbone_of(self.inner)(**arguments, use_cache=False)

    def sum_over_row(self, values: Tensor) -> Tensor:
        """Sum over the processes that share a row."""
        return values if self.context is None else group_reduce(values, self.context.peers.group)

    # For the self-check: our values, and the model's own for each sequence alone.

    def check_values(self, batch: TokenBatch) -> Tensor:
        raise NotImplementedError

    def reference_values(self, batch: TokenBatch) -> Tensor:
        raise NotImplementedError


@dataclass
class PaddedRows:
    """A batch as right-padded rows, and the slot of each of its tokens."""

    inputs: dict[str, Tensor]
    flat_T: Tensor
    lengths: np.ndarray  # length of the sequence, for every slot
    routes_TLK: Tensor | None = None  # of the batch, for every slot

    @classmethod
    def of(cls, batch: TokenBatch, *, positions: bool = False) -> "PaddedRows":
        """`positions`: add position ids, for a model whose rotary frequencies depend on the sequence's length."""
        device = batch.ids_T.device
        width = max(span.whole_length for span in batch.spans)
        shape = (len(batch.spans), width)
        rows = np.zeros(shape, dtype=np.int64)
        mask = np.zeros(shape, dtype=np.int64)
        flat = np.empty(batch.tokens, dtype=np.int64)
        for i, span in enumerate(batch.spans):
            rows[i, : span.whole_length] = span.rows()
            mask[i, : span.whole_length] = 1
            first = i * width + span.prefix_length
            flat[span.start : span.start + span.length] = np.arange(first, first + span.length)
        lengths = np.repeat([[span.whole_length] for span in batch.spans], width, axis=1)
        rows, mask, flat = (torch.from_numpy(x).to(device) for x in (rows, mask, flat))
        inputs = {"input_ids": batch.ids_T[rows] * mask, "attention_mask": mask}
        if positions:
            # Padding gets positions inside the sequence, since the largest position selects the frequencies.
            places = np.minimum(np.arange(width), lengths - 1)
            inputs["position_ids"] = torch.from_numpy(places).to(device)
        routes_TLK = None if batch.routes_TLK is None else batch.routes_TLK[rows].flatten(0, 1)
        return cls(inputs, flat, lengths, routes_TLK)


def learned_positions(model: nn.Module) -> int | None:
    """Number of learned position embeddings; None for models that compute positions."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rsplit(".", 1)[-1] in ("wpe", "embed_positions"):
            return model.config.max_position_embeddings
    return None


@contextlib.contextmanager
def scoring(model: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients inside the context."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def switch_off_dropout(model: nn.Module) -> bool:
    """Switch off a model's own dropout; returns whether there was any. Its config is not changed.

    References and sampled log-probs have no dropout. With it, a policy would differ from itself: DPO would not start at
    log 2, and PPO's ratio would not be 1. Adapters add their own dropout later. Falcon's code reads its config in every
    pass, so its dropout (0 in all published models) stays.
    """
    found, routers = list(_dropouts(model)), list(_drawing_routers(model))
    for module, name in found:
        setattr(module, name, 0.0)
    for router in routers:
        router.training, router.train = False, MethodType(_as_it_is, router)
    return bool(found or routers)


def _as_it_is(module: nn.Module, mode: bool = True) -> nn.Module:
    """In place of a module's `train`."""
    return module


@contextlib.contextmanager
def dropout_off(model: nn.Module) -> Iterator[None]:
    """No dropout inside the context, in train mode too."""
    found = [(module, name, getattr(module, name)) for module, name in _dropouts(model)]
    routers = [(router, router.training) for router in _drawing_routers(model)]
    switch_off_dropout(model)
    try:
        yield
    finally:
        for module, name, probability in found:
            setattr(module, name, probability)
        for router, training in routers:
            del router.train
            router.training = training


def has_dropout(model: nn.Module) -> bool:
    return any(True for found in (_dropouts(model), _drawing_routers(model)) for _ in found)


def _dropouts(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Modules and names of their dropout probabilities above 0: dropout layers, attributes that attention layers and
    blocks pass to functions, and noise on what mixtures read."""
    for module in model.modules():
        is_layer = isinstance(module, nn.modules.dropout._DropoutNd)
        for name in ["p"] if is_layer else [name for name in vars(module) if "drop" in name or name in NOISE]:
            if isinstance(value := getattr(module, name), float) and value > 0:
                yield module, name


def _drawing_routers(model: nn.Module) -> Iterator[nn.Module]:
    """Routers that draw experts at random while they train (PhiMoE's), and are not kept from it yet."""
    for module in model.modules():
        noise = getattr(module, DRAWS, None)
        if isinstance(noise, float) and noise > 0 and "train" not in vars(module):
            yield module


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters, but not buffers: that would round rotary frequencies. Tied weights stay tied."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
