"""Reading prompts by captured graphs: one for each size of pass, rounded up, so that no launch waits for the host.

Only for fused layers and torch's variable-length attention, which takes sequences of no length: what rounding adds is
tokens that belong to no sequence, and land on page 0. Until a size has come back often enough to be worth recording,
the same work runs launch by launch on tensors of the same size: the same kernels, so the same numbers.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trimtab.distributed.captures import Graph
from trimtab.models.attention import PackedRow
from trimtab.rollout.builtin.graphs import capture_or_explain
from trimtab.rollout.builtin.runner import Runner

READS_BEFORE_RECORDING = 3
"""Of a size. A recording takes as long as about so many reads: the work runs twice, and becomes a graph. So whoever
reads a size once loses nothing, and whoever reads it always has spent about twice what knowing it beforehand would."""

Size = tuple[int, int, int]  # tokens, sequences, tokens of the longest


@dataclass
class Pass:
    """A read of one size: what it works on."""

    tokens: Tensor  # [3, T]: ids, positions, places
    sequences: Tensor  # [2, S]: where each ends, and its last token
    hidden_SD: Tensor
    longest: int
    graph: Graph | None = None

    def run(self, runner: Runner) -> None:
        if self.graph is None:
            self.work(runner)
        else:
            self.graph.replay()

    def work(self, runner: Runner) -> None:
        starts = torch.nn.functional.pad(self.sequences[0], (1, 0)).int()
        row = PackedRow(starts, starts, None, self.tokens.shape[1], self.longest)
        self.hidden_SD.copy_(runner.hidden_of_row(row, *self.tokens)[self.sequences[1]])


class ReadGraphs:
    def __init__(self):
        self.passes: dict[Size, Pass] = {}  # those that are recorded
        self.times: Counter[Size] = Counter()  # that the others were read

    def read(self, runner: Runner, prompts: list[tuple[list[int], list[int]]]) -> Tensor:
        """Read whole prompts (ids, pages) and return each one's last hidden state [S, D]."""
        lengths = np.array([len(ids) for ids, _ in prompts])
        ends = lengths.cumsum()
        total, count = int(ends[-1]), len(prompts)
        size = _rounded(total), 1 << max(3, (count - 1).bit_length()), 1 << (int(lengths.max()) - 1).bit_length()
        prepared = self._prepared(runner, size)
        tokens = np.zeros((3, size[0]), dtype=np.int64)
        tokens[0, :total] = np.concatenate([ids for ids, _ in prompts])
        tokens[1, :total] = np.concatenate([np.arange(length) for length in lengths])
        tokens[2, :total] = np.concatenate([runner.places(pages, len(ids)) for ids, pages in prompts])
        sequences = np.full((2, size[1]), total, dtype=np.int64)
        sequences[0, :count] = ends
        sequences[1] = sequences[0] - 1
        prepared.tokens.copy_(torch.from_numpy(tokens))
        prepared.sequences.copy_(torch.from_numpy(sequences))
        prepared.run(runner)
        return prepared.hidden_SD[:count].clone()

    def _prepared(self, runner: Runner, size: Size) -> Pass:
        if size in self.passes:
            return self.passes[size]
        fresh = self._made(runner, *size)
        if self.times[size] >= READS_BEFORE_RECORDING:
            self._capture(runner, fresh)
            self.passes[size] = fresh
        self.times[size] += 1
        return fresh

    def _made(self, runner: Runner, tokens: int, count: int, longest: int) -> Pass:
        integers = torch.zeros(3, tokens, dtype=torch.int64, device=runner.device)
        sequences = torch.zeros(2, count, dtype=torch.int64, device=runner.device)
        shape = count, runner.policy.head.in_features
        hidden = torch.zeros(shape, dtype=runner.cache.keys.dtype, device=runner.device)
        return Pass(integers, sequences, hidden, longest)

    def _capture(self, runner: Runner, made: Pass) -> None:
        pools = [p.graph.pool() for p in self.passes.values() if p.graph is not None]
        made.graph = capture_or_explain(lambda: made.work(runner), pools[0] if pools else None)


def _rounded(tokens: int) -> int:
    if tokens <= 1024:
        return max(128, 1 << (tokens - 1).bit_length())
    return -(-tokens // 1024) * 1024
