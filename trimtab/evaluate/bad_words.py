"""The exact probability that a short answer holds a bad token, by summing over everything the model could say.

    P(bad within T) = sum over t < T, over s_1..s_t without a bad or an end token, of p(s_1..s_t) p(bad | s_1..s_t)

An answer that has ended says nothing more, so end tokens are no way to go on. One pass for the prompt, V for the
second token, V^2 for the third: meant for two tokens of a real vocabulary, or for more of a small one.
"""

import math
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from trimtab.data.batches import TokenBatch
from trimtab.distributed.device import widest
from trimtab.errors import UserError
from trimtab.models.lm_head import chunk_tokens, shaped_logits
from trimtab.models.packed import scoring
from trimtab.models.policy import Policy

MOST_PREFIXES = 5_000_000
PASS_TOKENS = 8192


def log_bad_probability(
    policy: Policy,
    prompt: Sequence[int],
    bad_tokens: Collection[int],
    tokens: int,
    stop_tokens: Collection[int] = (),
) -> float:
    """log P(one of `bad_tokens` among the first `tokens` tokens of an answer to `prompt`)."""
    check_countable(policy.config.get_text_config().vocab_size, bad_tokens, tokens)
    if not prompt:
        raise UserError("the probability of bad words needs a prompt of at least one token")
    if policy.path == "logits":
        raise UserError(f"the probability of bad words needs hidden states, which {type(policy.inner).__name__} hides")
    bad = sorted(set(bad_tokens))
    good = _without(policy.config.get_text_config().vocab_size, {*bad_tokens, *stop_tokens})
    exactly = {"dtype": widest(policy.device), "device": policy.device}
    total = torch.tensor(-math.inf, **exactly)
    # What the model may have said so far [F, t], and the log-probability of having said it.
    said, log_probs_F = np.zeros((1, 0), dtype=np.int64), torch.zeros(1, **exactly)
    with scoring(policy):
        for place in range(tokens):
            going_on = place < tokens - 1
            asked = torch.tensor([*bad, *good] if going_on else bad, device=policy.device)
            pieces = []
            for rows, next_RK in next_log_probs(policy, prompt, said, asked):
                joint_RK = next_RK.to(total.dtype) + log_probs_F[rows, None]
                total = torch.logaddexp(total, joint_RK[:, : len(bad)].logsumexp((0, 1)))
                pieces.append(joint_RK[:, len(bad) :].flatten())
            if going_on:
                said, log_probs_F = _extended(said, good), torch.cat(pieces)
    return float(total)


def next_log_probs(
    policy: Policy, prompt: Sequence[int], said: np.ndarray, asked_K: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Log-probs [R, K] of the asked tokens after the prompt and each row of `said`, some rows at a time, in order. The
    prompt is read once a pass."""
    rows_a_pass = max(1, PASS_TOKENS // max(1, said.shape[1]))
    for begin in range(0, len(said), rows_a_pass):
        part = said[begin : begin + rows_a_pass]
        sequences = [np.concatenate([prompt, row]).astype(np.int64) for row in part]
        shared = [0, *[len(prompt)] * (len(part) - 1)] if said.shape[1] else None
        batch = TokenBatch.of([(ids, np.zeros(len(ids), dtype=bool)) for ids in sequences], shared)
        hidden_TD, _ = policy.hidden(batch.to(policy.device))
        last_RD = hidden_TD[batch.last_S.to(policy.device)]
        size = chunk_tokens(policy.config.get_text_config().vocab_size, policy.device)
        for first in range(0, len(part), size):
            logits = shaped_logits(policy.head(last_RD[first : first + size]), policy.logit_shape, 1.0)
            rows = slice(begin + first, begin + first + len(logits))
            # The softmax over all tokens, of which only the asked ones are kept.
            yield rows, logits[:, asked_K] - logits.logsumexp(-1, keepdim=True)


def _extended(said: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Every row with every one of these tokens after it."""
    return np.concatenate([np.repeat(said, len(tokens), axis=0), np.tile(tokens, len(said))[:, None]], axis=1)


def _without(vocabulary: int, left_out: Collection[int]) -> np.ndarray:
    """All tokens but these, in order."""
    return np.setdiff1d(np.arange(vocabulary), np.fromiter(left_out, dtype=np.int64, count=len(left_out)))


def check_countable(vocabulary: int, bad_tokens: Collection[int], tokens: int) -> None:
    """Refuse tokens that are none, and answers that are too many."""
    if not bad_tokens or not all(0 <= token < vocabulary for token in bad_tokens):
        raise UserError(f"--bad_token_ids: give token ids from 0 to {vocabulary - 1}, at least one")
    if tokens < 1 or vocabulary ** (tokens - 1) > MOST_PREFIXES:
        raise UserError(
            f"--generate_max_len {tokens}: the exact probability of bad words looks at every beginning of an answer, "
            f"which {vocabulary} tokens allow for at most {_longest(vocabulary)}; ask for fewer, or sample instead"
        )


def _longest(vocabulary: int) -> int:
    return 1 + int(math.log(MOST_PREFIXES) / math.log(vocabulary))
