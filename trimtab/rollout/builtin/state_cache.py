"""States of recurrent layers in the engine: of constant size for each sequence, kept beside its pages of the KV cache.

A prefill runs prompts of equal length together: padding would enter their states. Samples of one prompt begin with its
state. A decode chunk joins the states of its sequences and splits them at the end. The layers' objects are those of
transformers' cache, so modules read and update them as in its own generation.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from trimtab.data.batches import Span
from trimtab.models.recurrent import Run

States = dict[int, Any]
"""Of one sequence or of a batch, by layer: conv_states and recurrent_states, each by number, or None."""


KINDS = ("conv_states", "recurrent_states")


def empty_cache(config: Any) -> DynamicCache:
    return DynamicCache(config=config.get_text_config())


def state_bytes(cache: DynamicCache) -> int:
    states = [getattr(layer, name, {}) for layer in cache.layers for name in KINDS]
    return sum(state.nbytes for own in states for state in own.values() if state is not None)


@dataclass
class PrefillStates:
    """A prefill of whole sequences: batches of equal length, and the cache of each."""

    batches: list[tuple[list[int], Tensor, DynamicCache]]  # numbers of the sequences, their rows [S, L]

    @classmethod
    def of(cls, spans: list[Span], config: Any, device: torch.device) -> "PrefillStates":
        by_length: dict[int, list[int]] = {}
        for number, span in enumerate(spans):
            by_length.setdefault(span.length, []).append(number)
        batches = []
        for length, numbers in by_length.items():
            rows = torch.tensor([spans[number].start for number in numbers])[:, None] + torch.arange(length)
            batches.append((numbers, rows.to(device), empty_cache(config)))
        return cls(batches)

    def mix(self, run: Run, hidden: Tensor) -> Tensor:
        """hidden: [1, T, D]"""
        out = torch.empty_like(hidden)
        for _, rows_SL, cache in self.batches:
            out[0, rows_SL] = run(hidden[0, rows_SL], cache)
        return out

    def split(self) -> list[States]:
        """Of every sequence, in the order of the row."""
        found: dict[int, States] = {}
        for numbers, _, cache in self.batches:
            found |= dict(zip(numbers, split_states(cache, len(numbers))))
        return [found[number] for number in range(len(found))]


@dataclass
class DecodeStates:
    """Sequences that decode together."""

    cache: DynamicCache

    @classmethod
    def of(cls, states: list[States], config: Any) -> "DecodeStates":
        cache = empty_cache(config)
        for index, first in states[0].items():
            cache.layers[index] = _with_states(first, [own[index] for own in states], torch.cat)
        return cls(cache)

    def mix(self, run: Run, hidden: Tensor) -> Tensor:
        """hidden: [S, 1, D]"""
        return run(hidden, self.cache)


def split_states(cache: DynamicCache, count: int) -> list[States]:
    """The states of each sequence of a batch."""
    layers = {
        index: layer
        for index, layer in enumerate(cache.layers)
        if any(getattr(layer, "has_previous_state", {}).values())
    }
    return [
        {
            index: _with_states(layer, [layer], lambda part, own=own: part[0][own : own + 1])
            for index, layer in layers.items()
        }
        for own in range(count)
    ]


def _with_states(like: Any, layers: list[Any], join: Any) -> Any:
    """A copy of a cache layer with these states."""
    made = copy.copy(like)
    for name in KINDS:
        states = getattr(like, name)
        joined = {
            i: None if state is None else join([getattr(layer, name)[i] for layer in layers])
            for i, state in states.items()
        }
        setattr(made, name, joined)
    return made
