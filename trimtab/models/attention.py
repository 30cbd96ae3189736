"""Attention of sequences of any length, one after another, by torch's own variable-length flash attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimtab.data.batches import Span, sent
from trimtab.distributed.device import kind_of

if TYPE_CHECKING:
    from trimtab.models.compile import Comparison


HALF = (torch.bfloat16, torch.float16)


class Sequences(Protocol):
    query_starts: Tensor  # [sequences + 1] int32, and
    key_starts: Tensor
    key_rows: Tensor | None  # which keys each sees, of those given; None: as they lie
    longest: int  # keys


def varlen_applies(query: Tensor, value: Tensor, softcap: float | None, dropout: float) -> bool:
    return (
        # A tensor without contents stands for one on an accelerator (plan), where memory is linear in any dtype.
        (query.is_meta or (kind_of(query.device).varlen and query.dtype in HALF))
        and softcap is None
        and dropout == 0.0
        and query.shape[-1] == value.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
    )


def attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float, window: int | None
) -> Tensor:
    """[tokens, heads, D] of all sequences one after another, each seeing its keys up to itself."""
    if sequences.key_rows is not None:
        key, value = (x.index_select(0, sequences.key_rows) for x in (key, value))
    # With fewer queries than keys the last ones are aligned: own tokens see the borrowed ones before them. The operator
    # itself and not torch's function around it, which in some versions wants keys repeated for every query head.
    out, *_ = torch.ops.aten._flash_attention_forward(
        *(query, key, value, sequences.query_starts, sequences.key_starts, sequences.longest, sequences.longest),
        dropout_p=0.0,
        is_causal=True,
        return_debug_mask=False,
        scale=scale,
        window_size_left=window - 1 if window else -1,
        window_size_right=0,
    )
    return out


# ---- Sequences of a packed row as right-padded blocks, for attention that knows nothing of rows.


@dataclass
class Block:
    """Sequences of similar length as one right-padded block of SDPA."""

    size: int
    length: int
    slots: Tensor | None  # [size * length] row index of every slot; None: one whole sequence, a plain slice
    real: Tensor | None  # slots that hold a token, and
    rows: Tensor | slice  # their row index
    owned: Tensor | None  # slots whose result is kept: a borrowed token's is kept where it is owned
    repeats: bool  # a row stands in several slots, so its gradients add up


@dataclass
class DenseBlocks:
    blocks: list[Block]
    order: Tensor | None  # from the blocks' owned results to row order; None: they are in order

    @classmethod
    def of(cls, spans: Sequence[Span], device: torch.device) -> "DenseBlocks":
        groups = _similar_lengths([s.whole_length for s in spans])
        blocks = [_block([spans[i] for i in members]) for members in groups]
        if len(blocks) == 1 and blocks[0].slots is None:
            return cls(blocks, None)
        owned_rows = np.concatenate(
            [np.arange(spans[i].start, spans[i].start + spans[i].length) for members in groups for i in members]
        )
        return cls([_moved(block, device) for block in blocks], torch.from_numpy(np.argsort(owned_rows)).to(device))


def _similar_lengths(lengths: list[int], fill: float = 0.8) -> list[list[int]]:
    """Longest first; a group takes lengths of at least `fill` of its longest, so little of a block is padding."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and lengths[i] >= fill * lengths[groups[-1][0]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _block(spans: list[Span]) -> Block:
    size, length = len(spans), max(s.whole_length for s in spans)
    if size == 1 and not spans[0].prefix_length:
        return Block(1, length, None, None, slice(spans[0].start, spans[0].start + length), None, False)
    slots = np.zeros((size, length), dtype=np.int64)
    real = np.zeros((size, length), dtype=bool)
    owned = np.zeros((size, length), dtype=bool)
    for row, span in enumerate(spans):
        slots[row, : span.whole_length] = span.rows()
        real[row, : span.whole_length] = True
        owned[row, span.prefix_length : span.whole_length] = True
    index = {"slots": slots.ravel(), "real": np.flatnonzero(real), "owned": np.flatnonzero(owned), "rows": slots[real]}
    tensors = {name: torch.from_numpy(value) for name, value in index.items()}
    return Block(size, length, repeats=any(s.prefix_length for s in spans), **tensors)


def _moved(block: Block, device: torch.device) -> Block:
    moved = {k: v.to(device, non_blocking=True) for k, v in vars(block).items() if isinstance(v, Tensor)}
    return replace(block, **moved)


# ---- Attention over packed rows: many sequences in one row, none of which sees another but for a prompt it borrows.
# Registered with Hugging Face's attention interface under the name `trimtab_packed`, so every model that uses
# the interface runs it unchanged. The sequences' spans say which tokens a row's mask would keep apart. What else
# a model says by the masks of its layers is how far each looks back: under our name transformers' mask functions
# return no mask but that number (`window_mask`), so that every layer has the window that its family gives it,
# however it does so. Two kernels give the same numbers: - `varlen_attn` (torch's own variable-length flash
# attention): where a device has it, in half precision, no soft cap; - dense blocks: sequences of similar length
# are gathered into a right-padded block and go through SDPA with the causal flag. A padded position lies after
# every real one, so causality alone keeps it out; no mask is built. The current row is carried by the model's
# own modules rather than by an argument, because not every architecture hands keyword arguments down to its
# attention, and rather than by the thread, because gradient checkpointing calls attention again in the backward
# pass, which has threads of its own. So models in other threads do not meet; of one model, the row stays until
# its next forward pass.


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
    compiled: bool = False  # its layers run as they were compiled (models/compile.py)
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
