"""Prefill: keys and values of prompts and preempted sequences, and log-probs of prompts where they are requested."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trimtab.rollout.builtin.attention import MOST_TOGETHER
from trimtab.rollout.builtin.cuda_graphs import CaptureFailed, GraphCache
from trimtab.rollout.builtin.model_runner import ModelRunner
from trimtab.rollout.builtin.scheduler import PromptState, ScheduledSequence, SequenceState
from trimtab.rollout.builtin.state_cache import States
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import PromptLogprobs, TopLogprobs

SCORED_LOGITS = 2**27  # numbers in memory at once while log-probs of a prompt are read


class Prefill:
    """Computes the keys and values of prompts, once for all samples of each, and of preempted sequences, in forward
    passes of at most `most` tokens."""

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
        if not self.runner.caches:
            return
        self.tokens += sum(len(s.ids) - 1 for s in samples)
        if self.runner.recurrent:
            for group in _groups(samples, lambda s: s.length, self.most):
                self._restore_states(group)
            return
        # With variable-length attention, answers attend to their prompts in one packed row.
        longest = self.most if self.graphs.prefills is not None else 0
        for part in _parts([s for s in samples if s.length <= longest], self.most):
            self.runner.prefill_answers(
                [(p.ids, [(s.ids.array[:-1].tolist(), s.pages) for s in part[p]]) for p in part]
            )
        for group in _groups([s for s in samples if s.length > longest], lambda s: len(s.ids), self.most):
            self._prefill_eager([(s.text[:-1], len(s.prompt.ids), s.pages) for s in group])

    def _restore_states(self, samples: list[SequenceState]) -> None:
        """Prefill whole sequences. Tokens on the prompts' full pages, which are shared, are stored on page 0."""
        size, sequences = self.runner.cache.size, []
        for sample in samples:
            shared = len(sample.prompt.ids) // size
            sequences.append((sample.text[:-1], 0, [0] * shared + sample.pages[shared:]))
        self.runner.prefill(sequences)
        keep_states(samples, self.runner.states)

    def forget(self) -> None:
        """Drop the hidden states of prompts without waiting samples."""
        for prompt in [p for p in self.hidden if p.waiting == 0]:
            del self.hidden[prompt]
            prompt.states = None

    def _prefill_prompts(self, prompts: list[PromptState]) -> None:
        self.tokens += sum(_new_tokens(p) for p in prompts)
        unscored = [p for p in prompts if p.scoring is not None and p.log_probs is None]
        for group in _groups(unscored, _new_tokens, self.most):
            self._score(group)
        prompts = [p for p in prompts if p not in unscored]
        for group in _groups([p for p in prompts if p.cached == 0], _new_tokens, self.most):
            self.hidden.update(zip(group, self._prefill_group(group)))
        # These continue from cached prefixes.
        for group in _groups([p for p in prompts if p.cached > 0], _new_tokens, self.most):
            parts = [group] if self.graphs.prefills is None else _groups(group, lambda p: len(p.ids), MOST_TOGETHER)
            for part in parts:
                self.hidden.update(zip(part, self._prefill_group(part)))

    def _score(self, prompts: list[PromptState]) -> None:
        """Prefill prompts of one pass, or a longer one in chunks, and compute the log-probs of their tokens."""
        runner, (ids, pages) = self.runner, (prompts[0].ids, prompts[0].pages)
        most = len(ids) if runner.reads_whole else self.most
        # A prompt that is longer than a pass is alone.
        chunks = [
            runner.prefill_hidden([(ids[: done + most], done, pages)]) for done in range(0, len(ids) - most, most)
        ]
        done = len(chunks) * most
        chunks.append(
            runner.prefill_hidden([(p.ids, 0 if number else done, p.pages) for number, p in enumerate(prompts)])
        )
        keep_states(prompts, runner.states)
        rows = max(1, SCORED_LOGITS // runner.policy.head.out_features)
        for prompt, hidden_TD in zip(prompts, torch.cat(chunks).split([len(p.ids) for p in prompts])):
            assert prompt.scoring is not None, "its log-probs are requested"
            after_T = torch.tensor(prompt.ids[1:], dtype=torch.long, device=hidden_TD.device)
            parts = zip(hidden_TD[:-1].split(rows), after_T.split(rows))
            scores = [_scores(runner.logits(hidden), after, prompt.scoring) for hidden, after in parts]
            own, tokens, log_probs = (np.concatenate(column) for column in zip(*scores))
            prompt.log_probs = PromptLogprobs(own, TopLogprobs(tokens, log_probs))
            self.hidden[prompt] = hidden_TD[-1]

    def _prefill_group(self, prompts: list[PromptState]) -> torch.Tensor:
        sequences, first = [(p.ids, p.cached, p.pages) for p in prompts], prompts[0]
        # A larger one is alone in its group.
        if self.graphs.prefills is not None and _new_tokens(first) <= self.most and len(first.ids) <= MOST_TOGETHER:
            try:
                return self.graphs.prefills.prefill(self.runner, sequences)
            except CaptureFailed as error:
                self.graphs.give_up(error)
        hidden = self._prefill_eager(sequences)
        keep_states(prompts, self.runner.states)
        return hidden

    def _prefill_eager(self, sequences: list[tuple[list[int], int, list[int]]]) -> torch.Tensor:
        """(ids, how many are cached, pages). One that is longer than a pass is alone, and runs in chunks."""
        ids, done, pages = sequences[0]
        while len(ids) - done > self.most and not self.runner.reads_whole:
            self.runner.prefill([(ids[: done + self.most], done, pages)])
            done += self.most
        return self.runner.prefill([(ids, done, pages), *sequences[1:]])


def _scores(logits_TV: Tensor, after_T: Tensor, sampling: SamplingParams) -> tuple[np.ndarray, ...]:
    """Log-probs of the tokens that follow, and the most likely tokens with theirs. A token that is the most likely one
    has the same log-prob in both, to the last bit: clients compare them."""
    log_probs_TV = (logits_TV.float() / (sampling.temperature or 1.0)).log_softmax(-1)
    top = log_probs_TV.topk(min(sampling.prompt_log_probs or 0, log_probs_TV.shape[-1]), -1)
    found = log_probs_TV.gather(-1, after_T[:, None])[:, 0], top.indices.int(), top.values
    return tuple(part.cpu().numpy() for part in found)


def keep_states(owners: Sequence[PromptState | SequenceState], states: Sequence[States | None]) -> None:
    for owner, own in zip(owners, states, strict=True):
        owner.states = own


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
