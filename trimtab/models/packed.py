"""Hidden states of a batch without padding, from any Hugging Face model with a decoder-only backbone.

How the model is run is decided once, at load (see selfcheck):
- packed:  sequences in one row, our attention;
- padded:  sequences as padded rows through the model's own attention;
- logits:  padded rows and the model's own output, for heads we do not know. Right for any model, hungry for memory.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from trimtab.data.batches import TokenBatch
from trimtab.distributed.watch import pulse
from trimtab.models.attention import PackedPass, PackedRow

Path = Literal["packed", "padded", "logits"]
Routers = tuple[Tensor, ...] | None


class PackedModel(nn.Module):
    """A root module: a Hugging Face model (or a PEFT model around one) and what a job reads off its hidden states."""

    def __init__(self, model: nn.Module, path: Path = "packed"):
        super().__init__()
        self.model = model
        self.path = path
        self.attention = PackedPass()

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
        pulse.move()
        arguments = {"output_router_logits": True} if router else {}
        backbone = self.inner.base_model
        if self.path == "packed":
            self.attention.begin(self.inner, PackedRow.of(batch.spans, batch.ids_T.device))
            out = backbone(
                input_ids=batch.ids_T[None], position_ids=batch.positions_T[None], use_cache=False, **arguments
            )
            return out.last_hidden_state[0], out.router_logits if router else None
        rows = PaddedRows.of(batch)
        out = backbone(**rows.inputs, use_cache=False, **arguments)
        routers = tuple(r.view(-1, r.shape[-1])[rows.flat_T] for r in out.router_logits) if router else None
        return out.last_hidden_state.flatten(0, 1)[rows.flat_T], routers

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

    @classmethod
    def of(cls, batch: TokenBatch) -> "PaddedRows":
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
        rows, mask, flat = (torch.from_numpy(x).to(device) for x in (rows, mask, flat))
        return cls({"input_ids": batch.ids_T[rows] * mask, "attention_mask": mask}, flat)


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
