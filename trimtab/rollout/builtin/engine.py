"""What a request must be for the engine to answer it."""

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from trimtab.distributed.memory import free_memory
from trimtab.distributed.peers import Peers
from trimtab.distributed.watch import pulse
from trimtab.errors import UserError
from trimtab.models.policy import Policy
from trimtab.models.rotary import generated_context
from trimtab.rollout.builtin.cuda_graphs import CaptureFailed, DecodeGraphs, GraphCache
from trimtab.rollout.builtin.decode import append_tokens, rollout_of
from trimtab.rollout.builtin.kv_cache import PAGE_SIZE, KVCacheManager
from trimtab.rollout.builtin.linear import Int8Layers
from trimtab.rollout.builtin.model_runner import ModelRunner, build_fused_layers, is_split, state_of
from trimtab.rollout.builtin.prefill import Prefill
from trimtab.rollout.builtin.sampler import RowSampler, Sampler, SamplerCache, SamplerOutput, alike
from trimtab.rollout.builtin.scheduler import PromptState, ScheduledSequence, Scheduler, SequenceState
from trimtab.rollout.engine import AT_WORK, BaseEngine, BaseSession
from trimtab.rollout.episode import Task
from trimtab.rollout.sampling import SamplingParams, check_sampling_params, request_seed
from trimtab.rollout.trajectory import Trajectory, partials_to_run


def check_request(vocabulary: int, most: int | None, number: int, prompt_ids: list[int], limit: int) -> None:
    """`most`: places that the model has for tokens."""
    if not prompt_ids:
        raise UserError(f"prompt {number} is empty; at least one token is needed")
    if max(prompt_ids) >= vocabulary or min(prompt_ids) < 0:
        raise UserError(f"prompt {number} has a token outside the model's vocabulary of {vocabulary}")
    if limit < 1:
        raise UserError(f"the limit of prompt {number} is {limit}; at least 1 new token is needed")
    if most is not None and len(prompt_ids) + limit > most:
        raise UserError(
            f"prompt {number} has {len(prompt_ids)} tokens and {limit} may follow, but the model's "
            f"context is {most}; shorten the prompt or lower max_new_tokens"
        )


# ---- Requests at work in the engine: their way through reading, decoding and finishing. admit what fits, read new
# prompts once, draw first tokens; then decode a few steps for all that run, look at what was drawn, let finished
# samples go, refill their places; repeat


CHUNK_SIZE = 8


