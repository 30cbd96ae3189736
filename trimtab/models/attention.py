"""Attention over packed rows: many sequences in one row, none of which sees another but for a prompt it borrows.

Registered with Hugging Face's attention interface under the name `trimtab_packed`, so every model that uses the
interface runs it unchanged. The sequences' spans say which tokens a row's mask would keep apart. What else a model
says by the masks of its layers is how far each looks back: under our name transformers' mask functions return no mask
but that number (`window_mask`), so that every layer has the window that its family gives it, however it does so.

Two kernels give the same numbers:
- `varlen_attn` (torch's own variable-length flash attention): where a device has it, in half precision, no soft cap;
- dense blocks: sequences of similar length are gathered into a right-padded block and go through SDPA with the causal
  flag. A padded position lies after every real one, so causality alone keeps it out; no mask is built.

The current row is carried by the model's own modules rather than by an argument, because not every architecture hands
keyword arguments down to its attention, and rather than by the thread, because gradient checkpointing calls attention
again in the backward pass, which has threads of its own. So models in other threads do not meet; of one model, the row
stays until its next forward pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimtab.data.batches import Span, sent
from trimtab.models.dense_blocks import DenseBlocks
from trimtab.models.varlen import attend_varlen, varlen_applies

if TYPE_CHECKING:
    from trimtab.models.comparing import Comparison

NAME = "trimtab_packed"

WINDOW = (1, 1, 0)  # how the shape of what `window_mask` returns begins

# Any other argument that is not None is refused: dropping it could change the result.
HONOURED = {"scaling", "dropout", "sliding_window", "softcap", "is_causal", "position_ids"}
HARMLESS = {"use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict"}
HARMLESS |= {"cache_position", "deterministic"}
REFUSED = {"s_aux": "attention sinks", "position_bias": "a position bias"}  # what some of the others mean


class UnsupportedAttention(Exception):
    """The model asks its attention for something this implementation would silently drop."""


def window_mask(
    *,
    device: torch.device,
    config: Any = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> Tensor:
    """What transformers' mask functions return under our names: an empty tensor [1, 1, 0, window], with 0 for a layer
    that looks back to the beginning. A shape can be read without waiting for a device."""
    if use_vmap:
        raise UnsupportedAttention(f"{type(config).__name__} asks for a mask that is not only causal")
    # Windows and chunks are asked for by the same argument.
    if local_size is not None and local_size == getattr(config, "attention_chunk_size", None):
        raise UnsupportedAttention(f"its layers attend within chunks of {local_size} tokens")
    return torch.empty((*WINDOW, local_size or 0), dtype=torch.bool, device=device)


def unpadded(ids: Tensor) -> Tensor:
    """The 2D mask that says that all tokens count. Without one transformers looks for packed sequences among the
    positions, which waits for the device in every pass."""
    return torch.ones((1, 1), dtype=torch.bool, device=ids.device).expand(ids.shape)


def with_window(module: nn.Module, mask: Tensor | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """A layer's arguments, with the window of its mask. That is the model's definition: families differ in whether
    the argument repeats it."""
    if mask is None:
        return arguments
    if mask.shape[:3] != WINDOW:
        raise UnsupportedAttention(f"{type(module).__name__} passes a mask to its attention")
    return arguments | {"sliding_window": mask.shape[3] or None}


class Row(Protocol):
    """The tokens of a forward pass, which know what they attend to."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> Tensor:
        """query [1, heads, T, D] in, [1, T, heads, D] out."""


@dataclass
class PackedRow:
    """Where each sequence of a packed row lies, prepared once and used by every layer."""

    query_starts: Tensor  # [sequences + 1] int32, for varlen: own tokens, and
    key_starts: Tensor  # own and borrowed ones
    key_rows: Tensor | None  # row index of every key; None: nothing is borrowed
    tokens: int
    longest: int
    spans: Sequence[Span] = ()

    @classmethod
    def of(cls, spans: list[Span], device: torch.device) -> "PackedRow":
        borrowing = any(s.prefix_length for s in spans)
        rows = torch.from_numpy(_key_rows(spans)) if borrowing else None
        return cls(
            sent(cumulative([s.length for s in spans]), device),
            sent(cumulative([s.whole_length for s in spans]), device),
            None if rows is None else sent(rows, device),
            tokens=sum(s.length for s in spans),
            longest=max(s.whole_length for s in spans),
            spans=spans,
        )

    @cached_property
    def dense(self) -> DenseBlocks:
        """Made where they are asked for: varlen needs none of it."""
        return DenseBlocks.of(self.spans, self.query_starts.device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> Tensor:
        return attend_packed(self, query, key, value, arguments)


def _key_rows(spans: list[Span]) -> np.ndarray:
    """Row index of every token of every sequence, the borrowed ones first."""
    lent = [(s.prefix_start, s.start) for s in spans], [(s.prefix_length, s.length) for s in spans]
    starts, lengths = (np.array(both).reshape(-1) for both in lent)
    before = lengths.cumsum() - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum())


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@dataclass
class PackedPass:
    """What the attention of one model is told of the forward pass it is in."""

    row: Row | None = None
    calls: int = 0
    callers: list[nn.Module] | None = None  # what called attention, while the self-check asks for it
    compiled: bool = False  # its layers run as they were compiled (models/compiled.py)
    failure: str = ""  # why one of them could not
    comparison: "Comparison | None" = None  # while they are tried: beside plain ones

    def begin(self, model: nn.Module, row: Row) -> None:
        """Attention calls of this model belong to this row from now on."""
        carry(model, self)
        self.row, self.calls = row, 0


_CARRIED = "_trimtab_pass"


