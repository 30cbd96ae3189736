"""Forward passes of the trainer's own model while it generates: reading prompts, decoding one token a sequence."""

import numpy as np
import torch
from torch import Tensor

from trimtab.data.batches import Span
from trimtab.errors import UserError
from trimtab.models.attention import PackedRow
from trimtab.models.lm_head import raw_logits, shaped_logits
from trimtab.models.policy import Policy
from trimtab.rollout.builtin.attention import NAME, Decoding, Measuring, Reading, attend, register, set_pass
from trimtab.rollout.builtin.cache import KVCache, KVShape


class Runner:
    def __init__(self, policy: Policy, cache: KVCache | None, fused=None):
        """`fused`: the model's FusedLayers, if it has any."""
        register()
        self.policy, self.cache, self.fused = policy, cache, fused
        self.device = policy.device

    @classmethod
    @torch.no_grad()
    def measure(cls, policy: Policy) -> tuple[KVShape, list[dict]]:
        """What the model's layers keep of a token, and what each asks of its attention.

        Asked of them, since configurations name it differently."""
        with cls(policy, None) as runner:
            found = Measuring([])
            set_pass(None, found)
            one = torch.zeros((1, 1), dtype=torch.long, device=runner.device)
            runner._hidden(one, one, None)
        shapes = [shape for shape, _ in found.calls]
        if len(set(shapes)) != 1:
            raise UserError(
                f"the layers of {type(policy.inner).__name__} keep different keys; the engine needs equal ones"
            )
        heads, width, dtype = shapes[0]
        return KVShape(len(shapes), heads, width, dtype), [arguments for _, arguments in found.calls]

    def __enter__(self) -> "Runner":
        self._before = self.policy.inner.config._attn_implementation, self.policy.training
        self.policy.inner.set_attn_implementation(NAME)
        self.policy.eval()
        return self

    def __exit__(self, *_) -> None:
        set_pass(None, None)  # nothing holds the memory any longer
        implementation, training = self._before
        self.policy.inner.set_attn_implementation(implementation)
        self.policy.train(training)

    def read(self, sequences: list[tuple[list[int], int, list[int]]]) -> Tensor:
        """Read (ids, how many are cached already, pages) and return each one's last hidden state [S, D]."""
        spans, ids, positions, places, cached, start = [], [], [], [], [], 0
        for tokens, done, pages in sequences:
            own = len(tokens) - done
            where = self.places(pages, len(tokens))
            spans.append(Span(start, own))
            ids += tokens[done:]
            positions.append(np.arange(done, len(tokens)))
            places.append(where[done:])
            if done:
                cached.append((slice(start, start + own), torch.from_numpy(where).to(self.device)))
            start += own
        tensor = lambda parts: torch.from_numpy(np.concatenate(parts)).to(self.device)  # noqa: E731
        ids = torch.tensor(ids, device=self.device)
        hidden = self.hidden_of_row(PackedRow.of(spans, self.device), ids, tensor(positions), tensor(places), cached)
        return hidden[[span.start + span.length - 1 for span in spans]]

    def hidden_of_row(self, row: PackedRow, ids_T: Tensor, positions_T: Tensor, places_T: Tensor, cached) -> Tensor:
        set_pass(self.cache, Reading(row, places_T, cached))
        return self._hidden(ids_T[None], positions_T[None], places_T)[0]

    def decode(self, tokens_B: Tensor, positions_B: Tensor, tables_BP: Tensor, idle_B: Tensor | None = None) -> Tensor:
        """The next hidden state of every sequence [B, D], from its newest token. Idle ones leave nothing behind."""
        size = self.cache.size
        page = tables_BP.gather(1, (positions_B // size)[:, None])[:, 0]
        if idle_B is not None:
            page = page.masked_fill(idle_B, 0)
        places = page * size + positions_B % size
        set_pass(self.cache, Decoding(places, tables_BP, positions_B + 1))
        return self._hidden(tokens_B[:, None], positions_B[:, None], places)[:, 0]

    def logits(self, hidden_ND: Tensor) -> Tensor:
        head = self.policy.head
        plain = type(head) is torch.nn.Linear
        raw = raw_logits(hidden_ND, head.weight, head.bias) if plain else head(hidden_ND)
        return shaped_logits(raw, self.policy.logit_shape, 1.0)

    def _hidden(self, ids: Tensor, positions: Tensor, places_T: Tensor | None) -> Tensor:
        if self.fused is not None:
            hidden = self.fused.hidden(ids.flatten(), positions.flatten(), self.cache, places_T, attend)
            return hidden.view(*ids.shape, -1)
        backbone = self.policy.inner.base_model
        return backbone(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state

    def places(self, pages: list[int], length: int) -> np.ndarray:
        size, token = self.cache.size, np.arange(length)
        return np.asarray(pages)[token // size] * size + token % size
