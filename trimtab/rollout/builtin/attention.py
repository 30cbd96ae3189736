"""Attention while generating: new tokens against what is in the cache, through Hugging Face's attention interface.

Two kinds of pass:
- reading:  packed rows of prompt tokens; their keys and values are stored on the way. A sequence whose beginning is in
            the cache already attends to it there.
- decoding: one token a sequence.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimtab.distributed.device import has_kernels
from trimtab.models.attention import PackedRow, attend_packed, carried, register_attention, with_window
from trimtab.models.varlen import attend_varlen, varlen_applies
from trimtab.rollout.builtin.cache import KVCache
from trimtab.rollout.builtin.continued import Continued, OnePart
from trimtab.rollout.builtin.dense import DenseWindow

NAME = "trimtab_rollout"
Arguments = dict[str, Any]
"""What a layer asks of its attention."""


@dataclass
class Reading:
    row: PackedRow
    places_T: Tensor
    continued: Continued | OnePart | None = None  # its sequences, where some go on from the cache


@dataclass
class Decoding:
    places_B: Tensor
    tables_BP: Tensor  # pages of every sequence, in order; 0 where there is none
    lengths_B: Tensor  # tokens to look at, the new one included


class CachedAttention:
    """The attention of one model's layers to one cache, in the pass that was begun last."""

    def __init__(self, cache: KVCache):
        self.cache = cache
        self._pass: Reading | Decoding | None = None
        self._calls = 0  # of this pass, so far
        self._window: DenseWindow | None = None  # of the decoding passes that share a table

    def begin(self, current: Reading | Decoding) -> None:
        self._pass, self._calls = current, 0
        if isinstance(current, Reading) or has_kernels(current.places_B.device):
            self._window = None
        elif self._window is None or self._window.tables_BP is not current.tables_BP:
            self._window = DenseWindow(self.cache, current.tables_BP)

    def store_and_attend(self, query: Tensor, key: Tensor, value: Tensor, arguments: Arguments) -> Tensor:
        """Shapes as Hugging Face's: [B, heads, T, D] in, [B, T, heads, D] out.

        Calls have their layer of the cache in the order in which they come, which is the same in every pass. A module's
        number will not do: a model that runs its layers in several cycles has other keys and values in each."""
        current, layer = self._pass, self._calls
        self._calls += 1
        if isinstance(current, Decoding):
            new = key[:, :, 0], value[:, :, 0]
            self.cache.store(layer, *new, current.places_B)
            return self._decode(current, query, layer, new, arguments)
        assert current is not None
        self.cache.store(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), current.places_T)
        return self._read(current, query, key, value, layer, arguments)

    def attend(self, layer: int, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, arguments: Arguments) -> Tensor:
        """The same for layers that store their keys and values themselves, and only where there are kernels."""
        current = self._pass
        if isinstance(current, Decoding):
            return self._decode_by_kernel(current, query_THD, layer, arguments)
        assert current is not None
        query, key, value = (x.transpose(0, 1)[None] for x in (query_THD, key_THD, value_THD))
        return self._read(current, query, key, value, layer, arguments)[0]

    def _read(
        self, current: Reading, query: Tensor, key: Tensor, value: Tensor, layer: int, arguments: Arguments
    ) -> Tensor:
        """query [1, heads, T, D] -> [1, T, heads, D]."""
        continued = current.continued
        if continued is not None and varlen_applies(query, value, arguments.get("softcap"), 0.0):
            return self._continue_in_one_row(query[0].transpose(0, 1), layer, continued, arguments)[None]
        out = attend_packed(current.row, query, key, value, arguments)
        for own, places in [] if continued is None else continued.alike:
            out[0, own] = self._continue(query[0][:, own].transpose(0, 1), layer, places, arguments)
        return out

    def _decode(
        self, current: Decoding, query: Tensor, layer: int, new: tuple[Tensor, Tensor], arguments: Arguments
    ) -> Tensor:
        """query [B, heads, 1, D] -> [B, 1, heads, D]."""
        if self._window is None:
            return self._decode_by_kernel(current, query[:, :, 0], layer, arguments)[:, None]
        longest = int(current.lengths_B.max())
        whole = self._window.keys_and_values(layer, new, current.lengths_B - 1)
        keys, values = (t[:, :, :longest] for t in whole)
        position = torch.arange(keys.shape[2], device=query.device)
        seen = position < current.lengths_B[:, None]
        if arguments.get("sliding_window") is not None:
            seen &= position >= current.lengths_B[:, None] - arguments["sliding_window"]
        # The query heads that share a key head read it together.
        together = query.view(len(query), keys.shape[1], -1, query.shape[-1])
        mixed = _attend(together, keys, values, seen[:, None, None], arguments)
        return mixed.reshape(len(query), 1, query.shape[1], -1)

    def _decode_by_kernel(self, current: Decoding, query_BHD: Tensor, layer: int, arguments: Arguments) -> Tensor:
        from trimtab.rollout.builtin.kernels.attention import paged_attention

        return paged_attention(
            query_BHD,
            self.cache.keys[layer],
            self.cache.values[layer],
            current.tables_BP,
            current.lengths_B,
            scale=arguments.get("scaling") or query_BHD.shape[-1] ** -0.5,
            softcap=arguments.get("softcap"),
            window=arguments.get("sliding_window"),
        )

    def _continue_in_one_row(
        self, query_THD: Tensor, layer: int, continued: Continued | OnePart, arguments: Arguments
    ) -> Tensor:
        """Own tokens of all sequences against the whole of each."""
        keys, values = (t[layer].flatten(0, 1) for t in (self.cache.keys, self.cache.values))
        scale, window = arguments.get("scaling") or query_THD.shape[-1] ** -0.5, arguments.get("sliding_window")
        found = []
        for part in continued.parts:
            near = window if window is not None and window < part.longest else None
            found.append(attend_varlen(query_THD[part.own], keys, values, part, scale, near))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _continue(self, query: Tensor, layer: int, places: Tensor, arguments: Arguments) -> Tensor:
        """The last tokens of sequences against all of them. query [S, heads, new, D] -> [S, new, heads, D]."""
        stored = (self.cache.keys, self.cache.values)
        keys, values = (t[layer].flatten(0, 1)[places].transpose(1, 2) for t in stored)
        new, whole = query.shape[2], keys.shape[2]
        position = torch.arange(whole, device=query.device)
        distance = position[whole - new :, None] - position
        seen = distance >= 0
        if arguments.get("sliding_window") is not None:
            seen &= distance < arguments["sliding_window"]
        return _attend(query, keys, values, seen, arguments).transpose(1, 2)


class MeasuringAttention:
    """Stands for a model's attention, to learn of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, int, int, torch.dtype], Arguments]] = []
        """What each keeps of a token (heads, widths of key and value, type), and what it asks of its attention."""

    def store_and_attend(self, query: Tensor, key: Tensor, value: Tensor, arguments: Arguments) -> Tensor:
        self.calls.append(((key.shape[1], key.shape[-1], value.shape[-1], key.dtype), arguments))
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2)


def rollout_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    attention: CachedAttention | MeasuringAttention = carried(module)
    arguments = with_window(module, attention_mask, arguments)
    return attention.store_and_attend(query, key, value, arguments), None


def _attend(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, arguments: Arguments) -> Tensor:
    scale, softcap = arguments.get("scaling") or query.shape[-1] ** -0.5, arguments.get("softcap")
    groups = query.shape[1] // keys.shape[1]
    if softcap is None:
        return F.scaled_dot_product_attention(query, keys, values, seen, scale=scale, enable_gqa=groups > 1)
    keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
    scores = softcap * torch.tanh(query @ keys.transpose(2, 3) * scale / softcap)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1, dtype=torch.float32).to(query.dtype) @ values


def register() -> None:
    register_attention(NAME, rollout_attention)
