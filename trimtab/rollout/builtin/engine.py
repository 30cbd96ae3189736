"""The built-in rollout engine: generates with the trainer's own weights, in place.

    admit what fits, read new prompts once, draw first tokens; then decode a few steps for all that run, look at what
    was drawn, let finished samples go, refill their places; repeat

What it leaves out so far: captured graphs and kernels of its own for accelerators, which run the same passes eagerly.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from trimtab.errors import UserError
from trimtab.models.policy import Policy
from trimtab.rollout.builtin.cache import KVCache
from trimtab.rollout.builtin.pages import PagePool
from trimtab.rollout.builtin.runner import Runner
from trimtab.rollout.builtin.sampler import Sampler, request_seed
from trimtab.rollout.builtin.scheduler import Admission, Prompt, Sample, Scheduler
from trimtab.rollout.types import Finish, Rollout, Sampling

STEPS_BETWEEN_LOOKS = 8


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
    ):
        """`slots`: samples that run at once; `kv_tokens`: memory for keys and values (planned from what is free if
        not given); `read_tokens`: prompt tokens in one pass."""
        if policy.path != "packed":
            raise UserError(f"{type(policy.inner).__name__} does not use the attention interface; the engine needs it")
        self.policy, self.tokenizer, self.slots = policy, tokenizer, slots
        self.page_size, self.read_tokens = page_size, read_tokens
        self.shape = Runner.measure(policy)
        self.kv_tokens = kv_tokens
        self._cache: KVCache | None = None

    def generate(self, prompts: Sequence[list[int]], sampling: Sampling, **options) -> list[Rollout]:
        """All answers, in the order of the prompts and their samples."""
        rollouts = list(self.stream(prompts, sampling, **options))
        return sorted(rollouts, key=lambda r: (r.prompt, r.sample))

    @torch.no_grad()
    def stream(
        self, prompts: Sequence[list[int]], sampling: Sampling, *, seeds: Sequence[int] | None = None, logit_hook=None
    ) -> Iterator[Rollout]:
        """Answers as they finish. `seeds`: one for each prompt (its samples draw from streams of their own)."""
        self._check(prompts, sampling)
        call = _Call(self, prompts, sampling, seeds, logit_hook)
        with Runner(self.policy, self._memory(call.longest)) as runner:
            yield from call.run(runner)

    def sleep(self) -> None:
        """Give the KV memory back; the next call takes it again."""
        self._cache = None

    wake = sleep  # nothing to prepare: memory is planned at the next call

    def _memory(self, longest: int) -> KVCache:
        pages = -(-self._planned(longest) // self.page_size)
        if self._cache is None or self._cache.keys.shape[1] != pages + 1:
            self._cache = None
            self._cache = KVCache(self.shape, pages, self.page_size, self.policy.device)
        return self._cache

    def _planned(self, longest: int) -> int:
        wanted = self.slots * (longest + self.page_size)
        return wanted if self.kv_tokens is None else self.kv_tokens

    def _check(self, prompts: Sequence[list[int]], sampling: Sampling) -> None:
        vocabulary = self.policy.head.out_features
        most = getattr(self.policy.config.get_text_config(), "max_position_embeddings", None)
        for index, ids in enumerate(prompts):
            if not ids:
                raise UserError(f"prompt {index} is empty; at least one token is needed")
            if max(ids) >= vocabulary or min(ids) < 0:
                raise UserError(f"prompt {index} has a token outside the model's vocabulary of {vocabulary}")
            if most is not None and len(ids) + sampling.max_new_tokens > most:
                raise UserError(
                    f"prompt {index} has {len(ids)} tokens and {sampling.max_new_tokens} may follow, but the model's "
                    f"context is {most}; shorten the prompt or lower max_new_tokens"
                )
        if sampling.stop_strings and self.tokenizer is None:
            raise UserError("stop strings need a tokenizer; give the engine one")


class _Call:
    """One call's samples and their way through the engine."""

    def __init__(self, engine, prompts, sampling, seeds, logit_hook):
        self.engine, self.sampling, self.hook = engine, sampling, logit_hook
        self.device = engine.policy.device
        self.longest = max(map(len, prompts), default=0) + sampling.max_new_tokens
        self.samples: list[Sample] = []
        for index, ids in enumerate(prompts):
            prompt = Prompt(index, list(ids), sampling.n)
            base = request_seed(sampling.seed, index) if seeds is None else seeds[index]
            self.samples += [
                Sample(prompt, k, request_seed(base, k), sampling.max_new_tokens) for k in range(sampling.n)
            ]
        self.hidden: dict[Prompt, torch.Tensor] = {}  # last hidden state of prompts whose samples still wait

    def run(self, runner: Runner) -> Iterator[Rollout]:
        pool = PagePool(runner.cache.keys.shape[1] - 1, runner.cache.size)
        self.scheduler = Scheduler(pool, self.engine.slots)
        self.scheduler.add(self.samples)
        vocabulary = self.engine.policy.head.out_features
        self.sampler = Sampler(self.sampling, vocabulary, self.device)
        while self.scheduler.busy:
            yield from self.begin(runner, self.scheduler.admit())
            if self.scheduler.running:
                self.scheduler.make_room(STEPS_BETWEEN_LOOKS)
                yield from self.decode(runner)

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
        fresh = [a.sample for a in admissions if not a.sample.ids]
        if fresh:
            hidden = torch.stack([self.hidden[s.prompt] for s in fresh])
            self.take(fresh, *self.draw(runner, hidden, fresh))
        self.scheduler.settled()
        for prompt in [p for p in self.hidden if p.waiting == 0]:
            del self.hidden[prompt]
        yield from self.finished(fresh)

    def read_prompts(self, runner: Runner, prompts: list[Prompt]) -> None:
        for group in _groups(prompts, lambda p: len(p.ids), self.engine.read_tokens):
            hidden = self.read_in_chunks(runner, group[0]) if len(group) == 1 else None
            if hidden is None:
                hidden = runner.read([(p.ids, 0, p.pages) for p in group])
            self.hidden.update(zip(group, hidden))

    def read_in_chunks(self, runner: Runner, prompt: Prompt) -> torch.Tensor:
        """A prompt longer than one pass, piece by piece."""
        size, hidden = self.engine.read_tokens, None
        for done in range(0, len(prompt.ids), size):
            hidden = runner.read([(prompt.ids[: done + size], done, prompt.pages)])
        return hidden

    # ---- decoding

    def decode(self, runner: Runner) -> Iterator[Rollout]:
        running = list(self.scheduler.running)
        steps = min(STEPS_BETWEEN_LOOKS, max(s.remaining for s in running))
        tables = np.zeros((len(running), max(len(s.pages) for s in running) + 1), dtype=np.int64)
        for row, sample in enumerate(running):
            tables[row, : len(sample.pages)] = sample.pages
        tables = torch.from_numpy(tables).to(self.device)
        tokens = torch.tensor([s.ids[-1] for s in running], device=self.device)
        positions = torch.tensor([s.length for s in running], device=self.device)
        drawn = torch.tensor([len(s.ids) for s in running], device=self.device)
        last = tables.shape[1] * runner.cache.size - 1
        all_tokens, all_log_probs = [], []
        for step in range(steps):
            # A sample past its end writes to page 0, which nobody reads.
            hidden = runner.decode(tokens, (positions + step).clamp(max=last), tables)
            tokens, log_probs = self.draw(runner, hidden, running, drawn + step, all_tokens)
            all_tokens.append(tokens)
            all_log_probs.append(log_probs)
        self.take(running, torch.stack(all_tokens, 1), torch.stack(all_log_probs, 1))
        yield from self.finished(running)

    def draw(self, runner, hidden, samples, drawn=None, newer=()) -> tuple[torch.Tensor, torch.Tensor]:
        seeds = torch.tensor([s.seed for s in samples], device=self.device)
        drawn = torch.zeros_like(seeds) if drawn is None else drawn
        logits = runner.logits(hidden)
        if self.hook is not None:
            logits = self.hook(logits, samples)
        seen = self.seen(samples, logits, newer) if self.sampling.repetition_penalty != 1.0 else None
        result = self.sampler.draw(logits, seeds, drawn, seen)
        return result.tokens_B, result.log_probs_B

    def seen(self, samples: list[Sample], logits: torch.Tensor, newer) -> torch.Tensor:
        seen = torch.zeros_like(logits, dtype=torch.bool)
        for row, sample in enumerate(samples):
            seen[row, sample.prompt.ids + sample.ids] = True
        for tokens in newer:
            seen.scatter_(1, tokens[:, None], True)
        return seen

    # ---- what was drawn

    def take(self, samples: list[Sample], tokens: torch.Tensor, log_probs: torch.Tensor) -> None:
        tokens = tokens.view(len(samples), -1).tolist()
        log_probs = log_probs.view(len(samples), -1).tolist()
        for sample, new, values in zip(samples, tokens, log_probs):
            for token, value in zip(new, values):
                if value != value:
                    raise UserError(
                        f"the model's logits are not finite for prompt {sample.prompt.index}, sample {sample.number}, "
                        f"token {len(sample.ids)}; its weights are probably broken"
                    )
                sample.ids.append(token)
                sample.log_probs.append(value)
                if self.finish_of(sample) is not None:
                    break

    def finish_of(self, sample: Sample) -> Finish | None:
        sampling = self.sampling
        if sample.ids and sample.ids[-1] in sampling.stop_token_ids:
            return "stop"
        if sampling.stop_strings and len(sample.ids) >= sampling.min_new_tokens:
            text = self.engine.tokenizer.decode(sample.ids)
            if any(stop in text for stop in sampling.stop_strings):
                return "stop"
        return "length" if sample.remaining <= 0 else None

    def finished(self, samples: list[Sample]) -> Iterator[Rollout]:
        for sample in samples:
            finish = self.finish_of(sample)
            if finish is not None:
                self.scheduler.finish(sample)
                yield Rollout(
                    sample.prompt.index,
                    sample.number,
                    sample.prompt.ids,
                    sample.ids,
                    np.array(sample.log_probs, dtype=np.float32),
                    finish,
                )


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
