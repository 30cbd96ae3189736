"""Variable-length attention over packed sequences, which attend to themselves and, in a group, to their prompt.

Registered with Hugging Face's attention interface under the name `trimtab_packed`, so every model that uses the
interface runs it unchanged. The sequences' spans say what a mask would keep apart. How far each layer looks back is the
only other thing that a model's masks say: under our name transformers' mask functions return no mask but that number
(`window_mask`), so that every layer has the window that its family gives it, however it does so.

Two kernels give the same numbers:
- torch's variable-length flash attention: where a device has it, in half precision, without soft cap;
- dense blocks: sequences of similar length are gathered into a right-padded block and go through SDPA with the causal
  flag. A padded position lies after every real one, so causality alone keeps it out; no mask is built.

The model's own modules carry the current row. An argument would not do, because not every architecture hands keyword
arguments down to its attention; a thread-local variable would not do, because gradient checkpointing calls attention
again in the backward pass, which has its own threads. The row of a model stays until its next forward pass.
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
from trimtab.distributed.device import kind_of

if TYPE_CHECKING:
    from trimtab.models.compile import Comparison

NAME = "trimtab_packed"
HALF = (torch.bfloat16, torch.float16)
FILL = 0.8  # a dense block's sequences have at least this share of its length
WINDOW = (1, 1, 0)  # how the shape of what `window_mask` returns begins

# Any other argument that is not None is refused: dropping it could change the result.
HONOURED = {"scaling", "dropout", "sliding_window", "softcap", "is_causal", "position_ids"}
HARMLESS = {"use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict"}
HARMLESS |= {"cache_position", "deterministic"}
REFUSED = {"s_aux": "attention sinks", "position_bias": "a position bias"}  # what some of the others mean


class UnsupportedAttention(Exception):
    """The model asks its attention for something this implementation would silently drop."""


# ---- the interface to transformers


def register() -> None:
    """Make the implementation known to transformers; harmless when repeated."""
    register_attention(NAME, packed_attention)


def register_attention(name: str, attention: Callable) -> None:
    """Register an implementation by this name, with masks that say each layer's window."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, window_mask)


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


# Left out of compiled layers: a row's spans differ in every pass, and counting calls would recompile for every number.
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


class AttentionContext(Protocol):
    """The tokens of a forward pass, which know what they attend to."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> Tensor:
        """query [1, heads, T, D] in, [1, T, heads, D] out."""


@dataclass
class PackedPass:
    """The forward pass that a model is in, as its attention and its layers see it."""

    row: AttentionContext | None = None
    calls: int = 0
    callers: list[nn.Module] | None = None  # modules that called attention, while the self-check records them
    compiled: bool = False  # layers run compiled (models/compile.py)
    failure: str = ""  # why one of them could not
    comparison: "Comparison | None" = None  # while compiled layers are compared with plain ones

    def begin(self, model: nn.Module, row: AttentionContext) -> None:
        """Attention calls of this model belong to this row from now on."""
        carry(model, self)
        self.row, self.calls = row, 0


_CARRIED = "_trimtab_pass"


def carry(model: nn.Module, current: object) -> None:
    """Have all modules of the model carry the pass that they are in."""
    if vars(model).get(_CARRIED) is not current:
        for module in model.modules():
            vars(module)[_CARRIED] = current  # not by setattr, which looks for parameters and submodules


def carried(module: nn.Module) -> Any:
    """The pass that a module is in; None: none."""
    return vars(module).get(_CARRIED)


# ---- rows


@dataclass(frozen=True)
class LayerAttention:
    """How one layer attends."""

    scale: float
    window: int | None
    softcap: float | None
    dropout: float = 0.0

    @classmethod
    def of(cls, arguments: dict[str, Any], query: Tensor, longest: int) -> "LayerAttention":
        """`longest`: sequence, which no window reaches beyond."""
        window = arguments.get("sliding_window")
        return cls(
            arguments.get("scaling") or query.shape[-1] ** -0.5,
            None if window is not None and window >= longest else window,
            arguments.get("softcap"),
            arguments.get("dropout") or 0.0,
        )


@dataclass
class PackedRow:
    """Where each sequence of a packed row lies, prepared once and used by every layer."""

    query_starts: Tensor  # [sequences + 1] int32, for varlen: own tokens, and
    key_starts: Tensor  # own and borrowed ones
    key_rows: Tensor | None  # row index of every key; None: nothing is borrowed
    tokens: int
    longest: int  # keys of a sequence
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

    def attend(self, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> Tensor:
        assert query.shape[2] == self.tokens
        layer = LayerAttention.of(arguments, query, self.longest)
        q, k, v = (x.transpose(1, 2)[0] for x in (query, key, value))  # [T, heads, D]
        if varlen_applies(query, value, layer.softcap, layer.dropout):
            return attend_varlen(q, k, v, self, layer.scale, layer.window)[None]
        return self.attend_dense(q, k, v, layer)[None]

    def attend_dense(self, query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
        """[T, heads, D], block by block."""
        blocks, order = self._dense
        pieces = []
        for rows, owned in blocks:
            q, k, v = (
                (x[rows][None] if isinstance(rows, slice) else rows.gather(x)).transpose(1, 2)
                for x in (query, key, value)
            )
            out = _attend_block(q, k, v, layer).transpose(1, 2).reshape(-1, query.shape[1], value.shape[-1])
            pieces.append(out if owned is None else out.index_select(0, owned))
        return pieces[0] if order is None else torch.cat(pieces).index_select(0, order)

    @cached_property
    def _dense(self) -> "tuple[list[tuple[slice | PaddedBlock, Tensor | None]], Tensor | None]":
        """Blocks of sequences of similar length, and the order of their results in the row (None: as they are). Of a
        block: its rows, and the slots whose result is kept (a borrowed token's is kept where it is owned)."""
        device, spans = self.query_starts.device, self.spans
        # Longest first.
        groups: list[list[Span]] = []
        for i in sorted(range(len(spans)), key=lambda i: (-spans[i].whole_length, i)):
            if groups and spans[i].whole_length >= FILL * groups[-1][0].whole_length:
                groups[-1].append(spans[i])
            else:
                groups.append([spans[i]])
        blocks: list[tuple[slice | PaddedBlock, Tensor | None]] = []
        for group in groups:
            first = group[0]
            if len(group) == 1 and not first.prefix_length:
                blocks.append((slice(first.start, first.start + first.length), None))
                continue
            rows = PaddedBlock.of([s.rows() for s in group], any(s.prefix_length for s in group), device)
            slots = [i * first.whole_length + np.arange(s.prefix_length, s.whole_length) for i, s in enumerate(group)]
            blocks.append((rows, torch.from_numpy(np.concatenate(slots)).to(device, non_blocking=True)))
        if len(blocks) == 1 and blocks[0][1] is None:
            return blocks, None
        owned_rows = np.concatenate([np.arange(s.start, s.start + s.length) for group in groups for s in group])
        return blocks, torch.from_numpy(np.argsort(owned_rows)).to(device)


def _key_rows(spans: list[Span]) -> np.ndarray:
    """Row index of every token of every sequence, the borrowed ones first."""
    lent = [(s.prefix_start, s.start) for s in spans], [(s.prefix_length, s.length) for s in spans]
    starts, lengths = (np.array(both).reshape(-1) for both in lent)
    before = lengths.cumsum() - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum())


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


