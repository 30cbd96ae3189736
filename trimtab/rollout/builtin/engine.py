"""The built-in rollout engine: generates with the trainer's own weights, in place.

    admit what fits, read new prompts once, draw first tokens; then decode a few steps for all that run, look at what
    was drawn, let finished samples go, refill their places; repeat

On an accelerator the steps between two looks are recorded (graphs.py), and so is the reading of prompts
(read_graphs.py), with kernels of their own (kernels/). Where that cannot be, and on a CPU, the same passes run as they
come.
"""

import contextlib
import logging
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch

from trimtab.distributed.device import free_memory
from trimtab.distributed.sharding import gathered
from trimtab.errors import UserError
from trimtab.models.policy import Policy
from trimtab.rollout.builtin.fused_layers import recognised
from trimtab.rollout.builtin.graphs import CannotRecord, DecodeGraphs
from trimtab.rollout.builtin.int8 import Int8Layers
from trimtab.rollout.builtin.memory import KVMemory
from trimtab.rollout.builtin.pages import PagePool
from trimtab.rollout.builtin.read_graphs import ReadGraphs
from trimtab.rollout.builtin.recordings import Recordings
from trimtab.rollout.builtin.runner import Runner
from trimtab.rollout.builtin.sampler import Drawn, Sampler, request_seeds
from trimtab.rollout.builtin.scheduler import Admission, Prompt, Sample, Scheduler
from trimtab.rollout.types import Finish, Rollout, Sampling

STEPS_BETWEEN_LOOKS = 8

logger = logging.getLogger(__name__)


class BuiltinEngine:
    def __init__(
        self,
        policy: Policy,
        tokenizer=None,
        *,
        slots: int = 256,
        kv_tokens: int | None = None,
        page_size: int = 16,
        read_tokens: int = 8192,
        weight_only_int8: bool = False,
    ):
        """`slots`: samples that run at once; `kv_tokens`: memory for keys and values (planned from what is free if
        not given); `read_tokens`: prompt tokens in one pass; `weight_only_int8`: see int8.py."""
        if policy.path != "packed":
            raise UserError(f"{type(policy.inner).__name__} does not use the attention interface; the engine needs it")
        self.policy, self.tokenizer, self.slots = policy, tokenizer, slots
        self.read_tokens = read_tokens
        with gathered(policy):
            shape, arguments = Runner.measure(policy)
            self._fused = recognised(policy, shape, arguments)
        self._memory = KVMemory(shape, page_size, kv_tokens)
        self._int8 = Int8Layers(policy) if weight_only_int8 else None
        self._recordings = Recordings(policy, slots)
        self._call: _Call | None = None

    def generate(self, prompts: Sequence[list[int]], sampling: Sampling, **options) -> list[Rollout]:
        """All answers, in the order of the prompts and their samples."""
        rollouts = list(self.stream(prompts, sampling, **options))
        return sorted(rollouts, key=lambda r: (r.prompt, r.sample))

    @torch.no_grad()
    def stream(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        *,
        seeds: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
        logit_hook=None,
    ) -> Iterator[Rollout]:
        """Answers as they finish. Until the last one, or until the stream is closed, the policy is the engine's.

        `seeds`: one for each prompt (its samples draw from streams of their own); `limits`: each prompt's own
        max_new_tokens. Of a policy that is split over processes, every process must ask, if for no prompts at all.
        """
        if self._call is not None:
            raise UserError("the engine is at work already; take all its answers first, or close their stream")
        limits = [sampling.max_new_tokens] * len(prompts) if limits is None else limits
        self._check(prompts, sampling, seeds, limits)
        try:
            with gathered(self.policy), self._int8 or contextlib.nullcontext():
                call = self._call = _Call(self, prompts, sampling, seeds, limits, logit_hook)
                cache = self._memory.cache(min(self.slots, len(call.samples)), call.longest, call.device)
                self._recordings.follow(cache, fused=self._fused is not None)
                call.reads = self._recordings.reads
                if logit_hook is None:
                    call.graphs = self._recordings.decoding(cache, sampling, call.longest)
                with Runner(self.policy, cache, self._fused) as runner:
                    yield from call.run(runner)
        finally:
            self._call = None

    def abort(self, prompts: Collection[int] | None = None) -> None:
        """Stop the answers to these prompts, or all: the stream gives what they have so far, finished by "abort"."""
        if self._call is not None:
            self._call.abort(prompts)

    def sleep(self) -> None:
        """Give the engine's memory back; the next call takes what it needs again."""
        if self._call is not None:
            raise UserError("the engine is at work and cannot sleep; take all its answers first, or close their stream")
        self._recordings.release()
        self._memory.release()
        if self._int8 is not None:
            self._int8.release()

    def rest(self) -> None:
        """Between the calls of a training loop: sleep if what is held is more than what is still free."""
        if self._memory.held > free_memory(self.policy.device):
            self.sleep()

    def wake(self) -> None:
        """Nothing to prepare: the next call takes the memory it needs."""

    def _check(self, prompts: Sequence[list[int]], sampling: Sampling, seeds, limits: Sequence[int]) -> None:
        for name, values in (("seeds", seeds), ("limits", limits)):
            if values is not None and len(values) != len(prompts):
                raise UserError(f"{len(values)} {name} for {len(prompts)} prompts; one for each is needed")
        vocabulary = self.policy.head.out_features
        most = getattr(self.policy.config.get_text_config(), "max_position_embeddings", None)
        for index, ids in enumerate(prompts):
            if not ids:
                raise UserError(f"prompt {index} is empty; at least one token is needed")
            if max(ids) >= vocabulary or min(ids) < 0:
                raise UserError(f"prompt {index} has a token outside the model's vocabulary of {vocabulary}")
            if limits[index] < 1:
                raise UserError(f"the limit of prompt {index} is {limits[index]}; at least 1 new token is needed")
            if most is not None and len(ids) + limits[index] > most:
                raise UserError(
                    f"prompt {index} has {len(ids)} tokens and {limits[index]} may follow, but the model's "
                    f"context is {most}; shorten the prompt or lower max_new_tokens"
                )
        if sampling.stop_strings and self.tokenizer is None:
            raise UserError("stop strings need a tokenizer; give the engine one")


