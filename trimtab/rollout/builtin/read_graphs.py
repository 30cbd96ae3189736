"""Reading prompts by captured graphs: one for each size of pass, rounded up, so that no launch waits for the host.

Only for fused layers and torch's variable-length attention, which takes sequences of no length: what rounding adds is
tokens that belong to no sequence, and land on page 0, and keys that nobody sees. Until a size has come back often
enough to be worth recording, the same work runs launch by launch on tensors of the same size: the same kernels, so the
same numbers.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trimtab.distributed.captures import Graph
from trimtab.models.attention import PackedRow
from trimtab.rollout.builtin.continued import MOST_TOGETHER, OnePart, Part
from trimtab.rollout.builtin.graphs import capture_or_explain
from trimtab.rollout.builtin.runner import Runner

READS_BEFORE_RECORDING = 2
"""Of a size. A recording takes as long as about so many reads (a model of 30 layers on an H200: 90 ms, where a read
takes 41 to 51 ms launch by launch and 6 ms recorded). So whoever reads a size once loses nothing, and whoever reads it
always has spent about twice what knowing it beforehand would."""

READS_BEFORE_A_BETTER_FIT = 256
"""Of a size, where a larger one is recorded: with the same tokens and more places for sequences it takes at most a few
milliseconds longer."""

USUAL_KEYS = 2**12, 2**14, MOST_TOGETHER
"""All places for keys are copied, used or not: a few conversations need not wait as long as many."""

MOST_RECORDED = 128  # sizes; what was used longest ago makes room


class Size(NamedTuple):
    tokens: int
    sequences: int
    keys: int  # of all sequences, where some go on from what is in the cache; else 0
    longest: int  # keys

    @classmethod
    def of(cls, own: np.ndarray, whole: np.ndarray) -> "Size":
        """For sequences of which so many tokens are read, of so many."""
        tokens, longest = _rounded(int(own.sum())), _power(int(whole.max()))
        if (own == whole).all():
            return cls(tokens, max(8, _power(len(own))), 0, longest)
        # Few sizes: what environments say is never as long as the last time, and places for sequences cost little.
        keys = max(USUAL_KEYS[0], _power(int(whole.sum())))
        return cls(tokens, max(min(tokens, 256), _power(len(own))), keys, longest)

    def holds(self, other: "Size") -> bool:
        """Whether what is read in the other can be read in this one, by as many tokens."""
        same = self.tokens == other.tokens and (self.keys > 0) == (other.keys > 0)
        return same and all(own >= others for own, others in zip(self, other))


def usual_sizes(most: int, longest: int) -> list[Size]:
    """What requests need that nobody knows yet, in passes of at most `most` tokens, of texts of at most `longest`: many
    short prompts, a few longer ones, and what goes on from kept pages."""
    sizes = sorted({_rounded(min(tokens, most)) for tokens in (128, 256, 512, *range(1024, most + 1024, 1024))})
    long, found = min(2048, _power(longest)), []
    for tokens in sizes:
        found.append(Size(tokens, 256, 0, min(512, long)))
        if min(long, tokens) > 512:
            found.append(Size(tokens, max(8, _power(tokens // 64)), 0, min(long, _power(tokens))))
    few = [tokens for tokens in sizes if tokens <= 1024]
    return found + [Size(tokens, 256, keys, long) for keys in USUAL_KEYS for tokens in few]


@dataclass
class Pass:
    """A read of one size: what it works on."""

    tokens: Tensor  # [3, T]: ids, positions, places
    sequences: Tensor  # [3, S]: where each ends, its last token, and where its keys end
    keys: Tensor | None  # [K]: places of all sequences
    hidden_SD: Tensor
    longest: int
    graph: Graph | None = None

    def run(self, runner: Runner) -> None:
        if self.graph is None:
            self.work(runner)
        else:
            self.graph.replay()

    def work(self, runner: Runner) -> None:
        starts, key_starts = (torch.nn.functional.pad(self.sequences[n], (1, 0)).int() for n in (0, 2))
        count = self.tokens.shape[1]
        row, continued = PackedRow(starts, starts, None, count, self.longest), None
        if self.keys is not None:
            continued = OnePart(Part(slice(0, count), starts, key_starts, self.keys, self.longest))
        ids, positions, places = self.tokens
        self.hidden_SD.copy_(runner.hidden_of_row(row, ids, positions, places, continued)[self.sequences[1]])


class ReadGraphs:
    def __init__(self):
        self.passes: dict[Size, Pass] = {}  # those that are recorded
        self.times: Counter[Size] = Counter()  # that the others were read

    def read(self, runner: Runner, texts: list[tuple[list[int], int, list[int]]]) -> Tensor:
        """Read (ids, how many are cached already, pages) and return each one's last hidden state [S, D]."""
        whole, done = (np.array(numbers) for numbers in zip(*((len(ids), done) for ids, done, _ in texts)))
        own, count = whole - done, len(texts)
        size, prepared = self._prepared(runner, Size.of(own, whole))
        places = [runner.places(pages, len(ids)) for ids, _, pages in texts]
        total = int(own.sum())
        tokens = np.zeros((3, size.tokens), dtype=np.int64)
        tokens[0, :total] = np.concatenate([ids[known:] for ids, known, _ in texts])
        tokens[1, :total] = np.concatenate([np.arange(known, len(ids)) for ids, known, _ in texts])
        tokens[2, :total] = np.concatenate([found[known:] for found, known in zip(places, done)])
        sequences = np.empty((3, size.sequences), dtype=np.int64)
        for row, lengths in ((0, own), (2, whole)):
            sequences[row, :count] = lengths.cumsum()
            sequences[row, count:] = lengths.sum()
        sequences[1] = sequences[0] - 1
        prepared.tokens.copy_(torch.from_numpy(tokens))
        prepared.sequences.copy_(torch.from_numpy(sequences))
        if prepared.keys is not None:
            keys = np.zeros(size.keys, dtype=np.int64)
            keys[: int(whole.sum())] = np.concatenate(places)
            prepared.keys.copy_(torch.from_numpy(keys))
        prepared.run(runner)
        return prepared.hidden_SD[:count].clone()

    def prepare(self, runner: Runner, most: int, longest: int) -> None:
        """Record what requests will need that nobody knows yet (see `usual_sizes`)."""
        for size in reversed(usual_sizes(most, longest)):  # the largest first: the others find memory in its pool
            if size not in self.passes:
                self.passes[size] = made = self._made(runner, size)
                self._capture(runner, made)

    def _prepared(self, runner: Runner, size: Size) -> tuple[Size, Pass]:
        if size in self.passes:
            return size, self._used(size)
        larger = [known for known in self.passes if known.holds(size)]
        enough = READS_BEFORE_A_BETTER_FIT if larger else READS_BEFORE_RECORDING
        self.times[size] += 1
        if larger and self.times[size] <= enough:
            best = min(larger, key=lambda known: (known.keys, known.sequences * known.longest))
            return best, self._used(best)
        fresh = self._made(runner, size)
        if self.times[size] > enough:
            self._capture(runner, fresh)
            self.passes[size] = fresh
            if len(self.passes) > MOST_RECORDED:
                oldest = next(iter(self.passes))
                del self.passes[oldest], self.times[oldest]  # which must come back as often again
        return size, fresh

    def _used(self, size: Size) -> Pass:
        self.passes[size] = found = self.passes.pop(size)  # used last
        return found

    def _made(self, runner: Runner, size: Size) -> Pass:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=runner.device)

        shape = size.sequences, runner.policy.head.in_features
        hidden = torch.zeros(shape, dtype=runner.cache.keys.dtype, device=runner.device)
        keys = zeros(size.keys) if size.keys else None
        return Pass(zeros(3, size.tokens), zeros(3, size.sequences), keys, hidden, size.longest)

    def _capture(self, runner: Runner, made: Pass) -> None:
        pools = [p.graph.pool() for p in self.passes.values() if p.graph is not None]
        made.graph = capture_or_explain(lambda: made.work(runner), pools[0] if pools else None)


def _rounded(tokens: int) -> int:
    return max(128, _power(tokens)) if tokens <= 1024 else -(-tokens // 1024) * 1024


def _power(number: int) -> int:
    """Of two, no smaller than this."""
    return 1 << (number - 1).bit_length()