def carry(model: nn.Module, current: object) -> None:
    """All modules of the model know this of the pass they are in."""
    if vars(model).get(_CARRIED) is not current:
        for module in model.modules():
            vars(module)[_CARRIED] = current  # not by setattr, which looks for parameters and submodules


def carried(module: nn.Module) -> Any:
    """None: it is in none."""
    return vars(module).get(_CARRIED)


# Left out of what is compiled: a row's spans are other ones in every pass, and counting calls would be compiled anew
# for every number.
@torch.compiler.disable
def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments
) -> tuple[Tensor, None]:
    """Hugging Face's attention signature: query [1, heads, T, D] in, [1, T, heads, D] out."""
    current: PackedPass = carried(module)
    current.calls += 1
    if current.callers is not None:
        current.callers.append(module)
    unknown = [n for n, v in arguments.items() if n not in HONOURED | HARMLESS and v is not None]
    if arguments.get("is_causal") is False:
        unknown.append("is_causal=False")
    if unknown:
        known = [f"{name} ({REFUSED[name]})" if name in REFUSED else name for name in unknown]
        raise UnsupportedAttention(f"{type(module).__name__} passes {', '.join(known)} to its attention")
    arguments = with_window(module, attention_mask, arguments)
    assert current.row is not None, "begin() before the forward pass"
    return current.row.attend(query, key, value, arguments), None


def attend_packed(row: PackedRow, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Attention among the sequences of a row: query [1, heads, T, D] in, [1, T, heads, D] out."""
    assert query.shape[2] == row.tokens
    scale = arguments.get("scaling") or query.shape[-1] ** -0.5
    window, softcap = arguments.get("sliding_window"), arguments.get("softcap")
    dropout = arguments.get("dropout") or 0.0
    if window is not None and window >= row.longest:
        window = None
    q, k, v = (x.transpose(1, 2)[0] for x in (query, key, value))  # [T, heads, D]
    if varlen_applies(query, value, softcap, dropout):
        out = attend_varlen(q, k, v, row, scale, window)
    else:
        out = _dense_blocks(q, k, v, row, scale, window, softcap, dropout)
    return out[None]


# ---- dense blocks


class Pad(torch.autograd.Function):
    """Rows into block slots; the gradient comes back from the slots that hold a token."""

    @staticmethod
    def forward(ctx, x, slots, real, rows, repeats):
        ctx.save_for_backward(real, rows)
        ctx.tokens, ctx.repeats = x.shape[0], repeats
        return x.index_select(0, slots)

    @staticmethod
    def backward(ctx, grad):
        real, rows = ctx.saved_tensors
        out = grad.new_zeros(ctx.tokens, *grad.shape[1:])
        put = out.index_add_ if ctx.repeats else out.index_copy_
        return put(0, rows, grad.index_select(0, real)), None, None, None, None


def _dense_blocks(query, key, value, row, scale, window, softcap, dropout):
    heads, width = query.shape[1], value.shape[-1]
    pieces = []
    for block in row.dense.blocks:
        if block.slots is None:
            q, k, v = (x[block.rows][None] for x in (query, key, value))
        else:
            shape = (block.size, block.length)
            q, k, v = (
                Pad.apply(x, block.slots, block.real, block.rows, block.repeats).view(*shape, *x.shape[1:])
                for x in (query, key, value)
            )
        out = _attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale, window, softcap, dropout)
        out = out.transpose(1, 2).reshape(-1, heads, width)
        pieces.append(out if block.owned is None else out.index_select(0, block.owned))
    order = row.dense.order
    return pieces[0] if order is None else torch.cat(pieces).index_select(0, order)


def _attend(query, key, value, scale, window, softcap, dropout):
    """Causal attention of right-padded blocks [samples, heads, L, D]."""
    length = query.shape[2]
    groups = query.shape[1] // key.shape[1]
    mask = None
    if window is not None and window < length:
        position = torch.arange(length, device=query.device)
        distance = position[:, None] - position
        mask = (distance >= 0) & (distance < window)
    if softcap is None and mask is None and dropout == 0.0 and length >= 128 and query.device.type == "cpu":
        return _causal_in_strips(query, key, value, scale)
    if softcap is None and mask is None:
        return F.scaled_dot_product_attention(
            query, key, value, None, dropout, is_causal=True, scale=scale, enable_gqa=groups > 1
        )
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    return attend_seen(query, key, value, mask, scale, softcap, dropout)


def attend_seen(query, key, value, seen, scale, softcap, dropout=0.0):
    """Attention to the keys that `seen` [..., queries, keys] says, of blocks [samples, heads, L, D]."""
    groups = query.shape[1] // key.shape[1]
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, seen, dropout, scale=scale, enable_gqa=groups > 1)
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * scale / softcap)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1, dtype=torch.float32).to(query.dtype)
    return F.dropout(weights, dropout) @ value


def _causal_in_strips(query, key, value, scale, strips: int = 4):
    """Causal attention, a strip of queries at a time against the keys up to its end.

    The CPU kernel computes whole blocks of 512 keys and throws the future away; strips leave most of it out.
    """
    length = query.shape[2]
    ends = [length * (i + 1) // strips for i in range(strips)]
    pieces = []
    for begin, end in zip([0, *ends], ends):
        seen = torch.ones(end - begin, end, dtype=torch.bool).tril(begin)
        pieces.append(attend_seen(query[:, :, begin:end], key[:, :, :end], value[:, :, :end], seen, scale, None))
    return torch.cat(pieces, 2)


def register() -> None:
    """Make the implementation known to transformers; harmless when repeated."""
    register_attention(NAME, packed_attention)


def register_attention(name: str, attention: Callable) -> None:
    """By this name, with masks that say each layer's window."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, window_mask)
