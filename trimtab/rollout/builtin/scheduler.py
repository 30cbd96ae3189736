"""The scheduler: which sequences run, which wait, and which are preempted. It knows pages and lengths, no tensors.

A prompt's pages are filled once and shared by its samples: full pages as they are, a last partially filled one copied.
When pages run out, cached prefixes are evicted first. Then the sequence that was admitted last is preempted: it frees
its pages and waits for a new prefill. The tokens that it has sampled are kept.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trimtab.errors import UserError
from trimtab.rollout.builtin.prefix_cache import PrefixCache, PrefixHit
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import PromptLogprobs, Trajectory


class GrowingArray:
    """Numbers of a sequence's tokens, appended chunk by chunk as arrays: a list of two million takes 0.1 s to make.
    Appended arrays are never written into, so other threads may read them."""

    __slots__ = ("_parts", "count")

    def __init__(self, dtype: type[np.generic], values: Sequence[float] | np.ndarray = ()):
        self._parts = [np.array(values, dtype=dtype)]
        self.count = len(self._parts[0])

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> int | float:
        return self.array[place].item()

    @property
    def last(self) -> np.generic:
        return self._parts[-1][-1]

    @property
    def array(self) -> np.ndarray:
        """Everything so far."""
        return np.concatenate(self._parts)

    def since(self, first: int) -> np.ndarray:
        """Everything but the first `first` values, of which there must be more."""
        parts: list[np.ndarray] = []
        left = self.count - first
        while left > 0:
            part = self._parts[-1 - len(parts)]
            parts.append(part[max(0, len(part) - left) :])
            left -= len(part)
        return np.concatenate(parts[::-1])

    def extend(self, values: np.ndarray, count: int) -> None:
        """Append `count` values, at least one."""
        self._parts.append(values)
        self.count += count

    def cut(self, count: int) -> None:
        """Truncate to the first `count` values."""
        self._parts, self.count = [self.array[:count]], count


@dataclass(eq=False)
class PromptState:
    """The prompt of a request, shared by its samples."""

    index: int
    ids: list[int]
    waiting: int  # samples not yet admitted
    pages: list[int] = field(default_factory=list)  # held while samples wait; empty: no prefill yet, or freed
    cached: int = 0  # length of the prefix that was in the prefix cache
    scoring: SamplingParams | None = None  # if log-probs of its tokens are requested
    log_probs: PromptLogprobs | None = None  # once they are computed
    states: Any = None  # of recurrent layers, while samples wait


@dataclass(eq=False)
class SequenceState:
    """A sequence at work: what it resumes from, what it has sampled since, and its pages."""

    prompt: PromptState
    number: int  # index among the samples of its prompt
    seed: int
    limit: int  # of new tokens
    partial: Trajectory  # what it resumes from
    ids: GrowingArray
    log_probs: GrowingArray
    plain_log_probs: GrowingArray
    sampling: SamplingParams
    likely: tuple[GrowingArray, GrowingArray] | None = None  # alternatives and their log-probs, if requested
    pages: list[int] = field(default_factory=list)
    states: Any = None  # of recurrent layers, while it runs
    before: int = field(init=False)  # KV positions before those of its new tokens: all of its prompt but one

    def __post_init__(self) -> None:
        self.before = len(self.prompt.ids) - 1

    @classmethod
    def of(
        cls, prompt: PromptState, partial: Trajectory, seed: int, limit: int, sampling: SamplingParams
    ) -> "SequenceState":
        """A partial one is like a preempted one: its tokens need a prefill, and its random stream continues."""
        ids, log_probs = GrowingArray(np.int32, partial.tokens), GrowingArray(np.float32, partial.log_probs)
        return cls(prompt, partial.sample, seed, limit, partial, ids, log_probs, GrowingArray(np.float32), sampling)

    def extend_likely(self, tokens: np.ndarray, log_probs: np.ndarray) -> None:
        """By at least one token; other sequences of the batch may have requested more alternatives."""
        most = self.sampling.top_log_probs
        if self.likely is None:
            self.likely = GrowingArray(np.int32, tokens[:, :most]), GrowingArray(np.float32, log_probs[:, :most])
        else:
            for column, values in zip(self.likely, (tokens, log_probs)):
                column.extend(values[:, :most], len(values))

    @property
    def columns(self) -> tuple[GrowingArray, ...]:
        """All arrays with an entry for each sampled token."""
        return self.ids, self.log_probs, self.plain_log_probs, *(self.likely or ())

    @property
    def length(self) -> int:
        """Tokens in the KV cache while it runs: all but the newest."""
        return len(self.prompt.ids) + max(0, self.ids.count - 1)

    @property
    def text(self) -> list[int]:
        """Tokens of its prompt and its answer."""
        return self.prompt.ids + self.ids.array.tolist()


@dataclass
class ScheduledSequence:
    """A sequence that may run now, and what must be done first."""

    sample: SequenceState
    copy: tuple[int, int] | None  # (from page, to page)
    needs_prefill: bool = False  # the prompt needs a prefill,
    prompt_copy: tuple[int, int] | None = None  # after this copy


class Scheduler:
    def __init__(self, prefix_cache: PrefixCache, max_num_seqs: int):
        self.prefix_cache, self.pool, self.max_num_seqs = prefix_cache, prefix_cache.pool, max_num_seqs
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self._to_release: list[PromptState] = []  # no sample waits any more, but some still need the prefill
        self._to_copy: list[int] = []  # cached pages, referenced until they are copied
        self._prefilled: list[PromptState] = []  # no sample waits any more; these and
        self._finished: list[SequenceState] = []  # finished sequences still hold their pages

    def add(self, samples: list[SequenceState]) -> None:
        self.waiting.extend(samples)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> list[ScheduledSequence]:
        """Move waiting sequences that fit to the running ones, in order."""
        admitted: list[ScheduledSequence] = []
        while self.waiting and len(self.running) < self.max_num_seqs:
            admission = self._admit_one(self.waiting[0])
            if admission is None:
                break
            self.waiting.popleft()
            self.running.append(admission.sample)
            admitted.append(admission)
        if not self.running and self.waiting:
            self._release_prompts(keep=None)
            raise UserError(
                f"the KV memory of {self.pool.total * self.pool.size} tokens cannot hold one sequence of "
                f"{self.waiting[0].length + 1} tokens; give the engine more memory"
            )
        return admitted

    def _admit_one(self, sample: SequenceState) -> ScheduledSequence | None:
        prompt = sample.prompt
        if prompt.pages:
            return self._admit(sample)
        # Log-probs need the hidden states of all tokens, which are not cached.
        unscored = prompt.scoring is not None and prompt.log_probs is None
        hit = PrefixHit() if unscored else self.prefix_cache.lookup(prompt.ids)
        admission = self._admit_with(sample, hit)
        if admission is None and hit.tail is not None:
            # There may be enough pages without the one to copy.
            full = self.prefix_cache.lookup(prompt.ids).pages
            admission = self._admit_with(sample, PrefixHit(len(full) * self.pool.size, full))
        return admission

    def _admit_with(self, sample: SequenceState, hit: PrefixHit) -> ScheduledSequence | None:
        """Admit the first sample of a prompt with this cached prefix."""
        prompt, tail = sample.prompt, [hit.tail] if hit.tail is not None else []
        self.pool.share(hit.pages + tail)
        fresh = self._take(self.pool.needed(len(prompt.ids)) - len(hit.pages), keep=prompt)
        if fresh is None:
            self.pool.free(hit.pages + tail)
            return None
        prompt.pages, prompt.cached = hit.pages + fresh, hit.tokens
        admission = self._admit(sample)
        if admission is None:
            self.pool.free(prompt.pages + tail)  # not filled yet, so nothing is lost
            prompt.pages = []
            return None
        self._to_copy += tail
        admission.needs_prefill = True
        admission.prompt_copy = (tail[0], fresh[0]) if tail else None
        return admission

    def _admit(self, sample: SequenceState) -> ScheduledSequence | None:
        """Admit a sample whose prompt has its pages."""
        prompt = sample.prompt
        whole, rest = divmod(len(prompt.ids), self.pool.size)
        own = self._take(self.pool.needed(sample.length + 1) - whole, keep=prompt)
        if own is None:
            return None
        self.pool.share(prompt.pages[:whole])
        sample.pages = prompt.pages[:whole] + own
        prompt.waiting -= 1
        if prompt.waiting == 0:
            self._to_release.append(prompt)
        return ScheduledSequence(sample, (prompt.pages[whole], own[0]) if rest else None)

    def prefill_done(self) -> None:
        """All scheduled sequences are in the KV cache: prompts without waiting samples need their pages no more."""
        self._prefilled += self._to_release
        self._to_release.clear()
        self.pool.free(self._to_copy)
        self._to_copy.clear()

    def allocate(self, short: list[tuple[SequenceState, int]]) -> list[SequenceState]:
        """Allocate missing pages (see `short`); returns the sequences that were preempted for it."""
        pages = self._take_kept(sum([missing for _, missing in short]))
        if pages is not None:  # in the same order as one by one
            first = 0
            for sample, count in short:
                sample.pages += pages[first : first + count]
                first += count
            return []
        stopped: list[SequenceState] = []
        for sample, missing in short:
            while sample not in stopped:
                pages = self._take(missing, keep=None)
                if pages is not None:
                    sample.pages += pages
                    break
                last = self.running[-1]
                self._preempt(last)
                stopped.append(last)
        return stopped

    def can_allocate(self, short: list[tuple[SequenceState, int]]) -> bool:
        """Whether that needs no preemption."""
        missing = sum([missing for _, missing in short])
        if missing <= self.pool.num_free or missing <= self.pool.num_free + self.prefix_cache.num_evictable:
            return True
        self.free_finished()
        return missing <= self.pool.num_free + self.prefix_cache.num_evictable

    def short(self, steps: int) -> list[tuple[SequenceState, int]]:
        """Running sequences without all pages for their next `steps` tokens, and how many pages are missing."""
        size, found = self.pool.size, []
        for sample in self.running:
            wanted = sample.ids.count + steps
            tokens = sample.before + (wanted if wanted < sample.limit else sample.limit)
            if tokens > (held := len(sample.pages)) * size:
                found.append((sample, -(-tokens // size) - held))
        return found

    def finish(self, samples: Sequence[SequenceState]) -> None:
        self._remove_running(samples)
        self._finished += samples

    def free_finished(self) -> None:
        """Insert prompts and finished sequences into the prefix cache, and drop their own references. Called when new
        requests come or pages are short, and earlier when the host has time."""
        for prompt in self._prefilled:
            if prompt.pages:
                self.prefix_cache.insert(prompt.ids, prompt.pages)
            self._free_pages(prompt)
        for sample in self._finished:
            if self.prefix_cache.enabled:
                self.prefix_cache.insert(sample.text[: sample.length], sample.pages)
            self._free_pages(sample)
        self._prefilled.clear()
        self._finished.clear()

    def _remove_running(self, samples: Sequence[SequenceState]) -> None:
        gone = set(samples)
        if gone:
            self.running = [sample for sample in self.running if sample not in gone]

    def _free_pages(self, holder: PromptState | SequenceState) -> None:
        self.pool.free(holder.pages)
        holder.pages = []

    def close(self) -> None:
        """Free the pages of all sequences."""
        self.free_finished()
        prompts = [sample.prompt for sample in (*self.running, *self.waiting)]
        for prompt in dict.fromkeys(prompts + self._to_release):
            self._free_pages(prompt)
        for sample in self.running:
            self._free_pages(sample)
        self.pool.free(self._to_copy)
        self.running.clear()
        self.waiting.clear()
        self._to_release.clear()
        self._to_copy.clear()

    def abort(self, unwanted: Callable[[SequenceState], bool]) -> list[SequenceState]:
        """Remove running and waiting sequences for good."""
        running = [sample for sample in self.running if unwanted(sample)]
        waiting = [sample for sample in self.waiting if unwanted(sample)]
        self.finish(running)
        self.waiting = deque(sample for sample in self.waiting if not unwanted(sample))
        for sample in waiting:
            sample.prompt.waiting -= 1
            if sample.prompt.waiting == 0:
                self._to_release.append(sample.prompt)
        self.prefill_done()
        return running + waiting

    def _preempt(self, sample: SequenceState) -> None:
        self._remove_running([sample])
        self._free_pages(sample)
        sample.prompt.waiting += 1
        self.waiting.appendleft(sample)

    def _take(self, count: int, keep: PromptState | None) -> list[int] | None:
        pages = self._take_kept(count)
        if pages is None:
            self._release_prompts(keep)
            pages = self.pool.allocate(count)
        return pages

    def _take_kept(self, count: int) -> list[int] | None:
        """From free pages, then evicted ones, then those of finished sequences."""
        self.prefix_cache.evict(count)
        if count > self.pool.num_free:
            self.free_finished()
            self.prefix_cache.evict(count)
        return self.pool.allocate(count)

    def _release_prompts(self, keep: PromptState | None) -> None:
        """Free the pages of prompts whose samples all wait: they can be prefilled again."""
        for sample in self.waiting:
            prompt = sample.prompt
            if prompt.pages and prompt is not keep and prompt not in self._to_release:
                self._free_pages(prompt)
