"""Rotary embeddings whose frequencies depend on the sequence length: `longrope` and `dynamic`.

transformers selects the frequencies of a whole forward pass by its largest position. A packed row has sequences of many
lengths, so here each gets the frequencies of its own length, as if it were alone: tokens are grouped by frequencies,
and the module is called once for each group.

    longrope  one set of frequencies up to `original_max_position_embeddings` tokens, another above
    dynamic   above `max_position_embeddings` tokens, every length has its own frequencies
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trimtab.data.batches import Span, TokenBatch

ORIGINAL = "original_max_position_embeddings"


@dataclass
class SequenceLengths:
    """The sequence length of every token in the current forward pass, for a model's rotary modules."""

    shortest: int | None = None  # smallest length above which frequencies change; None: they never change
    lengths: np.ndarray | None = None  # in the shape of the position ids

    @classmethod
    def install(cls, model: nn.Module) -> "SequenceLengths":
        """Replace the forward of the model's rotary modules if their frequencies depend on the length."""
        found, limits = cls(), set()
        for module in model.modules():
            if own := rotary_limits(module):
                module.forward = RotaryBySequence(module, found)
                limits |= set(own.values())
        found.shortest = min(limits, default=None)
        return found

    @contextmanager
    def of(self, lengths: np.ndarray | None) -> Iterator[None]:
        """Set the sequence lengths of all tokens inside the context."""
        self.lengths = lengths
        try:
            yield
        finally:
            self.lengths = None

    def separate(self, batch: TokenBatch) -> TokenBatch:
        """The batch for this model: without shared prompts if a sequence exceeds a limit, since a shared prompt can
        have the frequencies of one length only."""
        if self.shortest is None or not any(s.prefix_length for s in batch.spans):
            return batch
        return batch.separate() if max(s.whole_length for s in batch.spans) > self.shortest else batch


class RotaryBySequence:
    """The forward of a rotary module with the frequencies of each token's own sequence."""

    def __init__(self, module: nn.Module, current: SequenceLengths):
        self._module, self._current = [module], current  # in a list, so that it is not registered as a submodule

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        module, lengths = self._module[0], self._current.lengths
        named = {} if layer_type is None else {"layer_type": layer_type}

        def plain(positions: Tensor) -> Any:
            return type(module).forward(module, x, positions, **named)

        limit = rotary_limits(module).get(layer_type)
        if limit is None or lengths is None or lengths.size != position_ids.numel():
            return plain(position_ids)
        kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
        # Sequences with the same key have the same frequencies.
        keys = np.maximum(lengths, limit) if "dynamic" in kind else np.where(lengths > limit, limit + 1, limit)
        keys, shape = keys.reshape(-1), position_ids.shape
        groups = []
        for key in np.unique(keys):
            if "dynamic" in kind:
                plain(position_ids.new_zeros(1, 1))  # resets the longest length seen
            tokens = torch.from_numpy(np.flatnonzero(keys == key)).to(position_ids.device)
            # An extra last position selects the frequencies; its result is dropped.
            last = position_ids.new_full((1,), int(key) - 1)
            found = plain(torch.cat([position_ids.reshape(-1)[tokens], last])[None])
            groups.append((tokens, found))
        order = torch.cat([tokens for tokens, _ in groups]).argsort()

        def joined(parts: list[Tensor]) -> Tensor:
            rows = torch.cat([part[0, :-1] for part in parts])
            return rows.index_select(0, order).view(*shape, *rows.shape[1:])

        if isinstance(groups[0][1], Tensor):
            return joined([found for _, found in groups])
        return tuple(joined(list(parts)) for parts in zip(*(found for _, found in groups)))


def rotary_limits(module: nn.Module) -> dict[str | None, int]:
    """The lengths above which a rotary module uses other frequencies, by layer type (None: all layers)."""
    kinds = getattr(module, "rope_type", None)
    if kinds is None or not hasattr(module, "config"):
        return {}
    limits: dict[str | None, int] = {}
    for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
        if kind == "longrope":
            parameters = module.config.rope_parameters
            limits[layer_type] = (parameters if layer_type is None else parameters[layer_type])[ORIGINAL]
        elif "dynamic" in kind:
            limits[layer_type] = module.original_max_seq_len
    return limits


def token_lengths(spans: list[Span]) -> np.ndarray:
    """The length of each token's sequence in a row."""
    return np.repeat([span.whole_length for span in spans], [span.length for span in spans])


def generated_context(config: Any) -> int | None:
    """The longest sequence, prompt included, that a model may generate; None: any.

    For a `longrope` model that is its limit: keys cached before the limit have other frequencies than training uses for
    a sequence that exceeds it."""
    text = config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    parameters = getattr(text, "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    limits = [kind[ORIGINAL] for kind in kinds if kind.get("rope_type") == "longrope"]
    return min((limit for limit in (context, *limits) if limit is not None), default=None)


def context_in_words(config: Any) -> str:
    """The context length as text, for a message that refuses a longer sequence."""
    context, whole = generated_context(config), getattr(config.get_text_config(), "max_position_embeddings", None)
    if context == whole:
        return f"a context of {context}"
    return f"a context of {context} to generate in (of {whole}: its longrope frequencies change there)"
