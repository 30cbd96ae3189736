"""The model runner: forward passes of the trainer's own model for prefill and decode.

A pass goes through the model's modules, or through fused layers (fused_layers.py) if supported_models.py allows them.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trimtab.data.batches import Span
from trimtab.distributed.device import widest
from trimtab.errors import UserError
from trimtab.models.attention import PackedRow, carry, unpadded
from trimtab.models.lm_head import shaped_logits, whole_logits
from trimtab.models.policy import Policy
from trimtab.rollout.builtin.attention import (
    NAME,
    Arguments,
    AttentionProbe,
    CachedAttention,
    CachedPrefill,
    DecodeMetadata,
    PrefillMetadata,
    SinglePart,
    register,
)
from trimtab.rollout.builtin.kv_cache import KVCache, KVShape

if TYPE_CHECKING:
    from trimtab.rollout.builtin.kernels.decode_step import DecodeInputs
from trimtab.rollout.builtin.fused_layers import FusedLayers

_LOOKED_AT = 16  # numbers of every tensor


def switches(policy: Policy) -> tuple:
    """State of adapters, and number of modules with a replaced `forward`."""
    adapters = tuple(
        (module._disable_adapters, tuple(module.active_adapters), tuple(module.scaling.items()))
        for module in policy.modules()
        if hasattr(module, "_disable_adapters") and hasattr(module, "scaling")
    )
    return adapters, sum("forward" in vars(module) for module in policy.modules())


def is_sharded(policy: Policy) -> bool:
    """Whether its parameters are sharded over processes."""
    return any(hasattr(module, "unshard") for module in policy.modules())


@torch.no_grad()
def sampled_weights(policy: Policy) -> tuple:
    """Differs after every change of weights: torch counts in-place writes; for writes that bypass its counters
    (`.data`), a few numbers of every tensor are compared. Cached keys and values of other weights must not be used."""
    tensors = [*policy.parameters(), *policy.buffers()]
    counted = tuple((tensor.data_ptr(), tensor._version) for tensor in tensors)
    wide = widest(policy.device)
    looked_at = [tensor.reshape(-1)[:: max(1, tensor.numel() // _LOOKED_AT)].to(wide) for tensor in tensors]
    numbers = torch.cat(looked_at).cpu().numpy().tobytes() if looked_at else b""
    return counted, switches(policy), numbers


# ---- forward passes


@contextlib.contextmanager
def generating(policy: Policy, attention: CachedAttention | AttentionProbe) -> Iterator[None]:
    """Switch the policy to evaluation mode with this attention."""
    register()
    before, training = policy.inner.config._attn_implementation, policy.training
    policy.inner.set_attn_implementation(NAME)
    policy.eval()
    carry(policy.inner, attention)
    try:
        yield
    finally:
        carry(policy.inner, None)  # drop the reference to the KV cache
        policy.inner.set_attn_implementation(before)
        policy.train(training)


class ModelRunner:
    """A context manager: inside, the policy runs with the engine's attention."""

    def __init__(self, policy: Policy, cache: KVCache, fused: "FusedLayers | None" = None):
        """`fused`: the policy's layers, if they are supported."""
        self.policy, self.cache = policy, cache
        self.fused = None if fused is None or fused.failed else fused
        self.device = policy.device

    @staticmethod
    @torch.no_grad()
    def measure(policy: Policy) -> tuple[KVShape, list[Arguments]]:
        """Shape of the KV cache and arguments of every attention call, recorded in a forward pass of one token, because
        configurations name them differently."""
        attention = AttentionProbe()
        with generating(policy, attention):
            one = torch.zeros((1, 1), dtype=torch.long, device=policy.device)
            policy.inner.base_model(input_ids=one, attention_mask=unpadded(one), position_ids=one, use_cache=False)
        shapes = [shape for shape, _ in attention.calls]
        if len(set(shapes)) != 1:
            raise UserError(
                f"the layers of {type(policy.inner).__name__} keep different keys; the engine needs equal ones"
            )
        return KVShape(len(shapes), *shapes[0]), [arguments for _, arguments in attention.calls]

    def __enter__(self) -> "ModelRunner":
        self.attention = CachedAttention(self.cache)
        self._generating = generating(self.policy, self.attention)
        self._generating.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        del self.attention
        self._generating.__exit__(*exception)

    def prefill(self, sequences: list[tuple[list[int], int, list[int]]]) -> Tensor:
        """Prefill (ids, how many are cached, pages); returns the last hidden state of each [S, D]."""
        spans, ids, positions, slots, wholes, start = [], [], [], [], [], 0
        for tokens, done, pages in sequences:
            own = len(tokens) - done
            where = self.slots(pages, len(tokens))
            spans.append(Span(start, own))
            ids += tokens[done:]
            positions.append(np.arange(done, len(tokens)))
            slots.append(where[done:])
            wholes.append(where)
            start += own
        row, ids = PackedRow.of(spans, self.device), torch.tensor(ids, device=self.device)
        goes_on = any(done for _, done, _ in sequences)
        continued = CachedPrefill(spans, wholes, self.device) if goes_on else None
        hidden = self.hidden_states(row, ids, self._tensor(*positions), self._tensor(*slots), continued)
        return hidden[[span.start + span.length - 1 for span in spans]]

    def prefill_answers(self, prompts: list[tuple[list[int], list[tuple[list[int], list[int]]]]]) -> None:
        """Prefill answers (ids, pages of the whole sequence) to prompts that are cached. The prompts' tokens are in the
        row again for the answers to attend to, and are stored on page 0: attention of one packed row is faster than
        several launches for every answer and layer."""
        spans, ids, positions, slots, start = [], [], [], [], 0
        for prompt, answers in prompts:
            before, first = len(prompt), start
            spans.append(Span(start, before))
            ids += prompt
            positions.append(np.arange(before))
            slots.append(np.zeros(before, dtype=np.int64))  # page 0, which is never read
            start += before
            for tokens, pages in answers:
                whole = before + len(tokens)
                spans.append(Span(start, len(tokens), first, before))
                ids += tokens
                positions.append(np.arange(before, whole))
                slots.append(self.slots(pages, whole)[before:])
                start += len(tokens)
        row = PackedRow.of(spans, self.device)
        self.hidden_states(row, self._tensor(np.array(ids)), self._tensor(*positions), self._tensor(*slots))

    def _tensor(self, *parts: np.ndarray) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(self.device)

    def hidden_states(
        self,
        row: PackedRow,
        ids_T: Tensor,
        positions_T: Tensor,
        slot_mapping_T: Tensor,
        continued: CachedPrefill | SinglePart | None = None,
    ) -> Tensor:
        self.attention.begin(PrefillMetadata(row, slot_mapping_T, continued))
        return self._hidden(ids_T[None], positions_T[None], slot_mapping_T)[0]

    def decode(self, tokens_B: Tensor, positions_B: Tensor, tables_BP: Tensor, idle_B: Tensor | None = None) -> Tensor:
        """The next hidden state of every sequence [B, D], from its newest token. Idle ones write to page 0."""
        size = self.cache.size
        page = tables_BP.gather(1, (positions_B // size)[:, None])[:, 0]
        if idle_B is not None:
            page = page.masked_fill(idle_B, 0)
        slots = page * size + positions_B % size
        self.attention.begin(DecodeMetadata(slots, tables_BP, positions_B + 1))
        return self._hidden(tokens_B[:, None], positions_B[:, None], slots)[:, 0]

    def decode_from(self, decode_inputs: "DecodeInputs", tables_BP: Tensor) -> Tensor:
        """The same with fused layers, from prepared inputs."""
        assert self.fused is not None
        self.attention.begin(DecodeMetadata(decode_inputs.slot_mapping_B, tables_BP, decode_inputs.lengths_B))
        attend, slots = self.attention.attend, decode_inputs.slot_mapping_B
        return self.fused.run_layers(
            self.fused.all, decode_inputs.stream_BD, decode_inputs.angles, self.cache, slots, attend
        )

    def logits(self, hidden_ND: Tensor) -> Tensor:
        raw = whole_logits(hidden_ND, self.policy.head)
        return shaped_logits(raw, self.policy.logit_shape, 1.0)

    def _hidden(self, ids: Tensor, positions: Tensor, slot_mapping_T: Tensor) -> Tensor:
        if self.fused is not None:
            given = ids.flatten(), positions.flatten(), self.cache, slot_mapping_T, self.attention.attend
            try:
                return self.fused.hidden(*given).view(*ids.shape, -1)
            except Exception as error:
                if not self.fused.give_up_after(error):
                    raise
                self.fused = None  # the modules overwrite the same positions
        inputs = {"input_ids": ids, "attention_mask": unpadded(ids), "position_ids": positions}
        return self.policy.inner.base_model(**inputs, use_cache=False).last_hidden_state

    def slots(self, pages: list[int], length: int) -> np.ndarray:
        size, token = self.cache.size, np.arange(length)
        return np.asarray(pages)[token // size] * size + token % size
