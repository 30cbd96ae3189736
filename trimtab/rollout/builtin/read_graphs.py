"""Reading prompts by captured graphs: one for each size of pass, rounded up, so that no launch waits for the host.

Only for fused layers and torch's variable-length attention, which takes sequences of no length: what rounding adds is
tokens that belong to no sequence, and land on page 0.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trimtab.distributed.captures import Graph
from trimtab.models.attention import PackedRow
from trimtab.rollout.builtin.graphs import capture_or_explain
from trimtab.rollout.builtin.runner import Runner


@dataclass
class Pass:
    """A graph and the tensors it works on."""

    tokens: Tensor  # [3, T]: ids, positions, places
    sequences: Tensor  # [2, S]: where each ends, and its last token
    hidden_SD: Tensor
    graph: Graph


class ReadGraphs:
    def __init__(self):
        self.passes: dict[tuple[int, int, int], Pass] = {}

    def read(self, runner: Runner, prompts: list[tuple[list[int], list[int]]]) -> Tensor:
        """Read whole prompts (ids, pages) and return each one's last hidden state [S, D]."""
        lengths = np.array([len(ids) for ids, _ in prompts])
        ends = lengths.cumsum()
        total, count = int(ends[-1]), len(prompts)
        size = _rounded(total), 1 << max(3, (count - 1).bit_length()), 1 << (int(lengths.max()) - 1).bit_length()
        if size not in self.passes:
            self.passes[size] = self._capture(runner, *size)
        prepared = self.passes[size]
        tokens = np.zeros((3, size[0]), dtype=np.int64)
        tokens[0, :total] = np.concatenate([ids for ids, _ in prompts])
        tokens[1, :total] = np.concatenate([np.arange(length) for length in lengths])
        tokens[2, :total] = np.concatenate([runner.places(pages, len(ids)) for ids, pages in prompts])
        sequences = np.full((2, size[1]), total, dtype=np.int64)
        sequences[0, :count] = ends
        sequences[1] = sequences[0] - 1
        prepared.tokens.copy_(torch.from_numpy(tokens))
        prepared.sequences.copy_(torch.from_numpy(sequences))
        prepared.graph.replay()
        return prepared.hidden_SD[:count].clone()

    def _capture(self, runner: Runner, tokens: int, count: int, longest: int) -> Pass:
        width = runner.policy.head.in_features
        integers = torch.zeros(3, tokens, dtype=torch.int64, device=runner.device)
        sequences = torch.zeros(2, count, dtype=torch.int64, device=runner.device)
        hidden = torch.zeros(count, width, dtype=runner.cache.keys.dtype, device=runner.device)

        def work() -> None:
            starts = torch.nn.functional.pad(sequences[0], (1, 0)).int()
            row = PackedRow(starts, starts, None, tokens, longest)
            ids, positions, places = integers
            hidden.copy_(runner.hidden_of_row(row, ids, positions, places, [])[sequences[1]])

        pools = [p.graph.pool() for p in self.passes.values()]
        return Pass(integers, sequences, hidden, capture_or_explain(work, pools[0] if pools else None))


def _rounded(tokens: int) -> int:
    if tokens <= 1024:
        return max(128, 1 << (tokens - 1).bit_length())
    return -(-tokens // 1024) * 1024
