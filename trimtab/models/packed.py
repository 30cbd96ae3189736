"""`PackedModel`: the padding-free forward pass of any decoder-only Hugging Face model; base of policy, reward model
and critic.

How the model is run is decided once, at load (see selfcheck):
- packed:  sequences in one row, our attention;
- padded:  sequences as padded rows through the model's own attention;
- logits:  padded rows and the model's own output, for heads we do not know. Right for any model, hungry for memory.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from trimtab.data.batches import TokenBatch
from trimtab.distributed.collectives import group_reduce
from trimtab.distributed.supervision import own_heartbeat
from trimtab.models.activation_memory import ActivationOffload
from trimtab.models.attention import AttentionContext, PackedPass, PackedRow, unpadded
from trimtab.models.parallel.context_parallel import ContextParallel, ContextRow, Routers, RowStates, TokenLocations
from trimtab.models.rotary import SequenceLengths, token_lengths

Path = Literal["packed", "padded", "logits"]


class PackedModel(nn.Module):
    """A root module: a Hugging Face model (or a PEFT model around one) and what a job reads off its hidden states."""

    def __init__(self, model: nn.Module, path: Path = "packed"):
        super().__init__()
        self.model = model
        self.path = path
        self.not_packed = ""  # why, where another path was chosen
        self.attention = PackedPass()
        self.context: ContextParallel | None = None  # with whom this process works on a row; None: alone
        self.rotary = SequenceLengths.install(self.inner)
        self.activations: ActivationOffload | None = None  # where those of layers await the backward pass; None: here

    @property
    def inner(self) -> nn.Module:
        """The Hugging Face model itself, adapters inside it if there are any."""
        return self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model

    @property
    def config(self):
        return self.inner.config

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def hidden(self, batch: TokenBatch, *, router: bool = False) -> tuple[Tensor, Routers]:
        """Last hidden state of every token [T, D], and each layer's router logits [T, experts] when asked for."""
        own_heartbeat.move()
        assert self.context is None, "no process has all of them"
        if self.path == "packed":
            row = PackedRow.of(batch.spans, batch.ids_T.device)
            with self.rotary.of(token_lengths(batch.spans)):
                return self._run(row, batch.ids_T, batch.positions_T, router)
        rows = PaddedRows.of(batch, positions=self.rotary.shortest is not None)
        with self.rotary.of(rows.lengths):
            out = self._backbone(router, **rows.inputs)
        routers = tuple(r.view(-1, r.shape[-1])[rows.flat_T] for r in out.router_logits) if router else None
        return out.last_hidden_state.flatten(0, 1)[rows.flat_T], routers

    def read(self, batch: TokenBatch, rows_N: Tensor, *, router: bool = False) -> RowStates:
        """The same of some tokens of the row; where processes share it, of those among them that are here."""
        if self.context is None:
            hidden_TD, routers = self.hidden(batch, router=router)
            return RowStates(hidden_TD.index_select(0, rows_N), routers)
        own_heartbeat.move()
        row = ContextRow(batch.spans, self.context, batch.ids_T.device)
        lengths = token_lengths(batch.spans)[row.rows.cpu().numpy()] if self.rotary.shortest is not None else None
        with self.rotary.of(lengths):
            hidden_TD, routers = self._run(row, batch.ids_T[row.rows], batch.positions_T[row.rows], router)
        located = TokenLocations.of(row, rows_N)
        hidden_ND = hidden_TD.index_select(0, row.place_T[rows_N[located.here]])
        return RowStates(hidden_ND, routers and tuple(r[: row.tokens] for r in routers), located)

    def _run(self, row: AttentionContext, ids_T: Tensor, positions_T: Tensor, router: bool) -> tuple[Tensor, Routers]:
        self.attention.begin(self.inner, row)
        inputs = {"input_ids": ids_T[None], "attention_mask": unpadded(ids_T[None]), "position_ids": positions_T[None]}
        out = self._backbone(router, **inputs)
        return out.last_hidden_state[0], out.router_logits if router else None

    def own_logits(self, batch: TokenBatch, padding: int | None = None) -> "tuple[PaddedRows, Tensor]":
        """Padded rows and the model's own output for them. `padding`: the token that its code takes for padding."""
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
            return self.inner.base_model(**arguments, use_cache=False)

    def sum_over_row(self, values: Tensor) -> Tensor:
        """Sums over the tokens of a row, from sums over those that are here."""
        return values if self.context is None else group_reduce(values, self.context.peers.group)

    # What the self-check compares: our values, and the model's own for each sequence alone.

    def check_values(self, batch: TokenBatch) -> Tensor:
        raise NotImplementedError

    def reference_values(self, batch: TokenBatch) -> Tensor:
        raise NotImplementedError


@dataclass
class PaddedRows:
    """The same batch as right-padded rows, and where each of its tokens went."""

    inputs: dict[str, Tensor]
    flat_T: Tensor
    lengths: np.ndarray  # of the sequence of every slot

    @classmethod
    def of(cls, batch: TokenBatch, *, positions: bool = False) -> "PaddedRows":
        """`positions`: the inputs name those of each row, for a model that does not treat all rows alike."""
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
            # Those of padding are within the sequence too: the largest position decides.
            places = np.minimum(np.arange(width), lengths - 1)
            inputs["position_ids"] = torch.from_numpy(places).to(device)
        return cls(inputs, flat, lengths)


def learned_positions(model: nn.Module) -> int | None:
    """How many positions a model knows that learns a vector for each; None for the others, which compute them."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rsplit(".", 1)[-1] in ("wpe", "embed_positions"):
            return model.config.max_position_embeddings
    return None


@contextlib.contextmanager
def scoring(model: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients, whatever the model was doing."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def switch_off_dropout(model: nn.Module) -> bool:
    """Switch a model's own dropout off; whether there was any. Its config keeps what it says.

    What updates are compared with - a reference, the log-probs as they were sampled - is scored without dropout. With
    it a policy differs from itself: DPO does not start at log 2, and PPO's ratio is not 1. Adapters bring their own
    dropout later. Falcon's code reads its config in every pass: what that says (0 in all that are published) stays.
    """
    found = list(_dropouts(model))
    for module, name in found:
        setattr(module, name, 0.0)
    return bool(found)


def has_dropout(model: nn.Module) -> bool:
    return any(True for _ in _dropouts(model))


def _dropouts(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Modules and the names of their probabilities above 0: dropout layers, and what attention layers and blocks pass
    to functions."""
    for module in model.modules():
        is_layer = isinstance(module, nn.modules.dropout._DropoutNd)
        for name in ["p"] if is_layer else [name for name in vars(module) if "drop" in name]:
            if isinstance(value := getattr(module, name), float) and value > 0:
                yield module, name


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters only: casting buffers too would round the rotary frequencies. Tied weights stay tied."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
