"""States of recurrent layers in the engine: of constant size for each sequence, kept beside its pages of the KV cache.

A prefill runs prompts of equal length together: padding would enter their states. Samples of one prompt begin with its
state. An eager decode chunk joins the states of its sequences and splits them at the end; captured steps work on a
table, in which a sequence's states stay from chunk to chunk. The layers' objects are those of transformers' cache, so
modules read and update them as in its own generation.
"""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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


def tensors_of(layers: Iterable[Any]) -> list[Tensor]:
    states = [getattr(layer, name, {}) for layer in layers for name in KINDS]
    return [state for own in states for state in own.values() if state is not None]


def state_bytes(cache: DynamicCache) -> int:
    return sum(state.nbytes for state in tensors_of(cache.layers))


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
        return cls.on(
            {i: _with_states(first, [own[i] for own in states], torch.cat) for i, first in states[0].items()}, config
        )

    @classmethod
    def on(cls, layers: States, config: Any) -> "DecodeStates":
        """`layers`: of the whole batch."""
        cache = empty_cache(config)
        for index, layer in layers.items():
            cache.layers[index] = layer
        return cls(cache)

    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in tensors_of(self.cache.layers)]

    def mix(self, run: Run, hidden: Tensor) -> Tensor:
        """hidden: [S, 1, D]"""
        return run(hidden, self.cache)


class StateTable:
    """States of sequences that decode in captured steps: one row each, at fixed addresses. An owner whose own `states`
    are None has them here."""

    def __init__(self, config: Any):
        self._config = config
        self.clear()

    def clear(self) -> None:
        """Free its memory."""
        self.rows = 0
        self._layers: States = {}
        self._owners: list[Any] = []  # of each row

    def grow(self, rows: int) -> None:
        """To this many rows, with their contents at new addresses."""
        self.rows = rows

        def larger(state: Tensor) -> Tensor:
            made = state.new_zeros(rows, *state.shape[1:])
            made[: len(self._owners)] = state[: len(self._owners)]
            return made

        self._layers = _each(self._layers, larger)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in tensors_of(self._layers.values()))

    def allocate(self, make: Callable[[], States]) -> None:
        """Once; `make` returns the states of any sequence."""
        if not self._layers:
            self._layers = _each(make(), lambda state: state.new_zeros(self.rows, *state.shape[1:]))

    def of_rows(self, rows: int) -> DecodeStates:
        """The first rows, to be updated in place."""
        return DecodeStates.on(_each(self._layers, lambda state: state[:rows]), self._config)

    def place(self, owners: Sequence[Any]) -> None:
        """Put the states of these owners into the first rows, in this order."""
        before = {owner: row for row, owner in enumerate(self._owners)}
        fresh = [row for row, owner in enumerate(owners) if owner.states is not None]
        moved = [row for row, owner in enumerate(owners) if owner.states is None and before[owner] != row]
        tensors = tensors_of(self._layers.values())
        index = partial(torch.tensor, dtype=torch.int64, device=tensors[0].device)
        if moved:
            to, source = index(moved), index([before[owners[row]] for row in moved])
            for tensor in tensors:
                tensor.index_copy_(0, to, tensor.index_select(0, source))
        if fresh:
            given = {id(owners[row].states): owners[row].states for row in fresh}  # answers share those of their prompt
            new = [tensors_of(states[number] for number in self._layers) for states in given.values()]
            place = {key: number for number, key in enumerate(given)}
            to, source = index(fresh), index([place[id(owners[row].states)] for row in fresh])
            for number, tensor in enumerate(tensors):
                tensor.index_copy_(0, to, torch.cat([states[number] for states in new]).index_select(0, source))
        for owner in owners:
            owner.states = None
        self._owners = list(owners)

    def give_back(self, owners: Sequence[Any]) -> None:
        """Let these owners keep their states themselves."""
        rows = {owner: row for row, owner in enumerate(self._owners)}
        for owner in owners:
            if owner.states is None:
                owner.states = _each(_of_row(self._layers, rows[owner]), torch.clone)
        self._owners = []

    @contextlib.contextmanager
    def preserved(self, rows: int) -> Iterator[None]:
        """Inside, the first rows may be overwritten."""
        tensors, used = tensors_of(self._layers.values()), min(rows, len(self._owners))
        before = [tensor[:used].clone() for tensor in tensors] if used else []
        try:
            yield
        finally:
            for tensor, own in zip(tensors, before):
                tensor[:used] = own


def split_states(cache: DynamicCache, count: int) -> list[States]:
    """The states of each sequence of a batch."""
    layers = {
        index: layer
        for index, layer in enumerate(cache.layers)
        if any(getattr(layer, "has_previous_state", {}).values())
    }
    return [_of_row(layers, row) for row in range(count)]


def _of_row(layers: States, row: int) -> States:
    return _each(layers, lambda state: state[row : row + 1])


def _each(layers: States, change: Callable[[Tensor], Tensor]) -> States:
    return {index: _with_states(layer, [layer], lambda part: change(part[0])) for index, layer in layers.items()}


def _with_states(like: Any, layers: list[Any], join: Callable[[list[Tensor]], Tensor]) -> Any:
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
