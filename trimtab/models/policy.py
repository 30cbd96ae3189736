"""The root module of everything trained here: a Hugging Face causal LM seen as log-probabilities of tokens.

One batch record goes in (samples without padding), log-probs of the trained tokens come out. How the model is run
is decided once, at load (see selfcheck):
- packed:  samples in one row, our attention, chunked LM head;
- padded:  samples as padded rows through the model's own attention, chunked LM head;
- logits:  padded rows and the model's own logits, for heads we do not know. Right for any model, hungry for memory.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from trimtab.data.batches import TokenBatch
from trimtab.models.attention import PackedRow, set_row
from trimtab.models.lm_head import LogitShape, token_log_probs

Path = Literal["packed", "padded", "logits"]


@dataclass
class PolicyOutput:
    log_probs_N: Tensor
    entropy_N: Tensor | None = None
    router_logits: tuple[Tensor, ...] | None = None  # one [T, experts] a layer, real tokens only


class Policy(nn.Module):
    def __init__(self, model: nn.Module, path: Path = "packed"):
        """`model` is a causal LM or a PEFT model around one; `path` how it is run."""
        super().__init__()
        self.model = model
        self.path = path

    @property
    def causal(self) -> nn.Module:
        """The Hugging Face model itself, adapters inside it if there are any."""
        return self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model

    @property
    def config(self):
        return self.causal.config

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(
        self, batch: TokenBatch, *, temperature: float = 1.0, entropy: bool = False, router: bool = False
    ) -> PolicyOutput:
        if self.path == "logits":
            return self._from_logits(batch, temperature, entropy)
        hidden_TD, router_logits = self._hidden(batch, router)
        log_probs, entropies = token_log_probs(
            hidden_TD.index_select(0, batch.predictors_N),
            self.causal.get_output_embeddings(),
            batch.targets_N,
            shape=LogitShape.of(self.config),
            temperature=temperature,
            entropy=entropy,
        )
        return PolicyOutput(log_probs, entropies, router_logits)

    def _hidden(self, batch: TokenBatch, router: bool) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        arguments = {"output_router_logits": True} if router else {}
        backbone = self.causal.base_model
        if self.path == "packed":
            set_row(PackedRow.of(batch.lengths, batch.ids_T.device))
            out = backbone(
                input_ids=batch.ids_T[None], position_ids=batch.positions_T[None], use_cache=False, **arguments
            )
            return out.last_hidden_state[0], out.router_logits if router else None
        rows = PaddedRows.of(batch)
        out = backbone(**rows.inputs, use_cache=False, **arguments)
        routers = tuple(r.view(-1, r.shape[-1])[rows.flat_T] for r in out.router_logits) if router else None
        return out.last_hidden_state.flatten(0, 1)[rows.flat_T], routers

    def _from_logits(self, batch: TokenBatch, temperature: float, entropy: bool) -> PolicyOutput:
        rows = PaddedRows.of(batch)
        logits = self.causal(**rows.inputs, use_cache=False).logits.flatten(0, 1)
        logits = logits[rows.flat_T[batch.predictors_N]].float() / temperature
        log_probs = logits.log_softmax(-1)
        entropies = -(log_probs.exp() * log_probs).sum(-1) if entropy else None
        return PolicyOutput(log_probs.gather(-1, batch.targets_N[:, None])[:, 0], entropies)


@dataclass
class PaddedRows:
    """The same batch as right-padded rows, and where each of its tokens went."""

    inputs: dict[str, Tensor]
    flat_T: Tensor

    @classmethod
    def of(cls, batch: TokenBatch) -> "PaddedRows":
        device = batch.ids_T.device
        width = max(batch.lengths)
        row_T = torch.arange(len(batch.lengths), device=device).repeat_interleave(
            torch.tensor(batch.lengths, device=device)
        )
        flat_T = row_T * width + batch.positions_T
        shape = (len(batch.lengths), width)
        ids = torch.zeros(shape, dtype=torch.long, device=device)
        ids.view(-1)[flat_T] = batch.ids_T
        mask = torch.zeros(shape, dtype=torch.long, device=device)
        mask.view(-1)[flat_T] = 1
        return cls({"input_ids": ids, "attention_mask": mask}, flat_T)
