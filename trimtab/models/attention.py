"""Variable-length attention over packed sequences, which attend to themselves and, in a group, to their prompt.

It is registered with Hugging Face's attention interface as `trimtab_packed`, so every model that uses the interface
runs it unchanged. The spans of the sequences replace masks. The only other information in a model's masks is each
layer's window or chunk: under our name, transformers' mask functions return that number instead of a mask
(`window_mask`), so every layer gets its window whichever way its model family sets it.

Two kernels give the same numbers:
- torch's variable-length flash attention, if the device has it: in half precision, without soft cap and chunks;
- dense blocks: sequences of similar length are gathered into a right-padded block for SDPA with the causal flag.
  Padding comes after all real tokens, so causality alone excludes it; no mask is built.

Sinks (gpt-oss): every head has one more key, with a learned score and the value 0.
Chunks (Llama 4): a token sees only the tokens of the chunk that it is in.

The model's modules carry the current row. It cannot be an argument, because not every architecture passes keyword
arguments down to its attention. It cannot be a thread-local variable, because gradient checkpointing calls attention
again in the backward pass, which has its own threads. A model keeps its row until the next forward pass.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
    from trimtab.models.compile import Comparison, FirstLayer

NAME = "trimtab_packed"
HALF = (torch.bfloat16, torch.float16)
FILL = 0.8  # least length of a sequence in a dense block, as a share of the longest
WINDOW, CHUNK = (1, 1, 0), (1, 2, 0)  # first dimensions of the tensor that `window_mask` returns

# Any other argument that is not None raises, because ignoring it could change the result.
HONOURED = {"scaling", "dropout", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids"}
HARMLESS = {"use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict"}
HARMLESS |= {"cache_position", "deterministic"}
REFUSED = {"position_bias": "a position bias"}  # names of some of the others, for messages


class UnsupportedAttention(Exception):
    """The model passes something to its attention that this implementation does not support."""


# ---- the interface to transformers


def register() -> None:
    """Register the implementation with transformers; may be repeated."""
    register_attention(NAME, packed_attention)


def register_attention(name: str, attention: Callable) -> None:
    """Register an implementation under this name, with `window_mask` as its mask function."""
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
    """Mask function for our names: returns an empty tensor [1, 1, 0, window] or [1, 2, 0, chunk], with window 0 for
    full attention. A shape can be read without a device sync."""
    if use_vmap:
        raise UnsupportedAttention(f"{type(config).__name__} asks for a mask that is not only causal")
    # Windows and chunks use the same argument.
    chunked = local_size is not None and local_size == getattr(config, "attention_chunk_size", None)
    return torch.empty((*(CHUNK if chunked else WINDOW), local_size or 0), dtype=torch.bool, device=device)


def unpadded(ids: Tensor) -> Tensor:
    """A 2D mask without padding. Without any mask, transformers looks for packed sequences in the position ids, which
    syncs with the device in every pass."""
    return torch.ones((1, 1), dtype=torch.bool, device=ids.device).expand(ids.shape)


def with_window(module: nn.Module, mask: Tensor | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """A layer's arguments, with the window or chunk from its mask. The mask decides: model families differ in whether
    the argument repeats the window."""
    if mask is None:
        return arguments
    if mask.shape[:3] not in (WINDOW, CHUNK):
        raise UnsupportedAttention(f"{type(module).__name__} passes a mask to its attention")
    window, chunk = (mask.shape[3] or None, None) if mask.shape[:3] == WINDOW else (None, mask.shape[3])
    return arguments | {"sliding_window": window, "chunk": chunk}


# Not compiled: a row's spans differ in every pass, and the call counter would cause a recompilation for every value.
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
    if current.callers is not None and any(arguments.get(name) is not None for name in ("s_aux", "chunk")):
        current.not_shared = f"{type(module).__name__} has sinks or chunks"
    assert current.row is not None, "begin() before the forward pass"
    return current.row.attend(query, key, value, arguments), None


class AttentionContext(Protocol):
    """The tokens of a forward pass and the keys they attend to."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> Tensor:
        """query [1, heads, T, D] in, [1, T, heads, D] out."""


