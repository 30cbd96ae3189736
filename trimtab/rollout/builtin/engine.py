"""The built-in rollout engine: it generates with the trainer's weights in place.

A session admits waiting requests, prefills new prompts, and samples first tokens. Then it decodes a chunk of steps for
all running sequences, finishes some, admits others, and repeats. On an accelerator, decode steps and prefills are
captured as graphs (cuda_graphs.py) with fused kernels (kernels/). Elsewhere, and if capture fails, the same passes run
eagerly.

Between calls the engine keeps the KV cache, the prefix cache and captured graphs.
"""

import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trimtab.distributed.device import free_memory
from trimtab.distributed.process_group import Peers
from trimtab.distributed.supervision import own_heartbeat
from trimtab.errors import UserError
from trimtab.models.policy import Policy
from trimtab.models.recurrent import recurrent_modules
from trimtab.models.rotary import generated_context
from trimtab.rollout.builtin.cuda_graphs import CaptureFailed, DecodeGraphs, GraphCache, padded_rows
from trimtab.rollout.builtin.kv_cache import PAGE_SIZE, KVCache, KVCacheManager
from trimtab.rollout.builtin.linear import Int8Layers
from trimtab.rollout.builtin.model_runner import (
    ModelRunner,
    RecomputeRunner,
    build_fused_layers,
    check_decode,
    is_sharded,
    sampled_weights,
)
from trimtab.rollout.builtin.prefill import Prefill, keep_states
from trimtab.rollout.builtin.sampler import PerRequestSampler, Sampler, SamplerCache, SamplerOutput, same_params
from trimtab.rollout.builtin.scheduler import PromptState, ScheduledSequence, Scheduler, SequenceState
from trimtab.rollout.builtin.state_cache import DecodeStates, split_states
from trimtab.rollout.engine import Engine, TokenSession
from trimtab.rollout.sampling import (
    SamplingParams,
    at_stop_tokens,
    request_seed,
    stop_string_end,
)
from trimtab.rollout.trajectory import Finish, TopLogprobs, Trajectory

logger = logging.getLogger(__name__)


def append_tokens(
    samples: list[SequenceState], drawn: SamplerOutput, tokenizer: PreTrainedTokenizerBase | None
) -> list[tuple[SequenceState, Finish]]:
    """Append sampled tokens to the sequences; returns those that have finished, with their finish reasons."""
    tokens, log_probs, plain = drawn.on_host(len(samples))
    steps, number = tokens.shape[1], np.arange(tokens.shape[1])
    remaining = np.array([sample.limit - sample.ids.count for sample in samples])
    stops = at_stop_tokens(tokens, [sample.sampling.stop_token_ids for sample in samples]) & (
        number < remaining[:, None]
    )
    stopped = stops.any(1)
    kept = np.where(stopped, stops.argmax(1) + 1, np.minimum(steps, remaining))
    broken = np.argwhere(np.isnan(log_probs) & (number < kept[:, None]))
    if len(broken):
        row, step = broken[0]
        raise UserError(
            f"the model's logits are not finite for prompt {samples[row].prompt.index}, sample "
            f"{samples[row].number}, token {len(samples[row].ids) + step}; its weights are probably broken"
        )
    # Copies, because the next chunk overwrites the buffers.
    rows = list(np.array(tokens, np.int32, order="C")), list(np.array(log_probs, np.float32, order="C"))
    plain = None if plain is None else np.array(plain, np.float32, order="C")
    likely = drawn.likely_on_host(len(samples))
    counts = kept.tolist()
    for sample, count, ids, own in zip(samples, counts, *rows):
        if count < steps:
            ids, own = ids[:count], own[:count]
        sample.ids.extend(ids, count)
        sample.log_probs.extend(own, count)
    if plain is not None or likely is not None:
        for row, (sample, count) in enumerate(zip(samples, counts)):
            if plain is not None:
                sample.plain_log_probs.extend(plain[row, :count], count)
            if likely is not None and sample.sampling.top_log_probs:
                sample.extend_likely(*(part[row, :count] for part in likely))
    for row, (sample, count) in enumerate(zip(samples, counts)):
        if sample.sampling.stop_strings and _cut_at_stop_string(sample, sample.ids.count - count, tokenizer):
            stopped[row] = True
    ended = np.flatnonzero(stopped | (kept == remaining)).tolist()
    return [(samples[row], "stop" if stopped[row] else "length") for row in ended]


