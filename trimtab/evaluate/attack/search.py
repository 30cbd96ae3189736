"""The search for a suffix: take the gradient, draw candidates, keep the best, repeat.

A step depends on the state before it and on (seed, step) alone, and a state is a few numbers that go through JSON: a
search that was stopped anywhere goes on as if it had not been.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from trimtab.algos.tail import candidate_suffixes, promising_tokens
from trimtab.errors import UserError
from trimtab.evaluate.attack.losses import SuffixLoss

Suffix = tuple[float, list[int]]  # its loss, its tokens


@dataclass(frozen=True)
class SearchSettings:
    steps: int = 250
    width: int = 512
    top_k: int = 256
    replaced: int = 1
    buffer: int = 0
    """Suffixes to go on from, best first. 0: the best candidate of the last step, even if the one before was better."""
    filter_ids: bool = True
    early_stop: bool = False
    seed: int = 42


@dataclass
class SearchState:
    pool: list[Suffix]
    best: Suffix
    losses: list[float] = field(default_factory=list)
    """Of the best candidate of every step so far."""
    matched: bool = False
    """The target is what the model would say: an early stop."""

    @property
    def step(self) -> int:
        return len(self.losses)

    @classmethod
    def of(cls, stored: dict[str, Any]) -> "SearchState":
        pool = [(loss, ids) for loss, ids in stored["pool"]]
        return cls(pool, tuple(stored["best"]), stored["losses"], stored["matched"])


class Vocabulary:
    """Which tokens a suffix may hold, and which suffixes are texts that an attacker could send."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int, *, ascii_only: bool = True):
        """`size`: of the model's embedding, which may be larger than the tokenizer's vocabulary."""
        self.tokenizer = tokenizer
        known = min(size, len(tokenizer))
        texts = tokenizer.batch_decode([[token] for token in range(known)])
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        self.forbidden_V = torch.ones(size, dtype=torch.bool)
        for token, text in enumerate(texts):
            readable = not ascii_only or (text.isascii() and text.isprintable())
            self.forbidden_V[token] = token in special or not text or not readable
        if self.forbidden_V.all():
            raise UserError("the tokenizer has no token that a suffix may hold; add --gcg_allow_non_ascii")

    def stable(self, suffixes: list[list[int]]) -> list[list[int]]:
        """Those that come back as the same tokens from their own text."""
        texts = self.tokenizer.batch_decode(suffixes)
        again = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [suffix for suffix, ids in zip(suffixes, again) if suffix == ids]


class Search:
    def __init__(self, loss: SuffixLoss, vocabulary: Vocabulary, settings: SearchSettings):
        self.loss, self.vocabulary, self.settings = loss, vocabulary, settings

    def begin(self, initial: list[int]) -> SearchState:
        """With a buffer, suffixes of random tokens start beside the initial one."""
        rng = np.random.default_rng([self.settings.seed, self.settings.steps])
        allowed = np.flatnonzero(~self.vocabulary.forbidden_V.numpy())
        others = [rng.choice(allowed, len(initial)).tolist() for _ in range(self.settings.buffer - 1)]
        suffixes = [initial, *others]
        pool = sorted(zip(self.loss.of(suffixes), suffixes))
        return SearchState(pool, pool[0])

    def done(self, state: SearchState) -> bool:
        return state.matched or state.step >= self.settings.steps

    def advance(self, state: SearchState) -> None:
        """One step, in place."""
        found = self._best_candidate(state)
        if found is not None:
            if not self.settings.buffer:
                state.pool = [found]
            elif found[0] < state.pool[-1][0]:
                state.pool = sorted([*state.pool[:-1], found])
            state.best = min(state.best, found)
        state.losses.append((found or state.best)[0])
        state.matched = self.settings.early_stop and self.loss.is_greedy(state.best[1])

    def _best_candidate(self, state: SearchState) -> Suffix | None:
        """None: no candidate is a text that comes back as the same tokens."""
        current = state.pool[0][1]
        gradient_LV = self.loss.gradient(current)
        forbidden_V = self.vocabulary.forbidden_V.to(gradient_LV.device)
        tokens_LK = promising_tokens(gradient_LV, self.settings.top_k, forbidden_V).cpu()
        generator = torch.Generator().manual_seed(_step_seed(self.settings.seed, state.step))
        replaced = min(self.settings.replaced, len(current))
        drawn = candidate_suffixes(torch.tensor(current), tokens_LK, self.settings.width, replaced, generator).tolist()
        if self.settings.filter_ids:
            drawn = self.vocabulary.stable(drawn)
        return min(zip(self.loss.of(drawn), drawn), default=None)


def _step_seed(seed: int, step: int) -> int:
    return int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0] >> 1)
