"""Attention of the engine: new tokens against the KV cache, through Hugging Face's attention interface.

- prefill: packed rows of prompt tokens, whose keys and values are stored on the way. Sequences with a cached prefix
  attend to it in the cache, by one of two ways with the same numbers: in one row by variable-length attention, if the
  device has it (`parts`), or batched by length (`alike`).
- decode: one token for each sequence, by the paged attention kernel, or without kernels on gathered pages.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trimtab.data.batches import Span, sent
from trimtab.distributed.device import has_kernels
from trimtab.models.attention import (
    LayerAttention,
    PackedRow,
    attend_masked,
    attend_varlen,
    carried,
    cumulative,
    register_attention,
    varlen_applies,
    with_window,
)
from trimtab.models.recurrent import Run
from trimtab.rollout.builtin.kv_cache import KVCache
from trimtab.rollout.builtin.state_cache import DecodeStates, PrefillStates, empty_cache

MOST_TOGETHER = 2**16  # tokens whose keys and values are copied at once, unless one sequence has more


@dataclass
class VarlenPart:
    """Sequences that attend in one call (models/attention.py); keys are those of the flattened cache."""

    own: slice  # their tokens in the row
    query_starts: Tensor
    key_starts: Tensor
    key_rows: Tensor
    longest: int


@dataclass
class SinglePart:
    """All sequences of a prefill that may be captured."""

    part: VarlenPart

    @property
    def parts(self) -> list[VarlenPart]:
        return [self.part]

    @property
    def alike(self) -> list[tuple[Tensor, Tensor]]:
        raise AssertionError("only with variable-length attention")


class CachedPrefill:
    """Index of a prefill in which some sequences have a cached prefix."""

    def __init__(self, spans: list[Span], slots: list[np.ndarray], device: torch.device):
        """All sequences of a row in order: `spans` of their new tokens in the row, `slots` of all tokens in the
        cache."""
        self.spans, self.slots, self.device = spans, slots, device

    @cached_property
    def parts(self) -> list[VarlenPart]:
        return [self._part(first, end) for first, end in self._ranges()]

    def _ranges(self) -> Iterator[tuple[int, int]]:
        first, total = 0, 0
        for number, slots in enumerate(self.slots):
            if number > first and total + len(slots) > MOST_TOGETHER:
                yield first, number
                first, total = number, 0
            total += len(slots)
        yield first, len(self.slots)

    def _part(self, first: int, end: int) -> VarlenPart:
        spans, slots = self.spans[first:end], self.slots[first:end]
        wholes = [len(own) for own in slots]
        return VarlenPart(
            slice(spans[0].start, spans[-1].start + spans[-1].length),
            sent(cumulative([span.length for span in spans]), self.device),
            sent(cumulative(wholes), self.device),
            sent(torch.from_numpy(np.concatenate(slots)), self.device),
            max(wholes),
        )

    @cached_property
    def alike(self) -> list[tuple[Tensor, Tensor]]:
        """Sequences with a prefix, grouped by length: new tokens in the row [S, new], slots of all tokens [S,
        whole]."""
        groups: dict[tuple[int, int], list[tuple[np.ndarray, np.ndarray]]] = {}
        for span, slots in zip(self.spans, self.slots):
            if len(slots) > span.length:
                own = np.arange(span.start, span.start + span.length)
                groups.setdefault((len(own), len(slots)), []).append((own, slots))
        found = []
        for (_, whole), group in groups.items():
            most = max(1, MOST_TOGETHER // whole)
            for first in range(0, len(group), most):
                own, slots = (np.stack(part) for part in zip(*group[first : first + most]))
                found.append((self._tensor(own), self._tensor(slots)))
        return found

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)


class GatheredKV:
    """Decoding without kernels: the pages of running sequences, gathered once for a chunk of steps.

    Gathering them in every step would cost more than attention itself, so each step's new tokens are added to a dense
    copy while the batch stays the same."""

    def __init__(self, cache: KVCache, tables_BP: Tensor):
        self.cache, self.tables_BP = cache, tables_BP
        self.width = tables_BP.shape[1] * cache.size
        self.first_B = torch.arange(len(tables_BP), device=tables_BP.device) * self.width
        self._layers: dict[int, list[Tensor]] = {}

    def keys_and_values(self, layer: int, new_BHD: tuple[Tensor, Tensor], positions_B: Tensor) -> list[Tensor]:
        """[B, heads, width, D] each, including the new tokens."""
        if layer in self._layers:
            slots = self.first_B + positions_B
            for block, new in zip(self._layers[layer], new_BHD):
                block.flatten(0, 1).index_copy_(0, slots, new)
        else:
            pages = self.tables_BP.flatten()
            self._layers[layer] = [
                tensor[layer].index_select(0, pages).view(len(self.tables_BP), self.width, *tensor[layer].shape[2:])
                for tensor in (self.cache.keys, self.cache.values)
            ]
        return [block.transpose(1, 2) for block in self._layers[layer]]


NAME = "trimtab_rollout"
Arguments = dict[str, Any]
"""Keyword arguments of a layer's attention call."""