class BuiltinSession(BaseSession):
    """Until it is closed, the policy is the engine's."""

    def __init__(self, engine: "BuiltinEngine", sampling: SamplingParams, enabled: bool):
        """`keeping`: what was read and drawn may be read again by later requests."""
        super().__init__()
        self.engine, self.sampling, self.enabled = engine, sampling, enabled
        self.device = engine.policy.device
        self._vocabulary = engine.policy.head.out_features  # models are slow to ask
        self._longest = self._expected = 0
        self._new: list[SequenceState] = []
        self._scheduler: Scheduler | None = None
        self._prepared = False
        self._lies_at: tuple[int, int, int] | None = None  # the memory that recordings were looked through for
        self._open = contextlib.ExitStack()

    # ---- what callers do

    def add(
        self,
        prompt_ids: list[int],
        *,
        seed: int | None = None,
        limit: int | None = None,
        partials: Sequence[Trajectory] | None = None,
        task: Task | None = None,
        sampling: SamplingParams | None = None,
    ) -> int:
        if sampling is not None:
            check_sampling_params(sampling, self._vocabulary, self.engine.tokenizer)
        sampling = self.sampling if sampling is None else sampling
        number, limit = self.requests, sampling.max_new_tokens if limit is None else limit
        check_request(self._vocabulary, self.engine.context, number, prompt_ids, limit)
        seed = request_seed(sampling.seed, number) if seed is None else seed
        assert not (partials and sampling.plain_log_probs), "a partial has no log-probs at another temperature"
        assert not (partials and sampling.top_log_probs), "a partial has no alternatives"
        partials = partials_to_run(partials, sampling.n, number, limit)
        prompt = PromptState(number, list(prompt_ids), len(partials))
        for partial in partials:
            own = request_seed(seed, partial.sample)
            self._new.append(SequenceState.of(prompt, partial, own, limit, sampling))
        self._longest = max(self._longest, len(prompt_ids) + limit)
        self.requests += 1
        return number

    def expect(self, samples: int) -> None:
        """Memory that grew on the way would lie elsewhere, and what was recorded with it be recorded again."""
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
            if captured.reads is not None:
                captured.reads.prepare(self._runner, self.engine.max_num_batched_tokens, self._longest)
        except CaptureFailed as error:
            captured.give_up(error)

    @property
    def busy(self) -> bool:
        return bool(self._new) or (self._scheduler is not None and self._scheduler.busy)

    @property
    def full(self) -> bool:
        return len(self._at_work()) + len(self._new) >= self.engine.max_num_seqs

    @torch.no_grad()
    def advance(self, steps: int | None = None) -> list[Trajectory]:
        pulse.move()
        if self._new:
            self._admit_new()
        scheduler = self._scheduler
        if scheduler is None:
            return []
        finished: list[Trajectory] = []
        if self._aborted:
            gone = scheduler.abort(lambda sample: sample.prompt.index in self._aborted)
            finished += [rollout_of(sample, "abort", self.engine.version) for sample in gone]
            self._aborted.clear()
        finished += self._begin(scheduler, scheduler.schedule())
        if not scheduler.running:
            scheduler.free_finished()
        elif not finished and steps != 0:
            graphs = self._graphs_for(scheduler.running)
            finished += self._decode(scheduler, graphs, self._room(scheduler, graphs, steps))
        return finished

    def drawn(self, request: int) -> list[int]:
        at_work = self._at_work()
        return next((s.ids.array.tolist() for s in at_work if (s.prompt.index, s.number) == (request, 0)), [])

    def at_work(self) -> dict[tuple[int, int], int]:
        return {(s.prompt.index, s.number): len(s.ids) for s in [*self._at_work(), *self._new]}

    def partials(self) -> dict[int, list[Trajectory]]:
        found: dict[int, list[Trajectory]] = {}
        for sample in [*self._at_work(), *self._new]:
            count = min(len(sample.ids), len(sample.log_probs))
            ids, log_probs = sample.ids.array[:count], sample.log_probs.array[:count]
            versions = sample.partial.versions_with(count, self.engine.version)
            partial = Trajectory(0, sample.number, [], ids, log_probs, versions=versions)
            found.setdefault(sample.prompt.index, []).append(partial)
        return found

    def close(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = None
        self._new.clear()
        self._open.close()

    # ---- memory

    def enter(self, context: contextlib.AbstractContextManager) -> None:
        """Be inside a context until the session is closed."""
        self._open.enter_context(context)

    def finally_do(self, work: Callable[[], None]) -> None:
        """When everything else is closed."""
        self._open.callback(work)

    def _admit_new(self) -> None:
        """Memory for the requests that have come, and what goes with its size."""
        engine, memory = self.engine, self.engine.memory
        if self._scheduler is not None:
            self._scheduler.free_finished()  # they may go on from what has finished
        samples = max(self._expected, len(self._at_work()) + len(self._new))
        cache = memory.cache(min(engine.max_num_seqs, samples), self._longest, self.device)
        lies_at = cache.keys.data_ptr(), cache.values.data_ptr(), cache.pages
        if self._lies_at != lies_at:  # of what recordings hold for, nothing else changes while it is open
            engine.captured.follow(cache, fused=engine.fused is not None)
            self._lies_at = lies_at
        if self._scheduler is None:
            memory.prefix_cache.enabled = self.enabled
            self._scheduler = Scheduler(memory.prefix_cache, engine.max_num_seqs)
            self._runner = ModelRunner(engine.policy, cache, engine.fused)
            self.enter(self._runner)
            self._reader = Prefill(self._runner, engine.captured, engine.max_num_batched_tokens)
            self._samplers = SamplerCache(self._vocabulary, self.device)
        self._graphs = engine.captured.decoding(cache, self.sampling, self._longest)
        self._scheduler.add(self._new)
        self._new = []

    def _at_work(self) -> list[SequenceState]:
        return [] if self._scheduler is None else [*self._scheduler.running, *self._scheduler.waiting]

    # ---- reading and decoding

    def _begin(self, scheduler: Scheduler, admissions: list[ScheduledSequence]) -> list[Trajectory]:
        """Fill the pages of new samples and draw their first tokens."""
        reader = self._reader
        reader.read(admissions)
        self.engine.tokens_read, reader.tokens = self.engine.tokens_read + reader.tokens, 0
        fresh, finished = [a.sample for a in admissions if not a.sample.ids], []
        if fresh:
            hidden = torch.stack([reader.hidden[s.prompt] for s in fresh])
            samplers = self._samplers
            drawn = self._draw(hidden, samplers.of(fresh), self._seeds(fresh), None, samplers.seen(fresh))
            finished = self._take(scheduler, fresh, drawn)
        scheduler.prefill_done()
        reader.forget()
        return finished

    def _graphs_for(self, running: list[SequenceState]) -> DecodeGraphs | None:
        """Those that draw by the rule of everything that runs, or each row by its own."""
        captured = self.engine.captured
        if not captured.possible:
            return None
        # What was prepared draws for anybody.
        if not self._prepared and alike(running) and running[0].sampling.rule == self.sampling.rule:
            return self._graphs
        settings = list({id(sample.sampling): sample.sampling for sample in running}.values())  # most are the same
        return captured.decode_graphs_by_row(self._runner.cache, settings, self._longest)

    def _room(self, scheduler: Scheduler, graphs: DecodeGraphs | None, most: int | None) -> int:
        """Steps until the next look, at most `most`, with room for them."""
        look = CHUNK_SIZE if graphs is None else graphs.chunk_size
        if graphs is not None and not scheduler.waiting and (most is None or most > look):
            short = scheduler.short(graphs.long_chunk_size)
            if scheduler.can_allocate(short):
                look = graphs.long_chunk_size
        steps = look if most is None else min(most, look)
        if graphs is None or steps < graphs.long_chunk_size:
            short = scheduler.short(steps)
        scheduler.allocate(short)
        return steps

    def _decode(self, scheduler: Scheduler, graphs: DecodeGraphs | None, look: int) -> list[Trajectory]:
        running = list(scheduler.running)
        steps = min(look, max([s.limit - s.ids.count for s in running]))
        drawn: SamplerOutput | None = None
        if graphs is not None:
            try:
                running, drawn = graphs.run(self._runner, running, steps, self._while_it_draws)
            except CaptureFailed as error:
                self.engine.captured.give_up(error)
        return self._take(scheduler, running, self._step_by_step(running, steps) if drawn is None else drawn)

    def _while_it_draws(self) -> None:
        if self._scheduler is not None:
            self._scheduler.free_finished()
        if self.meanwhile is not None:
            self.meanwhile()

    def _step_by_step(self, running: list[SequenceState], steps: int) -> SamplerOutput:
        runner = self._runner
        tables = np.zeros((len(running), max(len(s.pages) for s in running) + 1), dtype=np.int64)
        for row, sample in enumerate(running):
            tables[row, : len(sample.pages)] = sample.pages
        tables = torch.from_numpy(tables).to(self.device)
        tokens = torch.tensor([s.ids[-1] for s in running], device=self.device)
        positions = torch.tensor([s.length for s in running], device=self.device)
        drawn = torch.tensor([len(s.ids) for s in running], device=self.device)
        last = tables.shape[1] * runner.cache.size - 1
        results: list[SamplerOutput] = []
        sampler, seeds, seen = self._samplers.of(running), self._seeds(running), self._samplers.seen(running)
        for step in range(steps):
            # A sample past its end writes to page 0, which nobody reads.
            hidden = runner.decode(tokens, (positions + step).clamp(max=last), tables)
            results.append(self._draw(hidden, sampler, seeds, drawn + step, seen))
            tokens = results[-1].tokens_B
            if seen is not None:
                seen.scatter_(1, tokens[:, None], True)
        return SamplerOutput.stacked(results)

    def _seeds(self, samples: list[SequenceState]) -> Tensor:
        return torch.tensor([s.seed for s in samples], device=self.device)

    def _draw(
        self, hidden: Tensor, sampler: Sampler | RowSampler, seeds: Tensor, drawn: Tensor | None, seen: Tensor | None
    ) -> SamplerOutput:
        drawn = torch.zeros_like(seeds) if drawn is None else drawn
        found = sampler.draw(self._runner.logits(hidden), seeds, drawn, seen)
        # One different bit would part them for good.
        return replace(found, tokens_B=self.engine.tensor.of_first(found.tokens_B))

    def _take(self, scheduler: Scheduler, samples: list[SequenceState], drawn: SamplerOutput) -> list[Trajectory]:
        ended = append_tokens(samples, drawn, self.engine.tokenizer)
        scheduler.finish([sample for sample, _ in ended])
        return [rollout_of(sample, finish, self.engine.version) for sample, finish in ended]


# ---- The built-in rollout engine: generates with the trainer's own weights, in place. What it keeps between calls is
# memory, what lies in it of earlier texts, and captured graphs; how requests are answered is in session.py. On an
# accelerator the steps between two looks are captured (graphs.py), and so is the reading of prompts (read_graphs.py),
# with kernels of their own (kernels/). Where that cannot be, and on a CPU, the same passes run as they come.


MAX_NUM_BATCHED_TOKENS = 8192  # prompt tokens in one pass


def require_packed(policy: Policy) -> None:
    """A UserError, in one line, for a model that this engine cannot run."""
    if policy.path != "packed":
        raise UserError(
            f"the built-in engine cannot run {type(policy.inner).__name__}: {policy.not_packed}. SFT, DPO and reward "
            "models train it in padded rows; RL and generation take --rollout_engine vllm, if vLLM runs this model"
        )


class BuiltinEngine(BaseEngine):
    """While it answers, and until a stream is taken to its end or closed, the policy is the engine's. Of a policy that
    is split over processes, every process must ask, if for no prompts at all."""

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
        `prefix_caching`: the prefix cache also outlives a call, and not only serves within one session. Results then
        differ in the last bits from those of a full prefill. `eager`: capture no graphs. `tensor`: the processes of the
        tensor-parallel group. All of them make the same calls and draw the same tokens; what one process decides alone
        they decide together."""
        require_packed(policy)
        self.policy, self.tokenizer, self.max_num_seqs = policy, tokenizer, max_num_seqs
        self.max_num_batched_tokens, self.prefix_caching = max_num_batched_tokens, prefix_caching
        self.tensor = tensor or Peers()
        cut = self.tensor.size > 1
        with policy.at_work():
            shape, arguments = ModelRunner.measure(policy)
            # Fused layers read whole weights. Of cut ones the modules know how to add up.
            self.fused = None if cut else build_fused_layers(policy, shape, arguments, page_size)
        self.memory = KVCacheManager(shape, page_size, kv_tokens, self.tensor)
        # Every layer of a cut model waits for other processes, which nobody has tried in a captured graph.
        self.captured = GraphCache(policy, max_num_seqs, possible=not eager and not cut)
        self.exact = shape.dtype == torch.float32 and not weight_only_int8
        self.version = 0
        self.context = generated_context(policy.config)
        self.tokens_read = 0
        """Of all prompts so far, those that were not kept; and what was read back after making room for others."""
        self._int8 = Int8Layers(policy) if weight_only_int8 else None
        self._session: BuiltinSession | None = None
        self._read_with: tuple | None = None  # the weights that what is kept was read with

    def session(self, sampling: SamplingParams) -> BuiltinSession:
        """Requests one by one; see engine.py above this folder. Until it is closed, the policy is the engine's. Of a
        policy that is split over processes, every process must open one, and close it."""
        return self._begun(sampling, True)

    def batch_session(self, sampling: SamplingParams) -> BuiltinSession:
        return self._begun(sampling, self.prefix_caching)

    def _begun(self, sampling: SamplingParams, enabled: bool) -> BuiltinSession:
        if self._session is not None:
            raise UserError(AT_WORK)
        if sampling.stop_strings and self.tokenizer is None:
            raise UserError("stop strings need a tokenizer; give the engine one")
        session = self._session = BuiltinSession(self, sampling, enabled)
        try:
            session.finally_do(self._ended)
            session.enter(self.policy.at_work())
            self._drop_what_is_stale()
            if self._int8 is not None:
                session.enter(self._int8)
        except BaseException:
            session.close()
            raise
        return session

    @property
    def _keeps(self) -> bool:
        """Between calls. Weights that are gathered for a call are written past torch's counts of what was written."""
        return self.prefix_caching and not is_split(self.policy)

    def _ended(self) -> None:
        self._session = None
        if not self._keeps:
            self.memory.reset_prefix_cache()

    def _drop_what_is_stale(self) -> None:
        """Nobody need say that the weights have changed."""
        if self._keeps:
            weights = state_of(self.policy)
            if weights != self._read_with:
                self.memory.reset_prefix_cache()
            self._read_with = weights

    def weights_changed(self, version: int) -> None:
        """The weights are another version now: nothing of the last one's is read any more."""
        if self._session is not None:
            raise UserError("the engine is at work; its weights may change when all its answers are taken")
        self.version = version
        self.memory.reset_prefix_cache()

    def abort(self, prompts: Collection[int] | None = None) -> None:
        """Stop the answers to these prompts, or all: the stream gives what they have so far, finished by "abort"."""
        if self._session is not None:
            self._session.abort(prompts)

    def sleep(self) -> None:
        """Give the engine's memory back; the next call takes what it needs again."""
        if self._session is not None:
            raise UserError("the engine is at work and cannot sleep; take all its answers first, or close their stream")
        self.captured.release()
        self.memory.release()
        if self._int8 is not None:
            self._int8.release()

    def rest(self) -> None:
        """Between the calls of a training loop: sleep if what is held is more than what is still free."""
        if self.memory.held > free_memory(self.policy.device):
            self.sleep()

    def wake(self) -> None:
        """Nothing to prepare: the next call takes the memory it needs."""

    def close(self) -> None:
        """Nothing is held but memory, which goes with the engine."""
