"""Attention of sequences of any length, one after another, by torch's own variable-length flash attention."""

from typing import Protocol

import torch
from torch import Tensor

from trimtab.distributed.device import kind_of

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
