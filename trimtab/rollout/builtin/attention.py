"""Attention while generating: new tokens against what is in the cache, through Hugging Face's attention interface.

Two kinds of pass, told apart by the module state:
- reading:  packed rows of prompt tokens; their keys and values are stored on the way. A sequence whose beginning is in
            the cache already attends to it there.
- decoding: one token a sequence.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trimtab.distributed.device import has_kernels
from trimtab.models import attention as training
from trimtab.rollout.builtin.cache import KVCache
from trimtab.rollout.builtin.dense import DenseWindow

NAME = "trimtab_rollout"


@dataclass
class Reading:
    row: training.PackedRow
    places_T: Tensor
    cached: list[tuple[slice, Tensor]]  # (own tokens in the row, places of the whole sequence) where some was cached


@dataclass
class Decoding:
    places_B: Tensor
    tables_BP: Tensor  # pages of every sequence, in order; 0 where there is none
    lengths_B: Tensor  # tokens to look at, the new one included


_cache: KVCache | None = None
_pass: "Reading | Decoding | Measuring | None" = None
_window: DenseWindow | None = None  # of the decoding passes that share a table


def set_pass(cache: KVCache | None, current: "Reading | Decoding | Measuring | None") -> None:
    global _cache, _pass, _window
    _cache, _pass = cache, current
    if isinstance(current, Reading):
        training.set_row(current.row)
    if not isinstance(current, Decoding) or has_kernels(current.places_B.device):
        _window = None
    elif _window is None or _window.tables_BP is not current.tables_BP:
        _window = DenseWindow(cache, current.tables_BP)


@dataclass
class Measuring:
    calls: list[tuple[tuple[int, int, torch.dtype], dict]]  # what a layer keeps, and what it asks of its attention


def rollout_attention(module, query: Tensor, key: Tensor, value: Tensor, attention_mask, **arguments):
    if isinstance(_pass, Measuring):
        _pass.calls.append(((key.shape[1], key.shape[-1], key.dtype), arguments))
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2), None
    layer = module.layer_idx
    if isinstance(_pass, Decoding):
        new = key[:, :, 0], value[:, :, 0]
        _cache.store(layer, *new, _pass.places_B)
        return _decode(query, layer, new, arguments), None
    _cache.store(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), _pass.places_T)
    assert attention_mask is None
    return _read(query, key, value, layer, arguments), None


def attend(layer: int, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, arguments: dict) -> Tensor:
    """The same for layers that store their keys and values themselves, and only where there are kernels."""
    if isinstance(_pass, Decoding):
        return _decode_by_kernel(query_THD, layer, arguments)
    return _read(*(x.transpose(0, 1)[None] for x in (query_THD, key_THD, value_THD)), layer, arguments)[0]


def _read(query: Tensor, key: Tensor, value: Tensor, layer: int, arguments: dict) -> Tensor:
    """query [1, heads, T, D] -> [1, T, heads, D]."""
    out, _ = training.packed_attention(None, query, key, value, None, **arguments)
    for own, places in _pass.cached:
        out[:, own] = _continue(query[:, :, own], layer, places, arguments)
    return out


def _decode(query: Tensor, layer: int, new: tuple[Tensor, Tensor], arguments: dict) -> Tensor:
    """query [B, heads, 1, D] -> [B, 1, heads, D]."""
    if has_kernels(query.device):
        return _decode_by_kernel(query[:, :, 0], layer, arguments)[:, None]
    longest = int(_pass.lengths_B.max())
    keys, values = (t[:, :, :longest] for t in _window.keys_and_values(layer, new, _pass.lengths_B - 1))
    position = torch.arange(keys.shape[2], device=query.device)
    seen = position < _pass.lengths_B[:, None]
    if arguments.get("sliding_window") is not None:
        seen &= position >= _pass.lengths_B[:, None] - arguments["sliding_window"]
    # The query heads that share a key head read it together.
    together = query.view(len(query), keys.shape[1], -1, query.shape[-1])
    return _attend(together, keys, values, seen[:, None, None], arguments).reshape(query.shape).transpose(1, 2)


def _decode_by_kernel(query_BHD: Tensor, layer: int, arguments: dict) -> Tensor:
    from trimtab.rollout.builtin.kernels.attention import paged_attention

    return paged_attention(
        query_BHD,
        _cache.keys[layer],
        _cache.values[layer],
        _pass.tables_BP,
        _pass.lengths_B,
        scale=arguments.get("scaling") or query_BHD.shape[-1] ** -0.5,
        softcap=arguments.get("softcap"),
        window=arguments.get("sliding_window"),
    )


def _continue(query: Tensor, layer: int, places: Tensor, arguments: dict) -> Tensor:
    """The last tokens of one sequence against all of it. query [1, heads, new, D] -> [1, new, heads, D]."""
    keys, values = (t[layer].flatten(0, 1)[places].transpose(0, 1)[None] for t in (_cache.keys, _cache.values))
    new, whole = query.shape[2], keys.shape[2]
    distance = torch.arange(whole - new, whole, device=query.device)[:, None] - torch.arange(whole, device=query.device)
    seen = distance >= 0
    if arguments.get("sliding_window") is not None:
        seen &= distance < arguments["sliding_window"]
    return _attend(query, keys, values, seen, arguments).transpose(1, 2)


def _attend(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, arguments: dict) -> Tensor:
    scale, softcap = arguments.get("scaling") or query.shape[-1] ** -0.5, arguments.get("softcap")
    groups = query.shape[1] // keys.shape[1]
    if softcap is None:
        return F.scaled_dot_product_attention(query, keys, values, seen, scale=scale, enable_gqa=groups > 1)
    keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
    scores = softcap * torch.tanh(query @ keys.transpose(2, 3) * scale / softcap)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1, dtype=torch.float32).to(query.dtype) @ values


def register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, rollout_attention)
