"""CUDA graphs: decode steps and prefills that are captured once and replayed, and the cache of these graphs.

Decode steps are captured for each padded number of rows. A row of the table holds a sequence's newest token, position,
number of sampled tokens, seed, limit and pages. A step reads it, samples the next token and advances the row. Within a
chunk of steps the host does nothing. A row at its limit or after a stop token writes to page 0 only, and so do padding
rows. States of recurrent layers are in rows, too (state_cache.py). Weights may change in place between calls;
`GraphCache` detects when graphs must be captured again.

Prefills are captured for padded sizes, only with fused layers and torch's variable-length attention, which accepts
sequences of length 0: padding tokens belong to no sequence, and their keys go to page 0, which is never read. Until a
size has occurred often enough to be worth capturing, the same work runs eagerly on tensors of the same size, with the
same kernels and so the same numbers.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trimtab.data.batches import can_pin
from trimtab.distributed.device import DeviceGraph, capture_graph, has_graphs
from trimtab.models.attention import PackedRow
from trimtab.models.policy import Policy
from trimtab.models.precompile import compile_together
from trimtab.models.pretrained import first_line
from trimtab.rollout.builtin.attention import MOST_TOGETHER, SinglePart, VarlenPart
from trimtab.rollout.builtin.kv_cache import KVCache
from trimtab.rollout.builtin.model_runner import ModelRunner, switches
from trimtab.rollout.builtin.sampler import PerRequestSampler, Sampler, SamplerOutput, SamplingFeatures
from trimtab.rollout.builtin.scheduler import SequenceState
from trimtab.rollout.builtin.state_cache import DecodeStates, StateTable
from trimtab.rollout.sampling import SamplingParams

COLUMNS = 5  # before the pages


class CaptureFailed(Exception):
    """A step of the model cannot be captured, for example because it needs the host."""


class DecodeGraphs:
    """Captured decode steps with one sampler."""

    chunk_size = 24  # decode steps of a chunk, and
    long_chunk_size = 64  # while no sequence waits

    def __init__(
        self,
        sampler: Sampler | PerRequestSampler,
        cache: KVCache,
        max_num_seqs: int,
        longest: int,
        states: StateTable | None = None,
    ):
        """`longest`: tokens of a sequence; `states`: of recurrent layers."""
        self.sampler, self.size, self.states = sampler, cache.size, states
        self.pages = 1 << (-(-longest // cache.size) - 1).bit_length()
        device, shape = cache.device, (padded_rows(max_num_seqs), COLUMNS + self.pages)
        self.host = torch.zeros(shape, dtype=torch.int64, pin_memory=can_pin(device.type))
        self.table = torch.zeros(shape, dtype=torch.int64, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        results = self.long_chunk_size, shape[0]
        self.tokens = torch.zeros(results, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(2 if sampler.plain else 1, *results, device=device)
        self.angles: tuple[Tensor, Tensor] | None = None
        self.graphs: dict[int, DeviceGraph] = {}
        self.states_of: dict[int, DecodeStates] = {}  # views of the table, by number of rows
        self.rows: list[SequenceState] = []
        self.arranged: list[SequenceState] = []  # the same in the caller's order
        self.followed: list[SequenceState] = []  # the same, while the host's table equals the device's
        self.pages_of: list[list[int]] = []  # the page list of each row of the table
        self.written: list[int] = []  # number of its pages already in the table

    def run(
        self, runner: ModelRunner, samples: list[SequenceState], steps: int, meanwhile: Callable[[], None] | None = None
    ) -> tuple[list[SequenceState], SamplerOutput]:
        """Run decode steps; returns the sequences in the order of the result, and the samples [sequences, steps] on the
        host. `meanwhile` is called while the device works."""
        self._arrange(samples)
        count = len(self.rows)
        bucket = padded_rows(count)
        self._ensure_captured(runner, bucket)
        if self.states is not None:
            self.states.place(self.rows)
        self._fill(bucket)
        self.table[:bucket].copy_(self.host[:bucket], non_blocking=True)
        if isinstance(self.sampler, PerRequestSampler):
            self.sampler.follow([sample.sampling for sample in self.rows])
        self.step.zero_()
        for _ in range(steps):
            self.graphs[bucket].replay()
        if meanwhile is not None:
            meanwhile()
        tokens = self.tokens[:steps, :count].cpu()
        log_probs = self.log_probs[:, :steps, :count].cpu().transpose(1, 2)
        self._follow(tokens[-1], steps)
        return self.rows, SamplerOutput(tokens.t(), log_probs[0], log_probs[1] if len(log_probs) > 1 else None)

    def prepare(self, runner: ModelRunner) -> None:
        """Capture steps for every padded number of rows, the largest first, so that the others reuse its memory
        pool."""
        for bucket in sorted({padded_rows(rows + 1) for rows in range(len(self.table))}, reverse=True):
            self._ensure_captured(runner, bucket)

    def _ensure_captured(self, runner: ModelRunner, bucket: int) -> None:
        if bucket not in self.graphs:
            self.graphs[bucket] = self._capture(runner, bucket)

    def holds(self, longest: int) -> bool:
        return longest <= self.pages * self.size

    def _capture(self, runner: ModelRunner, rows: int) -> DeviceGraph:
        if runner.fused is not None:
            with runner.fused.one_of_each_kind():
                compile_together(lambda: self.step_on_page_0(runner, rows), runner.device)
        self._begin(runner)
        pool = next(iter(self.graphs.values())).pool() if self.graphs else None
        with contextlib.nullcontext() if self.states is None else self._with_states(runner, rows):
            return captured_graph(lambda: self._step(runner, rows), pool)

    def _begin(self, runner: ModelRunner) -> None:
        """What runs before a capture must write to page 0 only."""
        if self.angles is None and runner.fused is not None:
            self.angles = runner.fused.all_angles(self.pages * self.size)
        self.table.zero_()
        self.step.zero_()

    def step_on_page_0(self, runner: ModelRunner, rows: int) -> None:
        self._begin(runner)
        self._step(runner, rows)

    @contextlib.contextmanager
    def _with_states(self, runner: ModelRunner, rows: int) -> Iterator[None]:
        """Inside, steps with this number of rows update the states in place; afterwards the states are as before."""
        assert self.states is not None
        self.states.allocate(runner.states_of_one)
        self.states_of[rows] = states = self.states.of_rows(rows)
        before = states.addresses()
        with self.states.preserved(rows):
            yield
        if states.addresses() != before:
            raise CaptureFailed("a recurrent layer replaces its state instead of updating it")

    def _step(self, runner: ModelRunner, rows: int) -> None:
        if self.angles is None or runner.fused is None:
            return self._step_by_parts(runner, rows)
        from trimtab.rollout.builtin.kernels.decode_step import advance_step, decode_inputs

        table = self.table[:rows]
        given = decode_inputs(table, COLUMNS, self.size, runner.fused.embedding_VD, self.angles)
        hidden = runner.decode_from(given, table[:, COLUMNS:])
        result = self.sampler.draw(runner.logits(hidden), table[:, 3], table[:, 2], None)
        kept, stops = (self.tokens, self.log_probs), self.sampler.stops_of(rows)
        advance_step(table, result.tokens_B, result.log_probs_B, result.plain_B, *kept, stops, self.step)

    def _step_by_parts(self, runner: ModelRunner, rows: int) -> None:
        table = self.table[:rows]
        tokens, positions, drawn, seeds, limits = table[:, :COLUMNS].unbind(1)
        over = drawn >= limits
        where = positions.masked_fill(over, 0)
        hidden = runner.decode(tokens, where, table[:, COLUMNS:], idle_B=over, states=self.states_of.get(rows))
        result = self.sampler.draw(runner.logits(hidden), seeds, drawn, None)
        self.tokens[:, :rows].index_copy_(0, self.step, result.tokens_B[None])
        for kept, new in zip(self.log_probs, (result.log_probs_B, result.plain_B)):
            kept[:, :rows].index_copy_(0, self.step, new[None])
        tokens.copy_(result.tokens_B)
        table[:, 1:3] += 1
        if (stops := self.sampler.stops_of(rows)).numel():
            limits.masked_fill_((tokens[:, None] == stops).any(1), 0)
        self.step += 1

    def _arrange(self, samples: list[SequenceState]) -> None:
        """Sequences keep their rows; new ones and those beyond the end move into free rows."""
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
        """Update the rows of the host's table that differ from the sequences."""
        table, count = self.host.numpy(), len(self.rows)
        drawn = np.array([sample.ids.count for sample in self.rows])
        pairs = enumerate(zip(self.rows, self.followed))
        moved = [] if self.rows == self.followed else [row for row, both in pairs if both[0] is not both[1]]
        other = {*moved, *range(len(self.followed), count), *np.flatnonzero(table[:count, 2] != drawn).tolist()}
        self.followed = []  # until the steps have run
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
        """Advance the host's table as the device has advanced its own."""
        table, count = self.host.numpy(), len(self.rows)
        table[:count, 0] = newest.numpy()
        table[:count, 1:3] += steps
        self.followed = list(self.rows)


