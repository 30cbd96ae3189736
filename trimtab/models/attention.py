"""Attention over packed rows: many samples in one row, none of which sees another.

Registered with Hugging Face's attention interface under the name `trimtab_packed`, so every model that uses the
interface runs it unchanged. A name without a registered mask function gets no mask, which is what we want: the
samples' lengths say everything.

Two kernels give the same numbers:
- `varlen_attn` (torch's own variable-length flash attention): CUDA, half precision, no soft cap;
- dense blocks: samples of similar length are gathered into a right-padded block and go through SDPA with the causal
  flag. A padded position lies after every real one, so causality alone keeps it out; no mask is built.

The current row's lengths are module state rather than an argument, because not every architecture hands keyword
arguments down to its attention, and because gradient checkpointing calls attention again in the backward pass:
the state stays until the next forward pass sets it.
"""

import inspect
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

NAME = "trimtab_packed"


HONOURED = {"scaling", "dropout", "sliding_window", "softcap", "is_causal", "position_ids"}
HARMLESS = {"use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict"}
HARMLESS |= {"cache_position", "head_mask", "position_bias", "past_key_values", "layer_idx", "deterministic"}


class UnsupportedAttention(Exception):
    """The model asks its attention for something this implementation would silently drop."""


@dataclass
class Block:
    """Samples of similar length as one right-padded block of SDPA."""

    size: int
    length: int
    pad_index: Tensor | None  # [size * length] row index of every slot; None: one sample, a plain slice
    inverse: Tensor | None  # [real tokens] slot of every real token, in row order of the block's samples
    rows: Tensor | slice  # row index of the block's real tokens


@dataclass
class PackedRow:
    """Where each sample of a packed row lies, prepared once and used by every layer."""

    lengths: list[int]
    starts: Tensor  # [samples + 1] int32
    blocks: list[Block]

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> "PackedRow":
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(lengths, starts.to(device), _blocks(lengths, starts.tolist(), device))


def _blocks(lengths: list[int], starts: list[int], device: torch.device, fill: float = 0.8) -> list[Block]:
    """Longest first; a block takes samples of at least `fill` of its longest, so little of it is padding."""
    by_length = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    blocks, first = [], 0
    while first < len(by_length):
        longest = lengths[by_length[first]]
        last = first
        while last < len(by_length) and lengths[by_length[last]] >= fill * longest:
            last += 1
        members = by_length[first:last]
        first = last
        if len(members) == 1:
            start = starts[members[0]]
            blocks.append(Block(1, longest, None, None, slice(start, start + longest)))
            continue
        size = torch.tensor([lengths[i] for i in members])
        start = torch.tensor([starts[i] for i in members])
        slot = torch.arange(longest)
        real = slot < size[:, None]
        pad_index = torch.where(real, start[:, None] + slot, start[:, None]).flatten()
        inverse = real.flatten().nonzero().flatten()
        block = Block(len(members), longest, pad_index.to(device), inverse.to(device), pad_index[inverse].to(device))
        blocks.append(block)
    return blocks


_row: PackedRow | None = None
_calls = 0


def set_row(row: PackedRow | None) -> None:
    """The row that attention calls from now on belong to."""
    global _row, _calls
    _row, _calls = row, 0


def calls_since_set() -> int:
    return _calls


def packed_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments
) -> tuple[Tensor, None]:
    """Hugging Face's attention signature: query [1, heads, T, D] in, [1, T, heads, D] out."""
    global _calls
    _calls += 1
    unknown = [n for n, v in arguments.items() if n not in HONOURED | HARMLESS and v is not None]
    if unknown or attention_mask is not None:
        raise UnsupportedAttention(f"{type(module).__name__} passes {', '.join(unknown) or 'a mask'} to its attention")
    assert _row is not None and query.shape[2] == sum(_row.lengths), "set_row() before the forward pass"
    scale = arguments.get("scaling") or query.shape[-1] ** -0.5
    window, softcap = arguments.get("sliding_window"), arguments.get("softcap")
    dropout = arguments.get("dropout") or 0.0
    if window is not None and window >= max(_row.lengths):
        window = None
    tokens = [x.transpose(1, 2)[0] for x in (query, key, value)]  # [T, heads, D]
    if _varlen_applies(query, value, softcap, dropout):
        out = _varlen(*tokens, _row, scale, window)
    else:
        out = _dense_blocks(*tokens, _row, scale, window, softcap, dropout)
    return out[None], None


# ---- dense blocks


class _Pad(torch.autograd.Function):
    """Rows into block slots. Both directions are gathers: a token has exactly one slot."""

    @staticmethod
    def forward(ctx, x, pad_index, inverse, rows):
        ctx.save_for_backward(inverse, rows)
        ctx.tokens = x.shape[0]
        return x.index_select(0, pad_index)

    @staticmethod
    def backward(ctx, grad):
        inverse, rows = ctx.saved_tensors
        out = grad.new_zeros(ctx.tokens, *grad.shape[1:])
        return out.index_copy_(0, rows, grad.index_select(0, inverse)), None, None, None


def _dense_blocks(query, key, value, row, scale, window, softcap, dropout):
    tokens, heads = query.shape[:2]
    width = value.shape[-1]
    pieces, rows = [], []
    for block in row.blocks:
        if block.pad_index is None:
            q, k, v = (x[block.rows][None] for x in (query, key, value))
        else:
            shape = (block.size, block.length)
            q, k, v = (
                _Pad.apply(x, block.pad_index, block.inverse, block.rows).view(*shape, *x.shape[1:])
                for x in (query, key, value)
            )
        out = _attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale, window, softcap, dropout)
        out = out.transpose(1, 2).reshape(-1, heads, width)
        if block.inverse is None:
            rows.append(torch.arange(block.rows.start, block.rows.stop, device=query.device))
        else:
            out = out.index_select(0, block.inverse)
            rows.append(block.rows)
        pieces.append(out)
    if len(pieces) == 1 and row.blocks[0].pad_index is None:
        return pieces[0]
    order = torch.empty(tokens, dtype=torch.long, device=query.device)
    order[torch.cat(rows)] = torch.arange(tokens, device=query.device)
    return torch.cat(pieces).index_select(0, order)


def _attend(query, key, value, scale, window, softcap, dropout):
    """Causal attention of right-padded blocks [samples, heads, L, D]."""
    length = query.shape[2]
    groups = query.shape[1] // key.shape[1]
    mask = None
    if window is not None and window < length:
        position = torch.arange(length, device=query.device)
        distance = position[:, None] - position
        mask = (distance >= 0) & (distance < window)
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, mask, dropout, is_causal=mask is None, scale=scale, enable_gqa=groups > 1
        )
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * scale / softcap)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.float32).to(query.dtype)
    return F.dropout(weights, dropout) @ value


# ---- varlen


def _varlen_applies(query: Tensor, value: Tensor, softcap: float | None, dropout: float) -> bool:
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and softcap is None
        and dropout == 0.0
        and query.shape[-1] == value.shape[-1] <= 256
    )


def _varlen(query, key, value, row, scale, window):
    from torch.nn.attention.varlen import varlen_attn

    takes = inspect.signature(varlen_attn).parameters
    groups = query.shape[1] // key.shape[1]
    options = {"window_size": (window - 1, 0) if window else (-1, 0), "scale": scale}
    if groups > 1:
        if "enable_gqa" in takes:
            options["enable_gqa"] = True
        else:
            key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    longest = max(row.lengths)
    return varlen_attn(query, key, value, row.starts, row.starts, longest, longest, **options)


def register() -> None:
    """Make the implementation known to transformers; harmless when repeated."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)