@dataclass
class PrefillMetadata:
    row: PackedRow
    slot_mapping_T: Tensor
    continued: CachedPrefill | SinglePart | None = None  # if some sequences have a cached prefix
    states: PrefillStates | None = None  # if the model has recurrent layers


@dataclass
class DecodeMetadata:
    slot_mapping_B: Tensor
    tables_BP: Tensor  # block tables: pages of every sequence in order, padded by 0
    lengths_B: Tensor  # of the sequences, the new token included
    states: DecodeStates | None = None  # if the model has recurrent layers


class CachedAttention:
    """Attention of all layers to one KV cache, in the pass that was begun last."""

    is_begun = True

    def __init__(self, cache: KVCache):
        self.cache = cache
        self._pass: PrefillMetadata | DecodeMetadata | None = None
        self._calls = 0  # of this pass, so far
        self._window: GatheredKV | None = None  # of decode passes with the same block table

    def begin(self, current: PrefillMetadata | DecodeMetadata) -> None:
        self._pass, self._calls = current, 0
        if isinstance(current, PrefillMetadata) or has_kernels(current.slot_mapping_B.device):
            self._window = None
        elif self._window is None or self._window.tables_BP is not current.tables_BP:
            self._window = GatheredKV(self.cache, current.tables_BP)

    def mix(self, module: nn.Module, run: Run, hidden: Tensor) -> Tensor:
        """Run a recurrent module on the sequences of the pass."""
        assert self._pass is not None and self._pass.states is not None
        return self._pass.states.mix(run, hidden)

    def store_and_attend(self, query: Tensor, key: Tensor, value: Tensor, arguments: Arguments) -> Tensor:
        """Shapes as Hugging Face's: [B, heads, T, D] in, [B, T, heads, D] out.

        The n-th call of a pass uses the n-th layer of the cache. A module's index does not identify it: a model that
        runs its layers several times has other keys and values in each cycle."""
        current, layer = self._pass, self._calls
        self._calls += 1
        if isinstance(current, DecodeMetadata):
            new = key[:, :, 0], value[:, :, 0]
            self.cache.store(layer, *new, current.slot_mapping_B)
            return self._decode(current, query, layer, new, arguments)
        assert current is not None
        self.cache.store(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), current.slot_mapping_T)
        return self._read(current, query, key, value, layer, arguments)

    def attend(self, layer: int, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, arguments: Arguments) -> Tensor:
        """Like `store_and_attend` for fused layers, which store their keys and values themselves."""
        current = self._pass
        if isinstance(current, DecodeMetadata):
            return self._decode_by_kernel(current, query_THD, layer, arguments)
        assert current is not None
        query, key, value = (x.transpose(0, 1)[None] for x in (query_THD, key_THD, value_THD))
        return self._read(current, query, key, value, layer, arguments)[0]

    def _read(
        self, current: PrefillMetadata, query: Tensor, key: Tensor, value: Tensor, layer: int, arguments: Arguments
    ) -> Tensor:
        """query [1, heads, T, D] -> [1, T, heads, D]."""
        continued = current.continued
        if continued is not None and varlen_applies(query, value, LayerAttention.of(arguments, query)):
            return self._continue_in_one_row(query[0].transpose(0, 1), layer, continued, arguments)[None]
        out = current.row.attend(query, key, value, arguments)
        for own, slots in [] if continued is None else continued.alike:
            out[0, own] = self._continue(query[0][:, own].transpose(0, 1), layer, slots, arguments)
        return out

    def _decode(
        self, current: DecodeMetadata, query: Tensor, layer: int, new: tuple[Tensor, Tensor], arguments: Arguments
    ) -> Tensor:
        """query [B, heads, 1, D] -> [B, 1, heads, D]."""
        if self._window is None:
            return self._decode_by_kernel(current, query[:, :, 0], layer, arguments)[:, None]
        longest = int(current.lengths_B.max())
        whole = self._window.keys_and_values(layer, new, current.lengths_B - 1)
        keys, values = (t[:, :, :longest] for t in whole)
        position = torch.arange(keys.shape[2], device=query.device)
        settings = LayerAttention.of(arguments, query)
        seen = settings.seen(current.lengths_B - 1, position)[:, None, None]
        # Query heads that share a key head are computed together.
        together = query.view(len(query), keys.shape[1], -1, query.shape[-1])
        sinks = None if settings.sinks is None else settings.sinks.view(keys.shape[1], -1, 1)
        mixed = attend_masked(together, keys, values, seen, settings.scale, settings.softcap, sinks=sinks)
        return mixed.reshape(len(query), 1, query.shape[1], -1)

    def _decode_by_kernel(self, current: DecodeMetadata, query_BHD: Tensor, layer: int, arguments: Arguments) -> Tensor:
        from trimtab.rollout.builtin.kernels.paged_attention import paged_attention

        return paged_attention(
            query_BHD,
            self.cache.keys[layer],
            self.cache.values[layer],
            current.tables_BP,
            current.lengths_B,
            scale=arguments.get("scaling") or query_BHD.shape[-1] ** -0.5,
            softcap=arguments.get("softcap"),
            window=arguments.get("sliding_window"),
            chunk=arguments.get("chunk"),
            sinks=arguments.get("s_aux"),
            splits=arguments.get("splits"),
        )

    def _continue_in_one_row(
        self, query_THD: Tensor, layer: int, continued: CachedPrefill | SinglePart, arguments: Arguments
    ) -> Tensor:
        """New tokens of all sequences against all tokens of each."""
        keys, values = (t[layer].flatten(0, 1) for t in (self.cache.keys, self.cache.values))
        scale, window = arguments.get("scaling") or query_THD.shape[-1] ** -0.5, arguments.get("sliding_window")
        found = []
        for part in continued.parts:
            near = window if window is not None and window < part.longest else None
            fused = arguments.get("fused", False)
            found.append(attend_varlen(query_THD[part.own], keys, values, part, scale, near, fused=fused))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _continue(self, query: Tensor, layer: int, slots: Tensor, arguments: Arguments) -> Tensor:
        """New tokens of equally long sequences against all their tokens. query [S, heads, new, D] -> [S, new, heads,
        D]."""
        stored = (self.cache.keys, self.cache.values)
        keys, values = (t[layer].flatten(0, 1)[slots].transpose(1, 2) for t in stored)
        new, whole = query.shape[2], keys.shape[2]
        position, settings = torch.arange(whole, device=query.device), LayerAttention.of(arguments, query)
        seen = settings.seen(position[whole - new :], position)
        sinks = None if settings.sinks is None else settings.sinks[:, None, None]
        return attend_masked(query, keys, values, seen, settings.scale, settings.softcap, sinks=sinks).transpose(1, 2)


class AttentionProbe:
    """Takes the place of a model's attention to record its shapes and arguments."""

    is_begun = True

    def __init__(self, config: Any):
        self.states = empty_cache(config)
        self.calls: list[tuple[tuple[int, int, int], Arguments]] = []
        """For each call: the shape of a token's KV (heads, key width, value width), and its arguments."""
        self.dtype = torch.float32

    def mix(self, module: nn.Module, run: Run, hidden: Tensor) -> Tensor:
        return run(hidden, self.states)

    def store_and_attend(self, query: Tensor, key: Tensor, value: Tensor, arguments: Arguments) -> Tensor:
        self.calls.append(((key.shape[1], key.shape[-1], value.shape[-1]), arguments))
        self.dtype = key.dtype
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2)


def rollout_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    attention: CachedAttention | AttentionProbe = carried(module)
    arguments = with_window(module, attention_mask, arguments)
    return attention.store_and_attend(query, key, value, arguments), None


def register() -> None:
    register_attention(NAME, rollout_attention)