def captured_graph(work: Callable[[], None], pool: tuple[int, int] | None) -> DeviceGraph:
    try:
        return capture_graph(work, pool)
    except Exception as error:  # from torch, or from a kernel's compiler
        raise CaptureFailed(first_line(error)) from error


def padded_rows(rows: int) -> int:
    """The number of rows, padded to one for which steps are captured."""
    if rows <= 32:
        return 1 << (rows - 1).bit_length()
    step = 32 if rows <= 256 else 64
    return -(-rows // step) * step


# ---- prefill

RUNS_BEFORE_CAPTURE = 2
"""Eager prefills of a size before it is captured. A capture takes as long as about two of them (30 layers on an H200:
90 ms; a prefill takes 41 to 51 ms eagerly and 6 ms captured). So a size that occurs once costs nothing extra, and a
frequent one costs at most twice as much as with capture in advance."""

RUNS_BEFORE_EXACT_FIT = 256
"""The same if a larger size is already captured: padding more sequences costs at most a few milliseconds."""

COMMON_KEY_COUNTS = 2**12, 2**14, MOST_TOGETHER
"""Padded numbers of keys. All are copied, used or not, so a few conversations use a smaller size than many."""

MAX_GRAPHS = 128  # of prefills; the least recently used one is evicted


class PrefillSize(NamedTuple):
    """Padded size of a prefill."""

    tokens: int
    sequences: int
    keys: int  # of all sequences, if some have a cached prefix; otherwise 0
    longest: int  # keys

    @classmethod
    def of(cls, own: np.ndarray, whole: np.ndarray) -> "PrefillSize":
        """`own`: new tokens of each sequence; `whole`: all its tokens."""
        tokens, longest = _rounded(int(own.sum())), _power(int(whole.max()))
        if (own == whole).all():
            return cls(tokens, max(8, _power(len(own))), 0, longest)
        # Few sizes: observations of environments vary in length, and padding sequences costs little.
        keys = max(COMMON_KEY_COUNTS[0], _power(int(whole.sum())))
        return cls(tokens, max(min(tokens, 256), _power(len(own))), keys, longest)

    def holds(self, other: "PrefillSize") -> bool:
        """Whether a prefill of the other size fits into this one, with the same number of tokens."""
        same = self.tokens == other.tokens and (self.keys > 0) == (other.keys > 0)
        return same and all(own >= others for own, others in zip(self, other))


def common_sizes(most: int, longest: int) -> list[PrefillSize]:
    """Sizes to capture before requests are known, for passes of at most `most` tokens and sequences of at most
    `longest`:
    many short prompts, a few longer ones, and prompts with cached prefixes."""
    sizes = sorted({_rounded(min(tokens, most)) for tokens in (128, 256, 512, *range(1024, most + 1024, 1024))})
    long, found = min(2048, _power(longest)), []
    for tokens in sizes:
        found.append(PrefillSize(tokens, 256, 0, min(512, long)))
        if min(long, tokens) > 512:
            found.append(PrefillSize(tokens, max(8, _power(tokens // 64)), 0, min(long, _power(tokens))))
    few = [tokens for tokens in sizes if tokens <= 1024]
    return found + [PrefillSize(tokens, 256, keys, long) for keys in COMMON_KEY_COUNTS for tokens in few]


@dataclass
class PrefillGraph:
    """The tensors of a prefill of one size, and its graph once it is captured."""

    tokens: Tensor  # [3, T]: ids, positions, slots
    sequences: Tensor  # [3, S]: end of each, its last token, end of its keys
    keys: Tensor | None  # [K]: positions of all keys in the KV cache
    hidden_SD: Tensor
    longest: int
    graph: DeviceGraph | None = None

    def run(self, runner: ModelRunner) -> None:
        if self.graph is None:
            self.work(runner)
        else:
            self.graph.replay()

    def work(self, runner: ModelRunner) -> None:
        starts, key_starts = (torch.nn.functional.pad(self.sequences[n], (1, 0)).int() for n in (0, 2))
        count = self.tokens.shape[1]
        row, continued = PackedRow(starts, starts, None, count, self.longest), None
        if self.keys is not None:
            continued = SinglePart(VarlenPart(slice(0, count), starts, key_starts, self.keys, self.longest))
        ids, positions, slots = self.tokens
        self.hidden_SD.copy_(runner.hidden_states(row, ids, positions, slots, continued)[self.sequences[1]])


class PrefillGraphs:
    """Prefills by padded size, captured when a size is repeated."""

    def __init__(self):
        self.passes: dict[PrefillSize, PrefillGraph] = {}  # captured ones
        self.times: Counter[PrefillSize] = Counter()  # of eager prefills of other sizes

    def prefill(self, runner: ModelRunner, texts: list[tuple[list[int], int, list[int]]]) -> Tensor:
        """Prefill sequences given as (ids, number of cached ones, pages); returns the last hidden state of each [S,
        D]."""
        whole, done = (np.array(numbers) for numbers in zip(*((len(ids), done) for ids, done, _ in texts)))
        own, count = whole - done, len(texts)
        size, prepared = self._prepared(runner, PrefillSize.of(own, whole))
        slots = [runner.slots(pages, len(ids)) for ids, _, pages in texts]
        total = int(own.sum())
        tokens = np.zeros((3, size.tokens), dtype=np.int64)
        tokens[0, :total] = np.concatenate([ids[known:] for ids, known, _ in texts])
        tokens[1, :total] = np.concatenate([np.arange(known, len(ids)) for ids, known, _ in texts])
        tokens[2, :total] = np.concatenate([found[known:] for found, known in zip(slots, done)])
        sequences = np.empty((3, size.sequences), dtype=np.int64)
        for row, lengths in ((0, own), (2, whole)):
            sequences[row, :count] = lengths.cumsum()
            sequences[row, count:] = lengths.sum()
        sequences[1] = sequences[0] - 1
        prepared.tokens.copy_(torch.from_numpy(tokens))
        prepared.sequences.copy_(torch.from_numpy(sequences))
        if prepared.keys is not None:
            keys = np.zeros(size.keys, dtype=np.int64)
            keys[: int(whole.sum())] = np.concatenate(slots)
            prepared.keys.copy_(torch.from_numpy(keys))
        prepared.run(runner)
        return prepared.hidden_SD[:count].clone()

    def prepare(self, runner: ModelRunner, most: int, longest: int) -> None:
        """Capture `common_sizes`, the largest first, so that the others reuse its memory pool."""
        for size in reversed(common_sizes(most, longest)):
            if size not in self.passes:
                self.passes[size] = made = self._made(runner, size)
                self._capture(runner, made)

    def _prepared(self, runner: ModelRunner, size: PrefillSize) -> tuple[PrefillSize, PrefillGraph]:
        if size in self.passes:
            return size, self._used(size)
        larger = [known for known in self.passes if known.holds(size)]
        enough = RUNS_BEFORE_EXACT_FIT if larger else RUNS_BEFORE_CAPTURE
        self.times[size] += 1
        if larger and self.times[size] <= enough:
            best = min(larger, key=lambda known: (known.keys, known.sequences * known.longest))
            return best, self._used(best)
        fresh = self._made(runner, size)
        if self.times[size] > enough:
            self._capture(runner, fresh)
            self.passes[size] = fresh
            if len(self.passes) > MAX_GRAPHS:
                oldest = next(iter(self.passes))
                del self.passes[oldest], self.times[oldest]  # it must occur as often again
        return size, fresh

    def _used(self, size: PrefillSize) -> PrefillGraph:
        self.passes[size] = found = self.passes.pop(size)  # most recently used
        return found

    def _made(self, runner: ModelRunner, size: PrefillSize) -> PrefillGraph:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=runner.device)

        shape = size.sequences, runner.policy.head.in_features
        hidden = torch.zeros(shape, dtype=runner.cache.shape.dtype, device=runner.device)
        keys = zeros(size.keys) if size.keys else None
        return PrefillGraph(zeros(3, size.tokens), zeros(3, size.sequences), keys, hidden, size.longest)

    def _capture(self, runner: ModelRunner, made: PrefillGraph) -> None:
        pools = [p.graph.pool() for p in self.passes.values() if p.graph is not None]
        made.graph = captured_graph(lambda: made.work(runner), pools[0] if pools else None)


def _rounded(tokens: int) -> int:
    return max(128, _power(tokens)) if tokens <= 1024 else -(-tokens // 1024) * 1024


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


# ---- graphs of a policy

logger = logging.getLogger(__name__)


class GraphCache:
    """The graphs captured for a policy, kept between calls while they are valid."""

    def __init__(self, policy: Policy, max_num_seqs: int, *, possible: bool = True, recurrent: bool = False):
        self.policy, self.max_num_seqs = policy, max_num_seqs
        self.possible = possible and has_graphs(policy.device)
        self.states = StateTable(policy.config) if recurrent else None
        self._forget()

    def release(self) -> None:
        """Free all memory. No sequence may be running."""
        self._forget()
        if self.states is not None:
            self.states.clear()

    def state_rows(self, samples: int) -> int:
        """Rows that the table of states needs for this number of sequences at once."""
        return 0 if self.states is None else max(self.states.rows, padded_rows(samples))

    def state_sequences(self, samples: int) -> int:
        """For how many sequences states still need memory, if this many run at once: the table's rows, or their own."""
        if self.states is None or not self.possible:
            return samples
        return self.state_rows(samples) - (self.states.rows if self.states.nbytes else 0)

    @property
    def state_bytes(self) -> int:
        return 0 if self.states is None else self.states.nbytes

    def return_states(self, samples: Sequence[SequenceState]) -> None:
        """Before steps that are not captured: sequences keep the states of recurrent layers themselves."""
        if self.states is not None:
            self.states.give_back(samples)
            if not self.possible:
                self.states.clear()

    def _forget(self) -> None:
        self.prefills: PrefillGraphs | None = None
        self.decodes: DecodeGraphs | None = None
        self._by_rows: dict[bool, tuple[SamplingFeatures, DecodeGraphs]] = {}  # by whether sampling filters tokens
        self._hold_for: tuple = ()
        self._rule: tuple = ()  # sampling rule of `decodes`

    def follow(self, cache: KVCache, *, fused: bool, state_rows: int) -> None:
        """Drop graphs that are no longer valid for the policy and this cache; `fused`: with fused layers; `state_rows`:
        of the table of states."""
        if not self.possible:
            return
        if self.states is not None and state_rows > self.states.rows:
            self._forget()
            self.states.grow(state_rows)
        hold_for = fingerprint(self.policy, cache)
        if hold_for != self._hold_for:
            self._forget()
            self._hold_for = hold_for
        width = cache.shape.width
        half = cache.shape.dtype in (torch.bfloat16, torch.float16)
        by_varlen = half and width is not None and width % 8 == 0 and width <= 256
        if self.prefills is None and fused and by_varlen:
            self.prefills = PrefillGraphs()

    def give_up(self, reason: CaptureFailed) -> None:
        """Run eagerly from now on."""
        logger.warning("the model cannot be captured as a graph and generates more slowly: %s", reason)
        self._forget()
        self.possible = False

    def decode_graphs(self, cache: KVCache, sampling: SamplingParams, longest: int) -> DecodeGraphs | None:
        """Graphs with one sampling rule for all rows; None if sampling needs the host in every step."""
        if not self.possible or sampling.repetition_penalty != 1.0 or sampling.top_log_probs:
            return None
        if self.decodes is None or self._rule != sampling.rule or not self.decodes.holds(longest):
            self.decodes = None  # free its memory first
            sampler = Sampler(sampling, self.policy.head.out_features, cache.device)
            self.decodes, self._rule = self._decode_graphs(sampler, cache, longest), sampling.rule
        return self.decodes

    def decode_graphs_by_row(
        self, cache: KVCache, settings: Sequence[SamplingParams], longest: int
    ) -> DecodeGraphs | None:
        """Graphs with sampling parameters by row, which may change between chunks."""
        kind = SamplingFeatures.of(settings)
        if not self.possible or not all(can_capture(setting) for setting in settings):
            return None
        found = self._by_rows.get(kind.filtered)
        if found is None or not found[0].covers(kind) or not found[1].holds(longest):
            kind = kind if found is None else found[0].together_with(kind)
            self._by_rows.pop(kind.filtered, None)  # free its memory first
            sampler = PerRequestSampler.blank(kind, padded_rows(self.max_num_seqs), cache.device)
            found = self._by_rows[kind.filtered] = kind, self._decode_graphs(sampler, cache, longest)
        return found[1]

    def _decode_graphs(self, sampler: Sampler | PerRequestSampler, cache: KVCache, longest: int) -> DecodeGraphs:
        return DecodeGraphs(sampler, cache, self.max_num_seqs, longest, self.states)


def can_capture(sampling: SamplingParams) -> bool:
    """Whether these parameters can be captured: others need tensors of varying size, or results that graphs do not
    store."""
    plain = sampling.repetition_penalty == 1 and sampling.top_log_probs == 0
    return plain and not sampling.logit_bias and not sampling.forbidden_tokens


def fingerprint(policy: Policy, cache: KVCache) -> tuple:
    """A key that changes when graphs become invalid: tensors have other addresses, or adapters are switched. It
    includes the cache's size, since a cache of another size may have the same address."""
    addresses = tuple(t.data_ptr() for t in (*policy.parameters(), *policy.buffers(), *cache.tensors))
    return addresses, cache.pages, switches(policy)
