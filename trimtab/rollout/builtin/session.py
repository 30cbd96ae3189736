"""Requests at work in the engine: their way through reading, decoding and finishing.

admit what fits, read new prompts once, draw first tokens; then decode a few steps for all that run, look at what
was drawn, let finished samples go, refill their places; repeat
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from trimtab.distributed.watch import pulse
from trimtab.rollout.answering import OpenSession
from trimtab.rollout.builtin.graphs import CannotCapture, DecodeGraphs
from trimtab.rollout.builtin.reader import Reader
from trimtab.rollout.builtin.requests import check_request
from trimtab.rollout.builtin.row_sampler import RowSampler
from trimtab.rollout.builtin.runner import Runner
from trimtab.rollout.builtin.sampler import Drawn, Sampler
from trimtab.rollout.builtin.samplers import Samplers, alike
from trimtab.rollout.builtin.scheduler import Admission, Prompt, Sample, Scheduler
from trimtab.rollout.builtin.taking import rollout_of, take
from trimtab.rollout.episode import Task
from trimtab.rollout.seeds import request_seed
from trimtab.rollout.stopping import check_setting
from trimtab.rollout.types import Draft, Rollout, Sampling, drafts_of

if TYPE_CHECKING:
    from trimtab.rollout.builtin.engine import BuiltinEngine

STEPS_BETWEEN_LOOKS = 8


class BuiltinSession(OpenSession):
    """Until it is closed, the policy is the engine's."""

    def __init__(self, engine: "BuiltinEngine", sampling: Sampling, keeping: bool):
        """`keeping`: what was read and drawn may be read again by later requests."""
        super().__init__()
        self.engine, self.sampling, self.keeping = engine, sampling, keeping
        self.device = engine.policy.device
        self._vocabulary = engine.policy.head.out_features  # models are slow to ask
        self._longest = self._expected = 0
        self._new: list[Sample] = []
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
        drafts: Sequence[Draft] | None = None,
        task: Task | None = None,
        sampling: Sampling | None = None,
    ) -> int:
        if sampling is not None:
            check_setting(sampling, self._vocabulary, self.engine.tokenizer)
        sampling = self.sampling if sampling is None else sampling
        number, limit = self.requests, sampling.max_new_tokens if limit is None else limit
        check_request(self._vocabulary, self.engine.context, number, prompt_ids, limit)
        seed = request_seed(sampling.seed, number) if seed is None else seed
        assert not (drafts and sampling.plain_log_probs), "a draft has no log-probs at another temperature"
        assert not (drafts and sampling.top_log_probs), "a draft has no alternatives"
        drafts = drafts_of(drafts, sampling.n, number, limit)
        prompt = Prompt(number, list(prompt_ids), len(drafts))
        self._new += [Sample.of(prompt, draft, request_seed(seed, draft.sample), limit, sampling) for draft in drafts]
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
        self.expect(self.engine.slots)
        self._admit_new()
        try:
            graphs = captured.decoding_by_rows(self._runner.cache, [self.sampling], self._longest)
            if graphs is not None:
                graphs.prepare(self._runner)
            if captured.reads is not None:
                captured.reads.prepare(self._runner, self.engine.read_tokens, self._longest)
        except CannotCapture as error:
            captured.give_up(error)

    @property
    def busy(self) -> bool:
        return bool(self._new) or (self._scheduler is not None and self._scheduler.busy)

    @property
    def full(self) -> bool:
        return len(self._at_work()) + len(self._new) >= self.engine.slots

    @torch.no_grad()
    def advance(self, steps: int | None = None) -> list[Rollout]:
        pulse.move()
        if self._new:
            self._admit_new()
        scheduler = self._scheduler
        if scheduler is None:
            return []
        finished: list[Rollout] = []
        if self._aborted:
            gone = scheduler.abort(lambda sample: sample.prompt.index in self._aborted)
            finished += [rollout_of(sample, "abort", self.engine.version) for sample in gone]
            self._aborted.clear()
        finished += self._begin(scheduler, scheduler.admit())
        if not scheduler.running:
            scheduler.put_away()
        elif not finished and steps != 0:
            graphs = self._graphs_for(scheduler.running)
            finished += self._decode(scheduler, graphs, self._room(scheduler, graphs, steps))
        return finished

    def drawn(self, request: int) -> list[int]:
        at_work = self._at_work()
        return next((s.ids.array.tolist() for s in at_work if (s.prompt.index, s.number) == (request, 0)), [])

    def at_work(self) -> dict[tuple[int, int], int]:
        return {(s.prompt.index, s.number): len(s.ids) for s in [*self._at_work(), *self._new]}

    def drafts(self) -> dict[int, list[Draft]]:
        found: dict[int, list[Draft]] = {}
        for sample in [*self._at_work(), *self._new]:
            count = min(len(sample.ids), len(sample.log_probs))
            ids, log_probs = sample.ids.array[:count], sample.log_probs.array[:count]
            versions = sample.draft.versions_of(count, self.engine.version)
            draft = Draft(sample.number, ids, log_probs, versions)
            found.setdefault(sample.prompt.index, []).append(draft)
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
            self._scheduler.put_away()  # they may go on from what has finished
        samples = max(self._expected, len(self._at_work()) + len(self._new))
        cache = memory.cache(min(engine.slots, samples), self._longest, self.device)
        lies_at = cache.keys.data_ptr(), cache.values.data_ptr(), cache.pages
        if self._lies_at != lies_at:  # of what recordings hold for, nothing else changes while it is open
            engine.captured.follow(cache, fused=engine.fused is not None)
            self._lies_at = lies_at
        if self._scheduler is None:
            memory.kept.keeping = self.keeping
            self._scheduler = Scheduler(memory.kept, engine.slots)
            self._runner = Runner(engine.policy, cache, engine.fused)
            self.enter(self._runner)
            self._reader = Reader(self._runner, engine.captured, engine.read_tokens)
            self._samplers = Samplers(self._vocabulary, self.device)
        self._graphs = engine.captured.decoding(cache, self.sampling, self._longest)
        self._scheduler.add(self._new)
        self._new = []

    def _at_work(self) -> list[Sample]:
        return [] if self._scheduler is None else [*self._scheduler.running, *self._scheduler.waiting]

    # ---- reading and decoding

    def _begin(self, scheduler: Scheduler, admissions: list[Admission]) -> list[Rollout]:
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
        scheduler.settled()
        reader.forget()
        return finished

    def _graphs_for(self, running: list[Sample]) -> DecodeGraphs | None:
        """Those that draw by the rule of everything that runs, or each row by its own."""
        captured = self.engine.captured
        if not captured.possible:
            return None
        # What was prepared draws for anybody.
        if not self._prepared and alike(running) and running[0].sampling.rule == self.sampling.rule:
            return self._graphs
        settings = list({id(sample.sampling): sample.sampling for sample in running}.values())  # most are the same
        return captured.decoding_by_rows(self._runner.cache, settings, self._longest)

    def _room(self, scheduler: Scheduler, graphs: DecodeGraphs | None, most: int | None) -> int:
        """Steps until the next look, at most `most`, with room for them."""
        look = STEPS_BETWEEN_LOOKS if graphs is None else graphs.steps
        if graphs is not None and not scheduler.waiting and (most is None or most > look):
            short = scheduler.short(graphs.steps_at_ease)
            if scheduler.has_room(short):
                look = graphs.steps_at_ease
        steps = look if most is None else min(most, look)
        if graphs is None or steps < graphs.steps_at_ease:
            short = scheduler.short(steps)
        scheduler.make_room(short)
        return steps

    def _decode(self, scheduler: Scheduler, graphs: DecodeGraphs | None, look: int) -> list[Rollout]:
        running = list(scheduler.running)
        steps = min(look, max([s.limit - s.ids.count for s in running]))
        drawn: Drawn | None = None
        if graphs is not None:
            try:
                running, drawn = graphs.run(self._runner, running, steps, self._while_it_draws)
            except CannotCapture as error:
                self.engine.captured.give_up(error)
        return self._take(scheduler, running, self._step_by_step(running, steps) if drawn is None else drawn)

    def _while_it_draws(self) -> None:
        if self._scheduler is not None:
            self._scheduler.put_away()
        if self.meanwhile is not None:
            self.meanwhile()

    def _step_by_step(self, running: list[Sample], steps: int) -> Drawn:
        runner = self._runner
        tables = np.zeros((len(running), max(len(s.pages) for s in running) + 1), dtype=np.int64)
        for row, sample in enumerate(running):
            tables[row, : len(sample.pages)] = sample.pages
        tables = torch.from_numpy(tables).to(self.device)
        tokens = torch.tensor([s.ids[-1] for s in running], device=self.device)
        positions = torch.tensor([s.length for s in running], device=self.device)
        drawn = torch.tensor([len(s.ids) for s in running], device=self.device)
        last = tables.shape[1] * runner.cache.size - 1
        results: list[Drawn] = []
        sampler, seeds, seen = self._samplers.of(running), self._seeds(running), self._samplers.seen(running)
        for step in range(steps):
            # A sample past its end writes to page 0, which nobody reads.
            hidden = runner.decode(tokens, (positions + step).clamp(max=last), tables)
            results.append(self._draw(hidden, sampler, seeds, drawn + step, seen))
            tokens = results[-1].tokens_B
            if seen is not None:
                seen.scatter_(1, tokens[:, None], True)
        return Drawn.stacked(results)

    def _seeds(self, samples: list[Sample]) -> Tensor:
        return torch.tensor([s.seed for s in samples], device=self.device)

    def _draw(
        self, hidden: Tensor, sampler: Sampler | RowSampler, seeds: Tensor, drawn: Tensor | None, seen: Tensor | None
    ) -> Drawn:
        drawn = torch.zeros_like(seeds) if drawn is None else drawn
        found = sampler.draw(self._runner.logits(hidden), seeds, drawn, seen)
        # One different bit would part them for good.
        return replace(found, tokens_B=self.engine.tensor.of_first(found.tokens_B))

    def _take(self, scheduler: Scheduler, samples: list[Sample], drawn: Drawn) -> list[Rollout]:
        ended = take(samples, drawn, self.engine.tokenizer)
        scheduler.finish([sample for sample, _ in ended])
        return [rollout_of(sample, finish, self.engine.version) for sample, finish in ended]
