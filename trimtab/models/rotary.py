"""Rotary embeddings whose frequencies depend on the length of the sequence: `longrope` and `dynamic`.

transformers chooses the frequencies of a whole forward pass by its largest position. A row holds sequences of many
lengths, so here each gets those of its own length, as if it were alone: tokens are grouped by the frequencies that
their sequences need, and the module is called once for each group.

    longrope  up to `original_max_position_embeddings` tokens one set of frequencies, beyond it another
    dynamic   beyond `max_position_embeddings` tokens every length has its own frequencies
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
    """The rotary modules of one model, and in a forward pass how long the sequence of every token is."""

    shortest: int | None = None  # of the limits beyond which frequencies change; None: they never do
    lengths: np.ndarray | None = None  # shaped as the positions of the pass

    @classmethod
    def install(cls, model: nn.Module) -> "SequenceLengths":
        """Have the model's rotary modules work sequence by sequence in passes that say their lengths."""
        found, limits = cls(), set()
        for module in model.modules():
            if own := rotary_limits(module):
                module.forward = RotaryBySequence(module, found)
                limits |= set(own.values())
        found.shortest = min(limits, default=None)
        return found

    @contextmanager
    def of(self, lengths: np.ndarray | None) -> Iterator[None]:
        """Inside, this is how long the sequences of all tokens are."""
        self.lengths = lengths
        try:
            yield
        finally:
            self.lengths = None

    def separate(self, batch: TokenBatch) -> TokenBatch:
        """The batch as this model may run it: without borrowed prompts where sequences pass a limit, since a prompt
        has the frequencies of one sequence's length only."""
        if self.shortest is None or not any(s.prefix_length for s in batch.spans):
            return batch
        return batch.separate() if max(s.whole_length for s in batch.spans) > self.shortest else batch


class RotaryBySequence:
    """The forward pass of a rotary module, with the frequencies of each token's own sequence."""

    def __init__(self, module: nn.Module, current: SequenceLengths):
        self._module, self._current = [module], current  # in a list: not a part of it

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        module, lengths = self._module[0], self._current.lengths
        named = {} if layer_type is None else {"layer_type": layer_type}

        def plain(positions: Tensor) -> Any:
            return type(module).forward(module, x, positions, **named)

        limit = rotary_limits(module).get(layer_type)
        if limit is None or lengths is None or lengths.size != position_ids.numel():
            return plain(position_ids)
        kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
        # Sequences of one key have the same frequencies.
        keys = np.maximum(lengths, limit) if "dynamic" in kind else np.where(lengths > limit, limit + 1, limit)
        keys, shape = keys.reshape(-1), position_ids.shape
        groups = []
        for key in np.unique(keys):
            if "dynamic" in kind:
                plain(position_ids.new_zeros(1, 1))  # forgets the longest sequence so far
            tokens = torch.from_numpy(np.flatnonzero(keys == key)).to(position_ids.device)
            # The last position decides, and is none of the tokens'.
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
    """The lengths beyond which a rotary module has other frequencies, by the kind of layer (None: all)."""
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
    """Of every token of a row, the length of its sequence."""
    return np.repeat([span.whole_length for span in spans], [span.length for span in spans])


def generated_context(config: Any) -> int | None:
    """The longest sequence, prompt included, that a model may generate; None: any.

    For a `longrope` model that is its limit: keys that were cached before it have other frequencies than training gives
    to a sequence that passes it."""
    text = config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    parameters = getattr(text, "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    limits = [kind[ORIGINAL] for kind in kinds if kind.get("rope_type") == "longrope"]
    return min((limit for limit in (context, *limits) if limit is not None), default=None)


def context_in_words(config: Any) -> str:
    """The same, for a message that refuses a longer sequence."""
    context, whole = generated_context(config), getattr(config.get_text_config(), "max_position_embeddings", None)
    if context == whole:
        return f"a context of {context}"
    return f"a context of {context} to generate in (of {whole}: its longrope frequencies change there)"
