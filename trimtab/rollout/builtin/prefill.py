"""Prefill: compute the keys and values of prompts, once for all samples of each, and of preempted sequences."""

import torch

from trimtab.rollout.builtin.attention import MOST_TOGETHER
from trimtab.rollout.builtin.cuda_graphs import CaptureFailed, GraphCache
from trimtab.rollout.builtin.model_runner import ModelRunner
from trimtab.rollout.builtin.scheduler import PromptState, ScheduledSequence, SequenceState


class Prefill:
    """Runs scheduled prompts in forward passes of at most `most` tokens."""

    def __init__(self, runner: ModelRunner, graphs: GraphCache, most: int):
        self.runner, self.graphs, self.most = runner, graphs, most
        self.hidden: dict[PromptState, torch.Tensor] = {}  # the last hidden state of prompts whose samples still wait
        self.tokens = 0  # prefilled since the engine last counted them

    def run(self, admissions: list[ScheduledSequence]) -> None:
        """Fill all pages of these sequences, also with the tokens that preempted ones have sampled."""
        cache = self.runner.cache
        cache.copy_pages([a.prompt_copy for a in admissions if a.prompt_copy])
        self._prefill_prompts([a.sample.prompt for a in admissions if a.needs_prefill])
        cache.copy_pages([a.copy for a in admissions if a.copy])
        self._restore_preempted([a.sample for a in admissions if len(a.sample.ids) > 1])

    def _restore_preempted(self, samples: list[SequenceState]) -> None:
        self.tokens += sum(len(s.ids) - 1 for s in samples)
        # With variable-length attention, answers attend to their prompts in one packed row.
        longest = self.most if self.graphs.prefills is not None else 0
        for part in _parts([s for s in samples if s.length <= longest], self.most):
            self.runner.prefill_answers(
                [(p.ids, [(s.ids.array[:-1].tolist(), s.pages) for s in part[p]]) for p in part]
            )
        for group in _groups([s for s in samples if s.length > longest], lambda s: len(s.ids), self.most):
            self._prefill_eager([(s.text[:-1], len(s.prompt.ids), s.pages) for s in group])

    def forget(self) -> None:
        """Drop the hidden states of prompts without waiting samples."""
        for prompt in [p for p in self.hidden if p.waiting == 0]:
            del self.hidden[prompt]

    def _prefill_prompts(self, prompts: list[PromptState]) -> None:
        self.tokens += sum(_new_tokens(p) for p in prompts)
        for group in _groups([p for p in prompts if p.cached == 0], _new_tokens, self.most):
            self.hidden.update(zip(group, self._prefill_group(group)))
        # These continue from cached prefixes.
        for group in _groups([p for p in prompts if p.cached > 0], _new_tokens, self.most):
            parts = [group] if self.graphs.prefills is None else _groups(group, lambda p: len(p.ids), MOST_TOGETHER)
            for part in parts:
                self.hidden.update(zip(part, self._prefill_group(part)))

    def _prefill_group(self, prompts: list[PromptState]) -> torch.Tensor:
        sequences, first = [(p.ids, p.cached, p.pages) for p in prompts], prompts[0]
        # A larger one is alone in its group.
        if self.graphs.prefills is not None and _new_tokens(first) <= self.most and len(first.ids) <= MOST_TOGETHER:
            try:
                return self.graphs.prefills.prefill(self.runner, sequences)
            except CaptureFailed as error:
                self.graphs.give_up(error)
        return self._prefill_eager(sequences)

    def _prefill_eager(self, sequences: list[tuple[list[int], int, list[int]]]) -> torch.Tensor:
        """(ids, how many are cached, pages). One that is longer than a pass is alone, and runs in chunks."""
        ids, done, pages = sequences[0]
        while len(ids) - done > self.most:
            self.runner.prefill([(ids[: done + self.most], done, pages)])
            done += self.most
        return self.runner.prefill([(ids, done, pages), *sequences[1:]])


def _new_tokens(prompt: PromptState) -> int:
    return len(prompt.ids) - prompt.cached


def _parts(samples: list[SequenceState], budget: int) -> list[dict[PromptState, list[SequenceState]]]:
    """Consecutive sequences by prompt, of at most `budget` tokens including the prompts."""
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
    """Consecutive items of at most `budget` together; a larger one is alone."""
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