# ---- variable-length kernel


class Sequences(Protocol):
    query_starts: Tensor  # [sequences + 1] int32, and
    key_starts: Tensor
    key_rows: Tensor | None  # which keys each sees, of those given; None: as they lie
    longest: int  # keys


def varlen_applies(query: Tensor, value: Tensor, softcap: float | None, dropout: float) -> bool:
    return (
        # A fake tensor stands for one on an accelerator (plan), where memory is linear in any dtype.
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


# ---- dense blocks


@dataclass
class PaddedBlock:
    """Sequences of similar length as one right-padded block."""

    size: int
    slots: Tensor  # [size * length] row index of every slot; of padding any
    real: Tensor  # slots that hold a token, and
    rows: Tensor  # their row index
    repeats: bool  # a row stands in several slots, so its gradients add up

    @classmethod
    def of(cls, rows: list[np.ndarray], repeats: bool, device: torch.device) -> "PaddedBlock":
        slots = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        real = np.zeros(slots.shape, dtype=bool)
        for i, filled in enumerate(rows):
            slots[i, : len(filled)], real[i, : len(filled)] = filled, True
        slots_, real_, rows_ = (
            torch.from_numpy(x).to(device, non_blocking=True)
            for x in (slots.ravel(), np.flatnonzero(real), np.concatenate(rows))
        )
        return cls(len(rows), slots_, real_, rows_, repeats)

    def gather(self, x: Tensor) -> Tensor:
        """[size, length, ...]"""
        return _Gather.apply(x, self).view(self.size, -1, *x.shape[1:])


class _Gather(torch.autograd.Function):
    """Rows into block slots; the gradient comes back from the slots that hold a token."""

    @staticmethod
    def forward(ctx, x, block):
        ctx.save_for_backward(block.real, block.rows)
        ctx.tokens, ctx.repeats = x.shape[0], block.repeats
        return x.index_select(0, block.slots)

    @staticmethod
    def backward(ctx, grad):
        real, rows = ctx.saved_tensors
        out = grad.new_zeros(ctx.tokens, *grad.shape[1:])
        put = out.index_add_ if ctx.repeats else out.index_copy_
        return put(0, rows, grad.index_select(0, real)), None


def _attend_block(query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
    """Causal attention of right-padded blocks [samples, heads, L, D]."""
    length, device = query.shape[2], query.device
    windowed = layer.window is not None and layer.window < length
    if layer.softcap is None and not windowed:
        if layer.dropout == 0.0 and length >= 128 and device.type == "cpu":
            return _causal_in_strips(query, key, value, layer.scale)
        grouped = query.shape[1] > key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, None, layer.dropout, is_causal=True, scale=layer.scale, enable_gqa=grouped
        )
    if windowed:
        position = torch.arange(length, device=device)
        distance = position[:, None] - position
        seen = (distance >= 0) & (distance < layer.window)
    else:
        seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return attend_masked(query, key, value, seen, layer.scale, layer.softcap, layer.dropout)


def attend_masked(query, key, value, seen, scale, softcap, dropout=0.0):
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
        pieces.append(attend_masked(query[:, :, begin:end], key[:, :, :end], value[:, :, :end], seen, scale, None))
    return torch.cat(pieces, 2)
