"""Reading: the pages of new samples are filled, each prompt's once for all its samples."""

import torch

from trimtab.rollout.builtin.attention import MOST_TOGETHER
from trimtab.rollout.builtin.cuda_graphs import CaptureFailed, GraphCache
from trimtab.rollout.builtin.model_runner import ModelRunner
from trimtab.rollout.builtin.scheduler import PromptState, ScheduledSequence, SequenceState


class Prefill:
    def __init__(self, runner: ModelRunner, captured: GraphCache, most: int):
        """`most`: tokens in one pass."""
        self.runner, self.captured, self.most = runner, captured, most
        self.hidden: dict[PromptState, torch.Tensor] = {}  # the last hidden state of prompts whose samples still wait
        self.tokens = 0  # read since the last look

    def read(self, admissions: list[ScheduledSequence]) -> None:
        """Everything that is not in the pages yet. What was drawn before a sample had to stop is read back."""
        cache = self.runner.cache
        cache.copy_pages([a.prompt_copy for a in admissions if a.prompt_copy])
        self._prefill_prompts([a.sample.prompt for a in admissions if a.read_prompt])
        cache.copy_pages([a.copy for a in admissions if a.copy])
        self._restore_preempted([a.sample for a in admissions if len(a.sample.ids) > 1])

    def _restore_preempted(self, samples: list[SequenceState]) -> None:
        self.tokens += sum(len(s.ids) - 1 for s in samples)
        # Where there are kernels for sequences of any length in one row.
        longest = self.most if self.captured.reads is not None else 0
        for part in _parts([s for s in samples if s.length <= longest], self.most):
            self.runner.prefill_answers(
                [(p.ids, [(s.ids.array[:-1].tolist(), s.pages) for s in part[p]]) for p in part]
            )
        for group in _groups([s for s in samples if s.length > longest], lambda s: len(s.ids), self.most):
            self._prefill_eager([(s.text[:-1], len(s.prompt.ids), s.pages) for s in group])

    def forget(self) -> None:
        """The hidden states of prompts that nobody waits for."""
        for prompt in [p for p in self.hidden if p.waiting == 0]:
            del self.hidden[prompt]

    def _prefill_prompts(self, prompts: list[PromptState]) -> None:
        self.tokens += sum(_unread(p) for p in prompts)
        for group in _groups([p for p in prompts if p.cached == 0], _unread, self.most):
            self.hidden.update(zip(group, self._prefill_group(group)))
        # Those go on from their kept pages.
        for group in _groups([p for p in prompts if p.cached > 0], _unread, self.most):
            parts = [group] if self.captured.reads is None else _groups(group, lambda p: len(p.ids), MOST_TOGETHER)
            for part in parts:
                self.hidden.update(zip(part, self._prefill_group(part)))

    def _prefill_group(self, prompts: list[PromptState]) -> torch.Tensor:
        sequences, first = [(p.ids, p.cached, p.pages) for p in prompts], prompts[0]
        # One that is larger is alone.
        if self.captured.reads is not None and _unread(first) <= self.most and len(first.ids) <= MOST_TOGETHER:
            try:
                return self.captured.reads.read(self.runner, sequences)
            except CaptureFailed as error:
                self.captured.give_up(error)
        return self._prefill_eager(sequences)

    def _prefill_eager(self, sequences: list[tuple[list[int], int, list[int]]]) -> torch.Tensor:
        """(ids, how many are cached already, pages). One that is longer than a pass is alone, and read piece by
        piece."""
        ids, done, pages = sequences[0]
        while len(ids) - done > self.most:
            self.runner.read([(ids[: done + self.most], done, pages)])
            done += self.most
        return self.runner.read([(ids, done, pages), *sequences[1:]])


def _unread(prompt: PromptState) -> int:
    return len(prompt.ids) - prompt.cached


def _parts(samples: list[SequenceState], budget: int) -> list[dict[PromptState, list[SequenceState]]]:
    """Consecutive samples by their prompts, of at most `budget` tokens together with these."""
    parts: list[dict[PromptState, list[SequenceState]]] = []
    total = budget
    for sample in samples:
        known = bool(parts) and sample.prompt in parts[-1]
        cost = len(sample.ids) - 1 + (0 if known else len(sample.prompt.ids))
        if total + cost > budget:
            parts.append({})
            total, cost = 0, sample.length
        parts[-1].setdefault(sample.prompt, []).append(sample)
        total += cost
    return parts


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