class _Call:
    """One call's samples and their way through the engine."""

    def __init__(self, engine, prompts, sampling, seeds, limits, logit_hook):
        self.engine, self.sampling, self.hook = engine, sampling, logit_hook
        self.device = engine.policy.device
        self.longest = max((len(ids) + limit for ids, limit in zip(prompts, limits)), default=0)
        self.aborted: set[int] = set()  # prompts
        if seeds is None:
            bases = request_seeds(torch.tensor(sampling.seed), torch.arange(len(prompts)))
        else:
            bases = torch.tensor(seeds, dtype=torch.long)
        own_seeds = request_seeds(bases[:, None], torch.arange(sampling.n)).tolist()
        self.samples: list[Sample] = []
        for index, ids in enumerate(prompts):
            prompt = Prompt(index, list(ids), sampling.n)
            self.samples += [Sample(prompt, k, own_seeds[index][k], limits[index]) for k in range(sampling.n)]
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
            except CannotRecord as error:
                self.cannot_record(error)
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
            except CannotRecord as error:
                self.cannot_record(error)
        if self.graphs is None:
            drawn = self.step_by_step(runner, running, steps)
        yield from self.take(running, drawn)

    def cannot_record(self, error: CannotRecord) -> None:
        logger.warning("the model cannot be recorded and generates more slowly: %s", error)
        self.engine._recordings.give_up()
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
        """Drop what follows a stop string among the tokens after `before`; whether there is one."""
        sampling, decode = self.sampling, self.engine.tokenizer.decode
        whole = decode(sample.ids)
        if not any(stop in whole for stop in sampling.stop_strings):
            return False
        for end in range(max(before + 1, sampling.min_new_tokens), len(sample.ids) + 1):
            text = decode(sample.ids[:end])
            if any(stop in text for stop in sampling.stop_strings):
                for values in (sample.ids, sample.log_probs, sample.plain_log_probs):
                    del values[end:]
                return True
        return False

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