@dataclass
class PackedPass:
    """The state of a model's current forward pass, for its attention and its layers."""

    row: AttentionContext | None = None
    is_running: bool = False
    calls: int = 0
    callers: list[nn.Module] | None = None  # modules that called attention, while the self-check records them
    not_shared: str = ""  # why processes cannot share a row, found by the self-check
    compiled: bool = False  # layers run compiled or fused (models/compile.py)
    fused: bool = False  # they are fused
    failure: str = ""  # why a compiled layer failed
    comparison: "Comparison | FirstLayer | None" = None  # while compiled layers are compared with eager ones
    routes_TLK: Tensor | None = None  # experts of a mixture's layers in this pass (routing.py); None: their own choices

    def begin(self, model: nn.Module, row: AttentionContext | None, routes_TLK: Tensor | None = None) -> None:
        """Start a forward pass of the model on this row; None: on padded rows, with the model's own attention."""
        if carried(model) is not self:
            carry(model.modules(), self)
        self.row, self.calls, self.routes_TLK = row, 0, routes_TLK

    @contextmanager
    def running(self) -> Iterator[None]:
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False

    @property
    def is_begun(self) -> bool:
        """Whether a pass over the row runs now, or runs again in a backward pass (gradient checkpointing)."""
        return self.row is not None and self._is_at_work

    @property
    def _is_at_work(self) -> bool:
        return self.is_running or torch._C._current_graph_task_id() != -1

    def routes_of(self, layer: int) -> Tensor | None:
        """The experts [T, K] to be used by the mixture with this number, in a pass that has them."""
        return None if self.routes_TLK is None or not self._is_at_work else self.routes_TLK[:, layer]

    def mix(self, module: nn.Module, run: Callable[[Tensor, Any], Tensor], hidden: Tensor) -> Tensor:
        """Run a recurrent module on each sequence of the row (recurrent.py). hidden: [1, T, D]"""
        if self.callers is not None:
            self.callers.append(module)
            self.not_shared = f"{type(module).__name__} keeps a state"
        assert isinstance(self.row, PackedRow), self.not_shared
        return self.row.in_blocks(lambda hidden_SLD: run(hidden_SLD, None), hidden[0])[None]


_CARRIED = "_trimtab_pass"


def carry(modules: Iterable[nn.Module], current: object) -> None:
    """Attach the current pass to modules."""
    for module in modules:
        vars(module)[_CARRIED] = current  # not by setattr, which nn.Module overrides


def carried(module: nn.Module) -> Any:
    """The current pass of a module, if any."""
    return vars(module).get(_CARRIED)


# ---- rows


@dataclass(frozen=True)
class LayerAttention:
    """Attention settings of one layer."""

    scale: float
    window: int | None
    softcap: float | None
    dropout: float = 0.0
    chunk: int | None = None
    sinks: Tensor | None = None  # score of each query head

    @classmethod
    def of(cls, arguments: dict[str, Any], query: Tensor, longest: float = math.inf) -> "LayerAttention":
        """`longest`: length of the longest sequence; a window of at least that length has no effect."""
        window, chunk = (
            None if (size := arguments.get(name)) is None or size >= longest else size
            for name in ("sliding_window", "chunk")
        )
        return cls(
            arguments.get("scaling") or query.shape[-1] ** -0.5,
            window,
            arguments.get("softcap"),
            arguments.get("dropout") or 0.0,
            chunk,
            arguments.get("s_aux"),
        )

    @property
    def plain(self) -> bool:
        """Whether kernels for causal attention with a window compute it."""
        return self.softcap is None and self.sinks is None and self.chunk is None and self.dropout == 0.0

    def seen(self, positions_Q: Tensor, positions_K: Tensor) -> Tensor:
        """Which keys a query sees, by their positions in the sequence [Q, K]."""
        distance = positions_Q[:, None] - positions_K
        seen = distance >= 0
        if self.window is not None:
            seen &= distance < self.window
        if self.chunk is not None:
            seen &= positions_Q[:, None] // self.chunk == positions_K // self.chunk
        return seen


