"""One call of the engine: its samples, and their way through reading, decoding and finishing.

admit what fits, read new prompts once, draw first tokens; then decode a few steps for all that run, look at what
was drawn, let finished samples go, refill their places; repeat
"""

import logging
from collections.abc import Collection, Iterator

import numpy as np
import torch

from trimtab.distributed.watch import pulse
from trimtab.errors import UserError
from trimtab.rollout.builtin.graphs import CannotCapture, DecodeGraphs
from trimtab.rollout.builtin.pages import PagePool
from trimtab.rollout.builtin.read_graphs import ReadGraphs
from trimtab.rollout.builtin.runner import Runner
from trimtab.rollout.builtin.sampler import Drawn, Sampler
from trimtab.rollout.builtin.scheduler import Admission, Prompt, Sample, Scheduler
from trimtab.rollout.seeds import request_seed
from trimtab.rollout.stopping import stop_string_end
from trimtab.rollout.types import Finish, Rollout

STEPS_BETWEEN_LOOKS = 8

logger = logging.getLogger(__name__)


class Call:
    """One call's samples and their way through the engine."""

    def __init__(self, engine, prompts, sampling, seeds, limits, logit_hook):
        self.engine, self.sampling, self.hook = engine, sampling, logit_hook
        self.device = engine.policy.device
        self.longest = max((len(ids) + limit for ids, limit in zip(prompts, limits)), default=0)
        self.aborted: set[int] = set()  # prompts
        if seeds is None:
            seeds = [request_seed(sampling.seed, index) for index in range(len(prompts))]
        self.samples: list[Sample] = []
        for index, ids in enumerate(prompts):
            prompt = Prompt(index, list(ids), sampling.n)
            self.samples += [Sample(prompt, k, request_seed(seeds[index], k), limits[index]) for k in range(sampling.n)]
        self.reads: ReadGraphs | None = None
        self.graphs: DecodeGraphs | None = None
        self.hidden: dict[Prompt, torch.Tensor] = {}  # last hidden state of prompts whose samples still wait

    def run(self, runner: Runner) -> Iterator[Rollout]:
        pool = PagePool(runner.cache.pages, runner.cache.size)
        self.scheduler = Scheduler(pool, self.engine.slots)
        self.scheduler.add(self.samples)
        vocabulary = self.engine.policy.head.out_features
        self.sampler = Sampler(self.sampling, vocabulary, self.device)
        while self.scheduler.busy:
            pulse.move()
            if self.aborted:
                for sample in self.scheduler.abort(lambda s: s.prompt.index in self.aborted):
                    yield self.rollout(sample, "abort")
                self.aborted.clear()
            yield from self.begin(runner, self.scheduler.admit())
            if self.scheduler.running:
                look = self.look
                self.scheduler.make_room(look)
                yield from self.decode(runner, look)

    def abort(self, prompts: Collection[int] | None) -> None:
        self.aborted.update(prompts if prompts is not None else (s.prompt.index for s in self.samples))

    # ---- reading

    def begin(self, runner: Runner, admissions: list[Admission]) -> Iterator[Rollout]:
        """Fill the pages of new samples and draw their first tokens."""
        self.read_prompts(runner, [a.sample.prompt for a in admissions if a.read_prompt])
        runner.cache.copy_pages([a.copy for a in admissions if a.copy])
        again = [a.sample for a in admissions if a.sample.ids]
        for group in _groups(again, lambda s: len(s.ids), self.engine.read_tokens):
            # Stopped half-way earlier: what it had drawn is read back into its pages.
            sequences = [(s.prompt.ids + s.ids[:-1], len(s.prompt.ids), s.pages) for s in group if len(s.ids) > 1]
            if sequences:
                runner.read(sequences)
        fresh, finished = [a.sample for a in admissions if not a.sample.ids], []
        if fresh:
            hidden = torch.stack([self.hidden[s.prompt] for s in fresh])
            finished = list(self.take(fresh, self.draw(runner, hidden, fresh)))
        self.scheduler.settled()
        for prompt in [p for p in self.hidden if p.waiting == 0]:
            del self.hidden[prompt]
        yield from finished

    def read_prompts(self, runner: Runner, prompts: list[Prompt]) -> None:
        for group in _groups(prompts, lambda p: len(p.ids), self.engine.read_tokens):
            long = len(group[0].ids) > self.engine.read_tokens
            hidden = self.read_in_chunks(runner, group[0]) if long else self.read_whole(runner, group)
            self.hidden.update(zip(group, hidden))

    def read_whole(self, runner: Runner, prompts: list[Prompt]) -> torch.Tensor:
        if self.reads is not None:
            try:
                return self.reads.read(runner, [(p.ids, p.pages) for p in prompts])
            except CannotCapture as error:
                self.cannot_capture(error)
        return runner.read([(p.ids, 0, p.pages) for p in prompts])

    def read_in_chunks(self, runner: Runner, prompt: Prompt) -> torch.Tensor:
        """A prompt longer than one pass, piece by piece."""
        size, hidden = self.engine.read_tokens, None
        for done in range(0, len(prompt.ids), size):
            hidden = runner.read([(prompt.ids[: done + size], done, prompt.pages)])
        return hidden

    # ---- decoding

    @property
    def look(self) -> int:
        """Steps between two looks."""
        if self.graphs is None:
            return STEPS_BETWEEN_LOOKS
        at_ease = not self.scheduler.waiting and self.scheduler.has_room(self.graphs.steps_at_ease)
        return self.graphs.steps_at_ease if at_ease else self.graphs.steps

    def decode(self, runner: Runner, look: int) -> Iterator[Rollout]:
        running = list(self.scheduler.running)
        steps = min(look, max(s.remaining for s in running))
        if self.graphs is not None:
            try:
                running, drawn = self.graphs.run(runner, running, steps)
            except CannotCapture as error:
                self.cannot_capture(error)
        if self.graphs is None:
            drawn = self.step_by_step(runner, running, steps)
        yield from self.take(running, drawn)

    def cannot_capture(self, error: CannotCapture) -> None:
        logger.warning("the model cannot be captured as a graph and generates more slowly: %s", error)
        self.engine.captured.give_up()
        self.reads = self.graphs = None

    def step_by_step(self, runner: Runner, running: list[Sample], steps: int) -> Drawn:
        tables = np.zeros((len(running), max(len(s.pages) for s in running) + 1), dtype=np.int64)
        for row, sample in enumerate(running):
            tables[row, : len(sample.pages)] = sample.pages
        tables = torch.from_numpy(tables).to(self.device)
        tokens = torch.tensor([s.ids[-1] for s in running], device=self.device)
        positions = torch.tensor([s.length for s in running], device=self.device)
        drawn = torch.tensor([len(s.ids) for s in running], device=self.device)
        last = tables.shape[1] * runner.cache.size - 1
        results: list[Drawn] = []
        for step in range(steps):
            # A sample past its end writes to page 0, which nobody reads.
            hidden = runner.decode(tokens, (positions + step).clamp(max=last), tables)
            results.append(self.draw(runner, hidden, running, drawn + step, results))
            tokens = results[-1].tokens_B
        return Drawn.stacked(results)

    def draw(self, runner, hidden, samples, drawn=None, newer=()) -> Drawn:
        seeds = torch.tensor([s.seed for s in samples], device=self.device)
        drawn = torch.zeros_like(seeds) if drawn is None else drawn
        logits = runner.logits(hidden)
        if self.hook is not None:
            logits = self.hook(logits, samples)
        seen = self.seen(samples, logits, newer) if self.sampling.repetition_penalty != 1.0 else None
        return self.sampler.draw(logits, seeds, drawn, seen)

    def seen(self, samples: list[Sample], logits: torch.Tensor, newer) -> torch.Tensor:
        seen = torch.zeros_like(logits, dtype=torch.bool)
        for row, sample in enumerate(samples):
            seen[row, sample.prompt.ids + sample.ids] = True
        for result in newer:
            seen.scatter_(1, result.tokens_B[:, None], True)
        return seen

    # ---- what was drawn

    def take(self, samples: list[Sample], drawn: Drawn) -> Iterator[Rollout]:
        """Keep what each sample drew up to its end, and let those that are finished go."""
        tokens, log_probs, plain = drawn.on_host(len(samples))
        steps, number = tokens.shape[1], np.arange(tokens.shape[1])
        remaining = np.array([sample.limit - len(sample.ids) for sample in samples])
        stops = np.isin(tokens, self.sampling.stop_token_ids) & (number < remaining[:, None])
        stopped = stops.any(1)
        kept = np.where(stopped, stops.argmax(1) + 1, np.minimum(steps, remaining))
        broken = np.argwhere(np.isnan(log_probs) & (number < kept[:, None]))
        if len(broken):
            row, step = broken[0]
            raise UserError(
                f"the model's logits are not finite for prompt {samples[row].prompt.index}, sample "
                f"{samples[row].number}, token {len(samples[row].ids) + step}; its weights are probably broken"
            )
        ends = (stopped | (kept == remaining)).tolist()
        kept, tokens, log_probs = kept.tolist(), tokens.tolist(), log_probs.tolist()
        for row, sample in enumerate(samples):
            count, before = kept[row], len(sample.ids)
            sample.ids += tokens[row] if count == steps else tokens[row][:count]
            sample.log_probs += log_probs[row] if count == steps else log_probs[row][:count]
            if plain is not None:
                sample.plain_log_probs += plain[row, :count].tolist()
            if self.sampling.stop_strings and self.cut_at_stop_string(sample, before):
                yield self.let_go(sample, "stop")
            elif ends[row]:
                yield self.let_go(sample, "stop" if stopped[row] else "length")

    def cut_at_stop_string(self, sample: Sample, before: int) -> bool:
        """Drop what follows a stop string that ends after the first `before` tokens; whether there is one."""
        sampling = self.sampling
        end = stop_string_end(
            sample.ids, before, sampling.min_new_tokens, sampling.stop_strings, self.engine.tokenizer.decode
        )
        if end is None:
            return False
        for values in (sample.ids, sample.log_probs, sample.plain_log_probs):
            del values[end:]
        return True

    def let_go(self, sample: Sample, finish: Finish) -> Rollout:
        self.scheduler.finish(sample)
        return self.rollout(sample, finish)

    def rollout(self, sample: Sample, finish: Finish) -> Rollout:
        plain = np.array(sample.plain_log_probs, dtype=np.float32) if self.sampling.plain_log_probs else None
        log_probs = np.array(sample.log_probs, dtype=np.float32)
        prompt = sample.prompt
        return Rollout(prompt.index, sample.number, prompt.ids, sample.ids, log_probs, finish, plain)


def _groups(items: list, cost, budget: int) -> list[list]:
    """Consecutive items of at most `budget` together (one that is larger is alone)."""
    groups: list[list] = []
    total = 0
    for item in items:
        if groups and total + cost(item) <= budget:
            groups[-1].append(item)
            total += cost(item)
        else:
            groups.append([item])
            total = cost(item)
    return groups