def _cut_at_stop_string(sample: SequenceState, before: int, tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Cut after a stop string that ends after the first `before` tokens; returns whether there is one."""
    assert tokenizer is not None, "checked with the sampling parameters"
    end = stop_string_end(
        *(sample.ids.array, before, sample.sampling.min_new_tokens, sample.sampling.stop_strings),
        lambda ids: tokenizer.decode(ids.tolist()),
    )
    if end is None:
        return False
    for column in sample.columns:
        column.cut(min(end, len(column)))
    return True


def trajectory_of(sample: SequenceState, finish: Finish, version: int) -> Trajectory:
    """`version`: of the weights that sampled the new tokens."""
    prompt, ids, log_probs = sample.prompt, sample.ids.array, sample.log_probs.array
    versions = sample.partial.versions_with(len(ids), version)
    rollout = Trajectory(prompt.index, sample.number, prompt.ids, ids, log_probs, finish, versions=versions)
    rollout.plain_log_probs = sample.plain_log_probs.array if sample.sampling.plain_log_probs else None
    rollout.alternatives = None if sample.likely is None else TopLogprobs(*(c.array for c in sample.likely))
    rollout.prompt_log_probs = prompt.log_probs
    return rollout


# ---- sessions


CHUNK_SIZE = 8  # decode steps between two visits of the host, without captured graphs


class BuiltinSession(TokenSession):
    """An open session. Until it is closed, nothing else may use the policy."""

    scores_prompts = True

    def __init__(self, engine: "BuiltinEngine", sampling: SamplingParams, prefix_caching: bool):
        """`prefix_caching`: later requests reuse the pages of earlier ones."""
        limits = {"vocabulary": engine.policy.head.out_features, "context": engine.context}
        super().__init__(sampling, **limits, owner="model", tokenizer=engine.tokenizer)
        self.engine, self.prefix_caching = engine, prefix_caching
        self.device = engine.policy.device
        self._longest = self._expected = 0
        self._new: list[SequenceState] = []
        self._scheduler: Scheduler | None = None
        self._prepared = False
        self._address: tuple | None = None  # of the KV cache that the graphs were checked for, and its size
        self.contexts = contextlib.ExitStack()  # open until the session is closed

    # ---- the session's interface

    def add_samples(
        self, prompt_ids: list[int], partials: Sequence[Trajectory], seed: int, limit: int, sampling: SamplingParams
    ) -> None:
        plain = sampling.plain_log_probs and any(len(partial.tokens) for partial in partials)
        assert not plain, "a partial rollout has no log-probs at another temperature"
        prompt = PromptState(self.requests, list(prompt_ids), len(partials))
        prompt.scoring = None if sampling.prompt_log_probs is None else sampling
        for partial in partials:
            own = request_seed(seed, partial.sample)
            self._new.append(SequenceState.of(prompt, partial, own, limit, sampling))
        self._longest = max(self._longest, len(prompt_ids) + limit)

    def expect(self, samples: int) -> None:
        """Size the KV cache for this many samples: if it grew later, graphs would have to be captured again."""
        self._expected = max(self._expected, samples)

    @torch.no_grad()
    def prepare(self, longest: int) -> None:
        captured = self.engine.captured
        if not captured.possible:
            return
        self._prepared, self._longest = True, max(self._longest, longest)
        self.expect(self.engine.max_num_seqs)
        self._admit_new()
        try:
            graphs = captured.decode_graphs_by_row(self._runner.cache, [self.sampling], self._longest)
            if graphs is not None:
                graphs.prepare(self._runner)
            if captured.prefills is not None:
                captured.prefills.prepare(self._runner, self.engine.max_num_batched_tokens, self._longest)
        except CaptureFailed as error:
            captured.give_up(error)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._new) or (self._scheduler is not None and self._scheduler.has_unfinished)

    @property
    def full(self) -> bool:
        return len(self._unfinished()) + len(self._new) >= self.engine.max_num_seqs

    @torch.no_grad()
    def step(self, steps: int | None = None) -> list[Trajectory]:
        own_heartbeat.move()
        if self._new:
            self._admit_new()
        scheduler = self._scheduler
        if scheduler is None:
            return []
        finished: list[Trajectory] = []
        if self._aborted:
            gone = scheduler.abort(lambda sample: sample.prompt.index in self._aborted)
            finished += [trajectory_of(sample, "abort", self.engine.version) for sample in gone]
            self._aborted.clear()
        finished += self._begin(scheduler, scheduler.schedule())
        if not scheduler.running:
            scheduler.free_finished()
        elif not finished and steps != 0:
            graphs = self._graphs_for(scheduler.running)
            finished += self._decode(scheduler, graphs, self._chunk_size(scheduler, graphs, steps))
        return finished

    def output_ids(self, request: int) -> list[int]:
        unfinished = self._unfinished()
        return next((s.ids.array.tolist() for s in unfinished if (s.prompt.index, s.number) == (request, 0)), [])

    def output_lengths(self) -> dict[tuple[int, int], int]:
        return {(s.prompt.index, s.number): len(s.ids) for s in [*self._unfinished(), *self._new]}

    def partials(self) -> dict[int, list[Trajectory]]:
        found: dict[int, list[Trajectory]] = {}
        for sample in [*self._unfinished(), *self._new]:
            count = min(len(sample.ids), len(sample.log_probs))
            ids, log_probs = sample.ids.array[:count], sample.log_probs.array[:count]
            versions = sample.partial.versions_with(count, self.engine.version)
            partial = Trajectory(0, sample.number, [], ids, log_probs, versions=versions)
            found.setdefault(sample.prompt.index, []).append(partial)
        return found

    def new_tokens(self, known: Mapping[int, int]) -> dict[int, Trajectory]:
        found: dict[int, Trajectory] = {}
        for sample in self._unfinished():
            number = sample.prompt.index
            if (first := known.get(number)) is None or len(sample.ids) <= first:
                continue
            piece = Trajectory(number, 0, [], sample.ids.since(first), sample.log_probs.since(first))
            if sample.likely is not None:
                piece.alternatives = TopLogprobs(*(column.since(first) for column in sample.likely))
            piece.prompt_log_probs = None if first else sample.prompt.log_probs
            found[number] = piece
        return found

    def close(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = None
        self._new.clear()
        self.contexts.close()

    # ---- memory

    def _admit_new(self) -> None:
        """Size the KV cache for new requests, and give them to the scheduler."""
        engine, memory = self.engine, self.engine.memory
        if self._scheduler is not None:
            self._scheduler.free_finished()  # new requests may hit their prefixes
        samples = min(engine.max_num_seqs, max(self._expected, len(self._unfinished()) + len(self._new)))
        states, rows = engine.captured.state_sequences(samples), engine.captured.state_rows(samples)
        cache = memory.cache(samples, self._longest, self.device, states)
        address = tuple(tensor.data_ptr() for tensor in cache.tensors), cache.pages, rows
        if self._address != address:  # nothing else that graphs depend on changes in an open session
            engine.captured.follow(cache, fused=engine.fused is not None, state_rows=rows)
            self._address = address
        if self._scheduler is None:
            memory.prefix_cache.enabled = self.prefix_caching and not engine.recurrent and not engine.recomputes
            self._scheduler = Scheduler(memory.prefix_cache, engine.max_num_seqs)
            self._runner = engine.runner(cache)
            self.contexts.enter_context(self._runner)
            self._prefill = Prefill(self._runner, engine.captured, engine.max_num_batched_tokens)
            self._samplers = SamplerCache(self.vocabulary, self.device)
        self._graphs = engine.captured.decode_graphs(cache, self.sampling, self._longest)
        self._scheduler.add(self._new)
        self._new = []

    def _unfinished(self) -> list[SequenceState]:
        return [] if self._scheduler is None else [*self._scheduler.running, *self._scheduler.waiting]

    # ---- prefill and decode

    def _begin(self, scheduler: Scheduler, admissions: list[ScheduledSequence]) -> list[Trajectory]:
        """Prefill scheduled sequences, and sample the first token of new ones."""
        prefill = self._prefill
        prefill.run(admissions)
        self.engine.prefilled_tokens, prefill.tokens = self.engine.prefilled_tokens + prefill.tokens, 0
        fresh, finished = [a.sample for a in admissions if not a.sample.ids], []
        first = [a.sample for a in admissions if len(a.sample.ids) <= 1 and a.sample.prompt.states is not None]
        keep_states(first, [sample.prompt.states for sample in first])
        if fresh:
            hidden = torch.stack([prefill.hidden[s.prompt] for s in fresh])
            samplers = self._samplers
            drawn = self._draw(hidden, samplers.of(fresh), self._seeds(fresh), None, samplers.seen(fresh))
            finished = self._take(scheduler, fresh, drawn)
        scheduler.prefill_done()
        prefill.forget()
        return finished

    def _graphs_for(self, running: list[SequenceState]) -> DecodeGraphs | None:
        """Graphs with one sampling rule for all running sequences, or with one for each row."""
        captured = self.engine.captured
        if not captured.possible:
            return None
        # Prepared graphs sample by row.
        if not self._prepared and same_params(running) and running[0].sampling.rule == self.sampling.rule:
            return self._graphs
        settings = list({id(sample.sampling): sample.sampling for sample in running}.values())  # most are the same
        return captured.decode_graphs_by_row(self._runner.cache, settings, self._longest)

    def _chunk_size(self, scheduler: Scheduler, graphs: DecodeGraphs | None, most: int | None) -> int:
        """Steps of the next decode chunk, at most `most`, for which pages are allocated."""
        chunk = (1 if self.engine.recomputes else CHUNK_SIZE) if graphs is None else graphs.chunk_size
        if graphs is not None and not scheduler.waiting and (most is None or most > chunk):
            short = scheduler.short(graphs.long_chunk_size)
            if scheduler.can_allocate(short):
                chunk = graphs.long_chunk_size
        steps = chunk if most is None else min(most, chunk)
        if graphs is None or steps < graphs.long_chunk_size:
            short = scheduler.short(steps)
        scheduler.allocate(short)
        return steps

    def _decode(self, scheduler: Scheduler, graphs: DecodeGraphs | None, chunk: int) -> list[Trajectory]:
        running = list(scheduler.running)
        steps = min(chunk, max([s.limit - s.ids.count for s in running]))
        drawn: SamplerOutput | None = None
        if graphs is not None:
            try:
                running, drawn = graphs.run(self._runner, running, steps, self._during_decode)
            except CaptureFailed as error:
                self.engine.captured.give_up(error)
        return self._take(scheduler, running, self._decode_eager(running, steps) if drawn is None else drawn)

    def _during_decode(self) -> None:
        if self._scheduler is not None:
            self._scheduler.free_finished()
        if self.meanwhile is not None:
            self.meanwhile()

    def _decode_eager(self, running: list[SequenceState], steps: int) -> SamplerOutput:
        runner = self._runner
        drawn = torch.tensor([len(s.ids) for s in running], device=self.device)
        sampler, seeds, seen = self._samplers.of(running), self._seeds(running), self._samplers.seen(running)
        if not runner.caches:
            return self._draw(runner.prefill([(s.text, 0, []) for s in running]), sampler, seeds, drawn, seen)
        tables = np.zeros((len(running), max(len(s.pages) for s in running) + 1), dtype=np.int64)
        for row, sample in enumerate(running):
            tables[row, : len(sample.pages)] = sample.pages
        tables = torch.from_numpy(tables).to(self.device)
        tokens = torch.tensor([s.ids[-1] for s in running], device=self.device)
        positions = torch.tensor([s.length for s in running], device=self.device)
        # Learned positions end with the context.
        last = min(tables.shape[1] * runner.cache.size, self.engine.context or math.inf) - 1
        results: list[SamplerOutput] = []
        states = None
        if runner.recurrent:
            self.engine.captured.return_states(running)
            states = DecodeStates.of([s.states for s in running], runner.policy.config)
        for step in range(steps):
            # A sequence past its end writes to page 0, which is never read.
            hidden = runner.decode(tokens, (positions + step).clamp(max=last), tables, states=states)
            results.append(self._draw(hidden, sampler, seeds, drawn + step, seen))
            tokens = results[-1].tokens_B
            if seen is not None:
                seen.scatter_(1, tokens[:, None], True)
        if states is not None:
            keep_states(running, split_states(states.cache, len(running)))
        return SamplerOutput.stacked(results)

    def _seeds(self, samples: list[SequenceState]) -> Tensor:
        return torch.tensor([s.seed for s in samples], device=self.device)

    def _draw(
        self,
        hidden: Tensor,
        sampler: Sampler | PerRequestSampler,
        seeds: Tensor,
        drawn: Tensor | None,
        seen: Tensor | None,
    ) -> SamplerOutput:
        drawn = torch.zeros_like(seeds) if drawn is None else drawn
        found = sampler.draw(self._runner.logits(hidden), seeds, drawn, seen)
        # The processes of a tensor-parallel group must continue with the same token, down to the last bit.
        return replace(found, tokens_B=self.engine.tensor.broadcast_first(found.tokens_B))

    def _take(self, scheduler: Scheduler, samples: list[SequenceState], drawn: SamplerOutput) -> list[Trajectory]:
        ended = append_tokens(samples, drawn, self.engine.tokenizer)
        scheduler.finish([sample for sample, _ in ended])
        return [trajectory_of(sample, finish, self.engine.version) for sample, finish in ended]


MAX_NUM_BATCHED_TOKENS = 8192  # prompt tokens of one prefill pass
FEW = 4  # sequences of the checks before training


def why_slow(policy: Policy) -> str:
    """A line on a model that this engine runs without a cache; empty for others."""
    if policy.path == "packed":
        return ""
    return (
        f"every token runs its whole sequence again, because rows are padded, not packed: {policy.not_packed}; "
        "--rollout_engine vllm is faster if vLLM runs this model"
    )


class BuiltinEngine(Engine):
    """The built-in engine. Until a stream is exhausted or closed, nothing else may use the policy. If the policy is
    sharded, every process must make every call, even without prompts."""

    def __init__(
        self,
        policy: Policy,
        tokenizer=None,
        *,
        max_num_seqs: int = 256,
        kv_tokens: int | None = None,
        page_size: int = PAGE_SIZE,
        max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
        weight_only_int8: bool = False,
        prefix_caching: bool = False,
        eager: bool = False,
        tensor: Peers | None = None,
    ):
        """`max_num_seqs`: sequences that run at once; `kv_tokens`: KV cache size (planned from free memory if not
        given); `max_num_batched_tokens`: prompt tokens of one prefill pass; `weight_only_int8`: see linear.py;
        `prefix_caching`: the prefix cache is kept between calls, not only within a session. Results then differ in the
        last bits from those of a full prefill. `eager`: capture no graphs. `tensor`: the tensor-parallel group. All of
        its processes make the same calls and sample the same tokens, and take decisions together."""
        if line := why_slow(policy):
            logger.warning("the built-in engine is slow here: %s", line)
        self.policy, self.tokenizer, self.max_num_seqs = policy, tokenizer, max_num_seqs
        self.max_num_batched_tokens, self.prefix_caching = max_num_batched_tokens, prefix_caching
        self.tensor = tensor or Peers()
        cut, self.recomputes = self.tensor.size > 1, policy.path != "packed"
        # With tensor parallelism every layer has collectives, which are not captured in graphs.
        graphs = not (eager or cut or self.recomputes)
        with policy.at_work():
            shape, arguments = ModelRunner.measure(policy)
            # Fused layers read whole weights; with tensor parallelism the modules reduce their partial sums.
            steps = self._first_steps if graphs else None
            self.fused = None if cut else build_fused_layers(policy, shape, arguments, page_size, steps)
        self.memory = KVCacheManager(shape, page_size, kv_tokens, self.tensor)
        self.recurrent = not self.recomputes and bool(recurrent_modules(policy.inner))
        if self.recurrent:
            with policy.at_work():
                check_decode(policy, shape, page_size)
        self.captured = GraphCache(policy, max_num_seqs, possible=graphs, recurrent=self.recurrent)
        same_kernels = self.fused is not None and policy.attention.fused
        self.exact = (shape.dtype == torch.float32 or same_kernels) and not weight_only_int8
        self.batch_invariant = same_kernels and not weight_only_int8
        self.version = 0
        self.context = generated_context(policy.config)
        self.prefilled_tokens = 0
        """Prefilled tokens so far: of prompts, as far as they were not cached, and of preempted sequences."""
        self._int8 = Int8Layers(policy) if weight_only_int8 else None
        self._cached_weights: tuple | None = None  # fingerprint of the weights behind the prefix cache

    @torch.no_grad()
    def _first_steps(self, runner: ModelRunner) -> None:
        """A decode step of few and of most sequences, and tokens drawn after a prefill."""
        head = self.policy.head
        sampler = Sampler(SamplingParams(), head.out_features, runner.device)
        steps = DecodeGraphs(sampler, runner.cache, self.max_num_seqs, runner.cache.size)
        for count in {min(FEW, self.max_num_seqs), self.max_num_seqs}:
            steps.step_on_page_0(runner, padded_rows(count))
        seeds = torch.zeros(FEW, dtype=torch.int64, device=runner.device)
        hidden = torch.zeros(FEW, head.in_features, dtype=runner.cache.shape.dtype, device=runner.device)
        sampler.draw(runner.logits(hidden), seeds, torch.zeros_like(seeds), None)

    def runner(self, cache: KVCache) -> ModelRunner:
        if self.recomputes:
            return RecomputeRunner(self.policy, cache, self.max_num_batched_tokens)
        return ModelRunner(self.policy, cache, self.fused)

    def session(self, sampling: SamplingParams) -> BuiltinSession:
        """Open a session. If the policy is sharded, every process must open and close one."""
        return self._open_session(sampling, True)

    def batch_session(self, sampling: SamplingParams) -> BuiltinSession:
        return self._open_session(sampling, self.prefix_caching)

    def _open_session(self, sampling: SamplingParams, prefix_caching: bool) -> BuiltinSession:
        self.check_idle()
        session = self._session = BuiltinSession(self, sampling, prefix_caching)
        try:
            session.contexts.callback(self._ended)
            session.contexts.enter_context(self.policy.at_work())
            self._reset_stale_cache()
            if self._int8 is not None:
                session.contexts.enter_context(self._int8)
        except BaseException:
            session.close()
            raise
        return session

    @property
    def _keeps_prefix_cache(self) -> bool:
        """Whether the prefix cache is kept between calls. Not with sharded weights: gathering them bypasses torch's
        version counters, which detect changes."""
        return self.prefix_caching and not is_sharded(self.policy)

    def _ended(self) -> None:
        self._session = None
        if not self._keeps_prefix_cache:
            self.memory.reset_prefix_cache()

    def _reset_stale_cache(self) -> None:
        """Reset the prefix cache if weights changed, also without a call of `weights_changed`."""
        if self._keeps_prefix_cache:
            weights = sampled_weights(self.policy)
            if weights != self._cached_weights:
                self.memory.reset_prefix_cache()
            self._cached_weights = weights

    def weights_changed(self, version: int) -> None:
        """Set the version, and drop cached keys and values of the previous one."""
        self.check_idle("its weights may change when all its answers are taken")
        self.version = version
        self.memory.reset_prefix_cache()

    def sleep(self) -> None:
        """Release memory; the next call allocates it again."""
        self.check_idle("it cannot sleep before all its answers are taken")
        self.captured.release()
        self.memory.release()
        if self._int8 is not None:
            self._int8.release()

    def trim_memory(self) -> None:
        """Sleep if the KV cache and states are larger than the memory that is still free."""
        if self.memory.held + self.captured.state_bytes > free_memory(self.policy.device):
            self.sleep()
