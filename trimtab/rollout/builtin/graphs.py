"""Decode steps captured once for each number of rows, and replayed: between two looks the host does nothing.

A row of the table holds what the host says of a sample (newest token, position, tokens drawn, seed, limit, pages). A
step reads it, draws the sample's next token and moves the row on; a row at its limit, or after a stop token, works on
page 0 alone, and so do the rows that fill a bucket up. Weights may change in place between calls; captured.py knows
when that is not enough.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from trimtab.data.batches import can_pin
from trimtab.distributed.captures import Graph, capture
from trimtab.models.hugging_face import first_line
from trimtab.rollout.builtin.ahead import compile_ahead
from trimtab.rollout.builtin.cache import KVCache
from trimtab.rollout.builtin.row_sampler import RowSampler
from trimtab.rollout.builtin.runner import Runner
from trimtab.rollout.builtin.sampler import Drawn, Sampler
from trimtab.rollout.builtin.scheduler import Sample

COLUMNS = 5  # before the pages


class CannotCapture(Exception):
    """The model does something on the way that only the host can do."""


class DecodeGraphs:
    steps = 24  # between two looks, and
    steps_at_ease = 64  # while nobody waits for a place

    def __init__(self, sampler: Sampler | RowSampler, cache: KVCache, slots: int, longest: int):
        """For at most `slots` samples at once, of at most `longest` tokens."""
        self.sampler, self.size = sampler, cache.size
        self.pages = 1 << (-(-longest // cache.size) - 1).bit_length()
        device, shape = cache.keys.device, (rows_for(slots), COLUMNS + self.pages)
        self.host = torch.zeros(shape, dtype=torch.int64, pin_memory=can_pin(device.type))
        self.table = torch.zeros(shape, dtype=torch.int64, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        results = self.steps_at_ease, shape[0]
        self.tokens = torch.zeros(results, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(2 if sampler.plain else 1, *results, device=device)
        self.angles: tuple[Tensor, Tensor] | None = None
        self.graphs: dict[int, Graph] = {}
        self.rows: list[Sample] = []
        self.arranged: list[Sample] = []  # the same, as they were given
        self.followed: list[Sample] = []  # the same, of which the host's table says what the device's does
        self.pages_of: list[list[int]] = []  # of each row: whose pages are in the table, and
        self.written: list[int] = []  # how many

    def run(
        self, runner: Runner, samples: list[Sample], steps: int, meanwhile: Callable[[], None] | None = None
    ) -> tuple[list[Sample], Drawn]:
        """The samples in the order of the result, and what they drew [samples, steps], on the host. `meanwhile`: what
        else the host has to do while the device draws."""
        self._arrange(samples)
        count = len(self.rows)
        bucket = rows_for(count)
        self._record(runner, bucket)
        self._fill(bucket)
        self.table[:bucket].copy_(self.host[:bucket], non_blocking=True)
        if isinstance(self.sampler, RowSampler):
            self.sampler.follow([sample.sampling for sample in self.rows])
        self.step.zero_()
        for _ in range(steps):
            self.graphs[bucket].replay()
        if meanwhile is not None:
            meanwhile()
        tokens = self.tokens[:steps, :count].cpu()
        log_probs = self.log_probs[:, :steps, :count].cpu().transpose(1, 2)
        self._follow(tokens[-1], steps)
        return self.rows, Drawn(tokens.t(), log_probs[0], log_probs[1] if len(log_probs) > 1 else None)

    def prepare(self, runner: Runner) -> None:
        """Record steps of every number of rows, the largest first: the others find memory in its pool."""
        for bucket in sorted({rows_for(rows + 1) for rows in range(len(self.table))}, reverse=True):
            self._record(runner, bucket)

    def _record(self, runner: Runner, bucket: int) -> None:
        if bucket not in self.graphs:
            self.graphs[bucket] = self._capture(runner, bucket)

    def holds(self, longest: int) -> bool:
        return longest <= self.pages * self.size

    def _capture(self, runner: Runner, rows: int) -> Graph:
        if self.angles is None and runner.fused is not None:
            self.angles = runner.fused.all_angles(self.pages * self.size)
        if runner.fused is not None:
            compile_ahead(runner.fused, runner.cache.shape, runner.cache.size, (rows,))
        # The rehearsal before a capture must touch nobody's pages.
        self.table.zero_()
        self.step.zero_()
        pool = next(iter(self.graphs.values())).pool() if self.graphs else None
        return capture_or_explain(lambda: self._advance(runner, rows), pool)

    def _advance(self, runner: Runner, rows: int) -> None:
        if self.angles is None or runner.fused is None:
            return self._advance_by_parts(runner, rows)
        from trimtab.rollout.builtin.kernels.steps import begun, move_on

        table = self.table[:rows]
        given = begun(table, COLUMNS, self.size, runner.fused.embedding_VD, self.angles)
        hidden = runner.decode_from(given, table[:, COLUMNS:])
        result = self.sampler.draw(runner.logits(hidden), table[:, 3], table[:, 2], None)
        kept, stops = (self.tokens, self.log_probs), self.sampler.stops_of(rows)
        move_on(table, result.tokens_B, result.log_probs_B, result.plain_B, *kept, stops, self.step)

    def _advance_by_parts(self, runner: Runner, rows: int) -> None:
        table = self.table[:rows]
        tokens, positions, drawn, seeds, limits = table[:, :COLUMNS].unbind(1)
        over = drawn >= limits
        where = positions.masked_fill(over, 0)
        result = self.sampler.draw(
            runner.logits(runner.decode(tokens, where, table[:, COLUMNS:], idle_B=over)), seeds, drawn, None
        )
        self.tokens[:, :rows].index_copy_(0, self.step, result.tokens_B[None])
        for kept, new in zip(self.log_probs, (result.log_probs_B, result.plain_B)):
            kept[:, :rows].index_copy_(0, self.step, new[None])
        tokens.copy_(result.tokens_B)
        table[:, 1:3] += 1
        if (stops := self.sampler.stops_of(rows)).numel():
            limits.masked_fill_((tokens[:, None] == stops).any(1), 0)
        self.step += 1

    def _arrange(self, samples: list[Sample]) -> None:
        """Samples keep their rows; new ones and those beyond the end move into rows that are free."""
        if samples == self.arranged:
            return
        self.arranged = list(samples)
        running = set(samples)
        placed = {sample: row for row, sample in enumerate(self.rows) if sample in running}
        fresh = [sample for sample in samples if sample not in placed]
        fresh += [sample for sample, row in placed.items() if row >= len(samples)]
        taken = {row for row in placed.values() if row < len(samples)}
        free = iter(fresh)
        self.rows = [self.rows[row] if row in taken else next(free) for row in range(len(samples))]

    def _fill(self, bucket: int) -> None:
        """The host's table: what it has not followed already."""
        table, count = self.host.numpy(), len(self.rows)
        drawn = np.array([sample.ids.count for sample in self.rows])
        pairs = enumerate(zip(self.rows, self.followed))
        moved = [] if self.rows == self.followed else [row for row, both in pairs if both[0] is not both[1]]
        other = {*moved, *range(len(self.followed), count), *np.flatnonzero(table[:count, 2] != drawn).tolist()}
        self.followed = []  # until the steps are done
        for row in other:
            sample = self.rows[row]
            newer = sample.ids.count
            table[row, :COLUMNS] = sample.ids.last, sample.before + newer, newer, sample.seed, sample.limit
        table[count:bucket, :COLUMNS] = 0
        self._fill_pages(table)

    def _fill_pages(self, table: np.ndarray) -> None:
        more = len(self.rows) - len(self.written)
        self.pages_of += [[] for _ in range(more)]
        self.written += [0] * more
        pages = [sample.pages for sample in self.rows]
        for row, (own, earlier) in enumerate(zip(pages, self.pages_of)):
            if own is not earlier:
                table[row, COLUMNS:] = 0
                self.pages_of[row], self.written[row] = own, 0
        before = self.written[: len(pages)]
        self.written[: len(pages)] = after = list(map(len, pages))
        new = np.array([page for own, known in zip(pages, before) for page in own[known:]], dtype=np.int64)
        first, counts = np.array(before), np.array(after) - np.array(before)
        starts = np.arange(len(pages)) * table.shape[1] + COLUMNS + first - (counts.cumsum() - counts)
        table.reshape(-1)[np.repeat(starts, counts) + np.arange(len(new))] = new

    def _follow(self, newest: Tensor, steps: int) -> None:
        """The host's table as the device's has become, of rows that go on."""
        table, count = self.host.numpy(), len(self.rows)
        table[:count, 0] = newest.numpy()
        table[:count, 1:3] += steps
        self.followed = list(self.rows)


def capture_or_explain(work: Callable[[], None], pool: tuple[int, int] | None) -> Graph:
    try:
        return capture(work, pool)
    except Exception as error:  # torch's, or those of a kernel's compiler
        raise CannotCapture(first_line(error)) from error


def rows_for(rows: int) -> int:
    """The number of rows that is captured for so many."""
    if rows <= 32:
        return 1 << (rows - 1).bit_length()
    step = 32 if rows <= 256 else 64
    return -(-rows // step) * step