@dataclass
class PackedRow:
    """The positions of the sequences in a packed row, prepared once for all layers."""

    query_starts: Tensor  # [sequences + 1] int32, for varlen: of a sequence's own tokens
    key_starts: Tensor  # of its own tokens and its shared prefix
    key_rows: Tensor | None  # row index of every key; None: no shared prefixes
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
        if varlen_applies(query, value, replace(layer, sinks=None)):
            own = {"sinks": layer.sinks, "fused": arguments.get("fused", False)}
            return attend_varlen(q, k, v, self, layer.scale, layer.window, **own)[None]
        return self.attend_dense(q, k, v, layer)[None]

    def attend_dense(self, query: Tensor, key: Tensor, value: Tensor, layer: LayerAttention) -> Tensor:
        """Attention in dense blocks; returns [T, heads, D]."""

        def attend(*block: Tensor) -> Tensor:
            query, key, value = (x.transpose(1, 2) for x in block)
            return _attend_block(query, key, value, layer).transpose(1, 2)

        return self.in_blocks(attend, query, key, value)

    def in_blocks(self, compute: Callable[..., Tensor], *given_T: Tensor) -> Tensor:
        """Compute the results of all tokens [T, ...] from right-padded blocks of whole sequences [S, L, ...]."""
        blocks, order = self._dense
        pieces = []
        for rows, owned in blocks:
            block = (x[rows][None] if isinstance(rows, slice) else rows.gather(x) for x in given_T)
            out = compute(*block).flatten(0, 1)
            pieces.append(out if owned is None else out.index_select(0, owned))
        return pieces[0] if order is None else torch.cat(pieces).index_select(0, order)

    @cached_property
    def _dense(self) -> "tuple[list[tuple[slice | PaddedBlock, Tensor | None]], Tensor | None]":
        """Blocks of sequences of similar length, and the order of their results in the row (None: unchanged). A block
        has its rows, and the slots whose results are used: those of a sequence's own tokens, not of a shared prefix."""
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
    """Row index of every token of every sequence, its shared prefix first."""
    lent = [(s.prefix_start, s.start) for s in spans], [(s.prefix_length, s.length) for s in spans]
    starts, lengths = (np.array(both).reshape(-1) for both in lent)
    before = lengths.cumsum() - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum())


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


# ---- variable-length kernel


class Sequences(Protocol):
    query_starts: Tensor  # [sequences + 1] int32
    key_starts: Tensor  # [sequences + 1] int32
    key_rows: Tensor | None  # indices of the keys to use; None: all, in order
    longest: int  # most keys of a sequence


def varlen_applies(query: Tensor, value: Tensor, layer: LayerAttention) -> bool:
    return (
        # A meta tensor represents an accelerator in plans; memory is then linear in any dtype.
        (query.is_meta or (kind_of(query.device).varlen and query.dtype in HALF))
        and layer.plain
        and query.shape[-1] == value.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
    )


def attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Sequences,
    scale: float,
    window: int | None,
    *,
    sinks: Tensor | None = None,
    fused: bool = False,
) -> Tensor:
    """Causal attention of concatenated sequences; returns [tokens, heads, D]. `fused`: by the kernel of fused
    layers."""
    if sequences.key_rows is not None:
        key, value = (x.index_select(0, sequences.key_rows) for x in (key, value))
    places = sequences.query_starts, sequences.key_starts, sequences.longest
    if fused or sinks is not None:
        return _AttendRows.apply(query, key, value, sinks, *places, scale, window, fused)
    return _flash(query, key, value, *places, scale, window)[0]


