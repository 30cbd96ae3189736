"""What a suffix costs: the mean loss of the wanted answer after it, for many suffixes at once, and its gradient.

Candidates share everything before the suffix. Its keys and values are computed once a pass and read by all candidates
of the pass (data/batches.py says how sequences borrow a beginning); without sharing each reads its own copy, to the
same losses. The model is called as it is: the gradient is taken where its embedding module hands over the vectors.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from trimtab.algos.tail import candidate_suffixes, promising_tokens, token_gradient
from trimtab.data.batches import TokenBatch
from trimtab.errors import UserError
from trimtab.models.packed import scoring
from trimtab.models.policy import Policy


@dataclass(frozen=True)
class Surroundings:
    """The tokens around a suffix, and those the model shall answer."""

    before: list[int]
    after: list[int]
    target: list[int]

    def sequence(self, suffix: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """All tokens, and which are the target's."""
        ids = np.array([*self.before, *suffix, *self.after, *self.target], dtype=np.int64)
        return ids, np.arange(len(ids)) >= len(ids) - len(self.target)

    def batch(self, suffixes: list[list[int]], *, share_prefix: bool) -> TokenBatch:
        """The sequences of suffixes of one length; with `share_prefix` what is before them stands in the row once."""
        count, before = len(suffixes), np.array(self.before, dtype=np.int64)
        after = np.array([*self.after, *self.target], dtype=np.int64)
        own_SL = np.concatenate([np.array(suffixes, dtype=np.int64), np.tile(after, (count, 1))], axis=1)
        if not share_prefix:
            own_SL, before = np.concatenate([np.tile(before, (count, 1)), own_SL], axis=1), before[:0]
        width = own_SL.shape[1]
        trained_SL = np.tile(np.arange(width) >= width - len(self.target), (count, 1))
        ids = np.concatenate([before, own_SL.ravel()])
        trained = np.concatenate([np.zeros(len(before), dtype=bool), trained_SL.ravel()])
        borrowed = np.where(np.arange(count) > 0, len(before), 0)
        return TokenBatch.of_row(ids, trained, width + len(before) - borrowed, borrowed)


class SuffixLoss:
    def __init__(self, policy: Policy, around: Surroundings, *, batch_size: int = 512, share_prefix: bool = True):
        """`batch_size`: candidates in one pass."""
        self.policy, self.around, self.batch_size = policy, around, batch_size
        self.share_prefix = share_prefix and bool(around.before)

    def of(self, suffixes: list[list[int]]) -> list[float]:
        losses: list[float] = []
        with scoring(self.policy):
            for begin in range(0, len(suffixes), self.batch_size):
                losses += self._losses(suffixes[begin : begin + self.batch_size]).tolist()
        return losses

    def gradient(self, suffix: list[int]) -> Tensor:
        """dL / d onehot of the suffix's tokens [L, V]; up to the factor of an embedding that scales."""
        embedding = self.policy.inner.get_input_embeddings()
        was_training = self.policy.training
        self.policy.eval()
        try:
            with torch.enable_grad(), _watched(embedding) as vectors:
                (loss,) = self._losses([suffix])
                (gradient_1TD,) = torch.autograd.grad(loss, vectors)
        finally:
            self.policy.train(was_training)
        start = len(self.around.before)
        return token_gradient(gradient_1TD[0, start : start + len(suffix)], embedding.weight)

    def is_greedy(self, suffix: list[int]) -> bool:
        """Whether every token of the target is the model's most likely one."""
        batch = TokenBatch.of([self.around.sequence(suffix)]).to(self.policy.device)
        with scoring(self.policy):
            logits = self.policy.head(self.policy(batch, hidden_only=True).hidden_ND)
        return logits.argmax(-1).tolist() == self.around.target

    def _losses(self, suffixes: list[list[int]]) -> Tensor:
        batch = self.around.batch(suffixes, share_prefix=self.share_prefix)
        log_probs_N = self.policy(batch.to(self.policy.device)).log_probs_N
        return -log_probs_N.view(len(suffixes), len(self.around.target)).mean(1)


@contextmanager
def _watched(embedding: nn.Module) -> Iterator[list[Tensor]]:
    """The vectors that the embedding hands over inside, as a place to take gradients at."""
    vectors: list[Tensor] = []

    def hold(_module: nn.Module, _inputs: tuple, output: Tensor) -> Tensor:
        vectors.append(output.detach().requires_grad_())
        return vectors[-1]

    hook = embedding.register_forward_hook(hold)
    try:
        yield vectors
    finally:
        hook.remove()


def target_log_probs(policy: Policy, prompt: list[int], target: list[int]) -> dict[str, float]:
    """How likely a prompt makes the target: its first token, the mean of its tokens, all of it."""
    ids = np.array([*prompt, *target], dtype=np.int64)
    batch = TokenBatch.of([(ids, np.arange(len(ids)) >= len(prompt))])
    with scoring(policy):
        log_probs_N = policy(batch.to(policy.device)).log_probs_N
    return {"first": float(log_probs_N[0]), "mean": float(log_probs_N.mean()), "sum": float(log_probs_N.sum())}


# ---- The search for a suffix: take the gradient, draw candidates, keep the best, repeat
#
# A step depends on the state before it and on (seed, step) alone, and a state is a few numbers that go through
# JSON: a search that was stopped anywhere goes on as if it had not been.


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
