"""Forward passes of the trainer's own model while it generates: reading prompts, decoding one token a sequence."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trimtab.data.batches import Span
from trimtab.errors import UserError
from trimtab.models.attention import PackedRow, carry, unpadded
from trimtab.models.lm_head import whole_logits
from trimtab.models.logits import shaped_logits
from trimtab.models.policy import Policy
from trimtab.rollout.builtin.attention import (
    NAME,
    Arguments,
    CachedAttention,
    Decoding,
    MeasuringAttention,
    Reading,
    register,
)
from trimtab.rollout.builtin.cache import KVCache, KVShape
from trimtab.rollout.builtin.continued import Continued, OnePart

if TYPE_CHECKING:
    from trimtab.rollout.builtin.fused_layers import FusedLayers
    from trimtab.rollout.builtin.kernels.steps import Begun


@contextlib.contextmanager
def generating(policy: Policy, attention: CachedAttention | MeasuringAttention) -> Iterator[None]:
    """The policy's layers attend by this, in evaluation mode."""
    register()
    before, training = policy.inner.config._attn_implementation, policy.training
    policy.inner.set_attn_implementation(NAME)
    policy.eval()
    carry(policy.inner, attention)
    try:
        yield
    finally:
        carry(policy.inner, None)  # nothing holds the memory any longer
        policy.inner.set_attn_implementation(before)
        policy.train(training)


class Runner:
    """To be entered: then the policy generates, until it is left."""

    def __init__(self, policy: Policy, cache: KVCache, fused: "FusedLayers | None" = None):
        """`fused`: the policy's layers, where that can be done."""
        self.policy, self.cache = policy, cache
        self.fused = None if fused is None or fused.failed else fused
        self.device = policy.device

    @staticmethod
    @torch.no_grad()
    def measure(policy: Policy) -> tuple[KVShape, list[Arguments]]:
        """What the model's layers keep of a token, and what each asks of its attention.

        Asked of them, since configurations name it differently."""
        attention = MeasuringAttention()
        with generating(policy, attention):
            one = torch.zeros((1, 1), dtype=torch.long, device=policy.device)
            policy.inner.base_model(input_ids=one, attention_mask=unpadded(one), position_ids=one, use_cache=False)
        shapes = [shape for shape, _ in attention.calls]
        if len(set(shapes)) != 1:
            raise UserError(
                f"the layers of {type(policy.inner).__name__} keep different keys; the engine needs equal ones"
            )
        return KVShape(len(shapes), *shapes[0]), [arguments for _, arguments in attention.calls]

    def __enter__(self) -> "Runner":
        self.attention = CachedAttention(self.cache)
        self._generating = generating(self.policy, self.attention)
        self._generating.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        del self.attention
        self._generating.__exit__(*exception)

    def read(self, sequences: list[tuple[list[int], int, list[int]]]) -> Tensor:
        """Read (ids, how many are cached already, pages) and return each one's last hidden state [S, D]."""
        spans, ids, positions, places, wholes, start = [], [], [], [], [], 0
        for tokens, done, pages in sequences:
            own = len(tokens) - done
            where = self.places(pages, len(tokens))
            spans.append(Span(start, own))
            ids += tokens[done:]
            positions.append(np.arange(done, len(tokens)))
            places.append(where[done:])
            wholes.append(where)
            start += own
        row, ids = PackedRow.of(spans, self.device), torch.tensor(ids, device=self.device)
        goes_on = any(done for _, done, _ in sequences)
        continued = Continued(spans, wholes, self.device) if goes_on else None
        hidden = self.hidden_of_row(row, ids, self._tensor(*positions), self._tensor(*places), continued)
        return hidden[[span.start + span.length - 1 for span in spans]]

    def read_answers(self, prompts: list[tuple[list[int], list[tuple[list[int], list[int]]]]]) -> None:
        """Read answers (ids, pages of the whole sequence) to prompts that are in their pages already. Each prompt's
        tokens stand in the row for its answers to look at, and are stored nowhere: attention is that of one packed
        row, where going on from pages would be several launches for every answer and layer."""
        spans, ids, positions, places, start = [], [], [], [], 0
        for prompt, answers in prompts:
            before, first = len(prompt), start
            spans.append(Span(start, before))
            ids += prompt
            positions.append(np.arange(before))
            places.append(np.zeros(before, dtype=np.int64))  # page 0, which nobody reads
            start += before
            for tokens, pages in answers:
                whole = before + len(tokens)
                spans.append(Span(start, len(tokens), first, before))
                ids += tokens
                positions.append(np.arange(before, whole))
                places.append(self.places(pages, whole)[before:])
                start += len(tokens)
        row = PackedRow.of(spans, self.device)
        self.hidden_of_row(row, self._tensor(np.array(ids)), self._tensor(*positions), self._tensor(*places))

    def _tensor(self, *parts: np.ndarray) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(self.device)

    def hidden_of_row(
        self,
        row: PackedRow,
        ids_T: Tensor,
        positions_T: Tensor,
        places_T: Tensor,
        continued: Continued | OnePart | None = None,
    ) -> Tensor:
        self.attention.begin(Reading(row, places_T, continued))
        return self._hidden(ids_T[None], positions_T[None], places_T)[0]

    def decode(self, tokens_B: Tensor, positions_B: Tensor, tables_BP: Tensor, idle_B: Tensor | None = None) -> Tensor:
        """The next hidden state of every sequence [B, D], from its newest token. Idle ones leave nothing behind."""
        size = self.cache.size
        page = tables_BP.gather(1, (positions_B // size)[:, None])[:, 0]
        if idle_B is not None:
            page = page.masked_fill(idle_B, 0)
        places = page * size + positions_B % size
        self.attention.begin(Decoding(places, tables_BP, positions_B + 1))
        return self._hidden(tokens_B[:, None], positions_B[:, None], places)[:, 0]

    def decode_from(self, begun: "Begun", tables_BP: Tensor) -> Tensor:
        """The same of fused layers, whose input is there."""
        assert self.fused is not None
        self.attention.begin(Decoding(begun.places_B, tables_BP, begun.lengths_B))
        attend, places = self.attention.attend, begun.places_B
        return self.fused.through(self.fused.all, begun.stream_BD, begun.angles, self.cache, places, attend)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        raw = whole_logits(hidden_ND, self.policy.head)
        return shaped_logits(raw, self.policy.logit_shape, 1.0)

    def _hidden(self, ids: Tensor, positions: Tensor, places_T: Tensor) -> Tensor:
        if self.fused is not None:
            given = ids.flatten(), positions.flatten(), self.cache, places_T, self.attention.attend
            try:
                return self.fused.hidden(*given).view(*ids.shape, -1)
            except Exception as error:
                if not self.fused.give_up_after(error):
                    raise
                self.fused = None  # and the modules write the same places anew
        inputs = {"input_ids": ids, "attention_mask": unpadded(ids), "position_ids": positions}
        return self.policy.inner.base_model(**inputs, use_cache=False).last_hidden_state

    def places(self, pages: list[int], length: int) -> np.ndarray:
        size, token = self.cache.size, np.arange(length)
        return np.asarray(pages)[token // size] * size + token % size