def _flash(query, key, value, query_starts, key_starts, longest, scale, window) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exp [heads, tokens]. With fewer queries than keys the last ones are aligned, so own tokens
    see the shared prefix. The operator is called directly, because torch's wrapper in some versions needs keys repeated
    for every query head."""
    out, sums, *_ = torch.ops.aten._flash_attention_forward(
        *(query, key, value, query_starts, key_starts, longest, longest),
        dropout_p=0.0,
        is_causal=True,
        return_debug_mask=False,
        scale=scale,
        window_size_left=window - 1 if window else -1,
        window_size_right=0,
    )
    return out, sums


class _AttendRows(torch.autograd.Function):
    """Attention by torch's flash kernels with sinks, or by our forward pass, which the engine can repeat token by token
    bit for bit."""

    @staticmethod
    def forward(ctx, query, key, value, sinks, query_starts, key_starts, longest, scale, window, fused):
        learns = any(ctx.needs_input_grad)
        given = query, key, value, query_starts, key_starts
        if fused:
            from trimtab.models.layer_kernels import attend_rows

            out, sums = attend_rows(*given, longest, scale, window, learns=learns or sinks is not None)
        else:
            out, sums = _flash(*given, longest, scale, window)
        if sinks is not None:
            out, sums = with_sinks(out, sums, sinks)
        if learns:
            ctx.save_for_backward(*given, sinks, out, sums)
        ctx.settings = longest, scale, window
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, query_starts, key_starts, sinks, out, sums = ctx.saved_tensors
        longest, scale, window = ctx.settings
        nothing = torch.empty(0, device=grad.device)  # about dropout
        backs = torch.ops.aten._flash_attention_backward(
            *(grad.contiguous(), query, key, value, out, sums, query_starts, key_starts, longest, longest),
            dropout_p=0.0,
            is_causal=True,
            rng_state=nothing,
            unused=nothing,
            scale=scale,
            window_size_left=window - 1 if window else -1,
            window_size_right=0,
        )
        back_of_sinks = None if sinks is None else gradient_of_sinks(grad, out, sums, sinks)
        return *backs, back_of_sinks, *(None,) * 6


def with_sinks(out_THD: Tensor, sums_HT: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exp with one more key in every head, of score s and value 0, from those without:

        out' = sigmoid(lse - s) out,     lse' = log(e^lse + e^s)

    A backward pass that is given these two computes the right gradients of queries, keys and values."""
    sinks_H1 = sinks_H.float()[:, None]
    share_TH = torch.sigmoid(sums_HT - sinks_H1).t()
    return (out_THD * share_TH[..., None]).to(out_THD.dtype), torch.logaddexp(sums_HT, sinks_H1)


def gradient_of_sinks(grad_THD: Tensor, out_THD: Tensor, sums_HT: Tensor, sinks_H: Tensor) -> Tensor:
    """From the output and log-sum-exp with sinks."""
    pulled_TH = (grad_THD.float() * out_THD.float()).sum(-1)
    shares_HT = torch.exp(sinks_H.float()[:, None] - sums_HT)
    return -(shares_HT * pulled_TH.t()).sum(1).to(sinks_H.dtype)


# ---- dense blocks


@dataclass
class PaddedBlock:
    """Sequences of similar length as one right-padded block."""

    size: int
    slots: Tensor  # [size * length] row index of every slot; arbitrary for padding
    real: Tensor  # slots with a token
    rows: Tensor  # row indices of these slots
    repeats: bool  # rows may be in several slots, so that gradients must be summed

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
    """Gathers rows into block slots; gradients flow back only from slots with a token."""

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
    if layer.softcap is layer.sinks is layer.chunk is None and not windowed:
        if layer.dropout == 0.0 and length >= 128 and device.type == "cpu":
            return _causal_in_strips(query, key, value, layer.scale)
        grouped = query.shape[1] > key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, None, layer.dropout, is_causal=True, scale=layer.scale, enable_gqa=grouped
        )
    position = torch.arange(length, device=device)
    sinks = None if layer.sinks is None else layer.sinks[:, None, None]
    seen = layer.seen(position, position)
    return attend_masked(query, key, value, seen, layer.scale, layer.softcap, layer.dropout, sinks)


def attend_masked(query, key, value, seen, scale, softcap, dropout=0.0, sinks=None):
    """Attention with the boolean mask `seen` [..., queries, keys], on blocks [samples, heads, L, D]. `sinks`: in the
    shape of the scores, with one key."""
    groups = query.shape[1] // key.shape[1]
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, seen, dropout, scale=scale, enable_gqa=groups > 1)
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)[..., : key.shape[2]]
    return F.dropout(weights, dropout) @ value


def _causal_in_strips(query, key, value, scale, strips: int = 4):
    """Causal attention in strips of queries, each with the keys up to its end.

    The CPU kernel computes whole blocks of 512 keys and discards future ones; strips avoid most of that work.
    """
    length = query.shape[2]
    ends = [length * (i + 1) // strips for i in range(strips)]
    pieces = []
    for begin, end in zip([0, *ends], ends):
        seen = torch.ones(end - begin, end, dtype=torch.bool).tril(begin)
        pieces.append(attend_masked(query[:, :, begin:end], key[:, :, :end], value[:, :, :end], seen, scale, None))
    return torch.cat(pieces, 2)
