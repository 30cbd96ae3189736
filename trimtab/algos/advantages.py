"""Advantages of tokens: rewards of sequences to rewards of tokens, discounted sums, GAE, whitening.

Sequences are ragged and lie one after another; `remaining_N` says how many tokens of its sequence come after a token.

    token rewards    r_t = -beta KL_t,   at the last token of a sequence + clip(R)        Ziegler et al. 2019
    overlong         R - factor min(length - (max_new_tokens - buffer), buffer) / buffer  DAPO: Yu et al. 2025
                     where that length is positive: answers in the buffer before the length limit are punished
    discounted sum   A_t = sum over s >= t of discount^(s - t) r_s                        REINFORCE and group methods
    GAE              A_t = sum over s >= t of (gamma lam)^(s - t) delta_s                 PPO: Schulman et al. 2016
                     delta_t = r_t + gamma V_{t+1} - V_t,   return = A + V
                     V = 0 after the end; after a cut, the critic's V of the state there (Pardo et al. 2018)
    whitening        (A - mean) / sqrt(max(var, 1e-8))                                    over all tokens of the rollout
    running norm     (R - mean) / (sqrt(M / n) + 1e-8), over all rewards of the run so far; rewards of an iteration are
                     joined first: with d the difference of means, n = a + b, mean = mean_a + d b / n,
                     M = M_a + M_b + d^2 a b / n                                          Chan et al. 1979

GAE is the discounted sum of its deltas. A sum over T tokens takes log2(T) steps: a sum over 2w tokens is one over w
plus discount^w times the one that starts w later.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

ROUNDING = 8  # units in the last place
TOKENS_AT_ONCE = 2**15


def discounted_sums(values_N: Tensor, remaining_N: Tensor, discount: float, longest: int | None = None) -> Tensor:
    """For each token, the discounted sum from it to the end of its sequence. `longest`: no token has more after it,
    where that is known without asking a device."""
    if longest is None:
        longest = int(remaining_N.max()) if len(remaining_N) else 0
    if values_N.device.type != "cpu" or len(values_N) <= TOKENS_AT_ONCE:
        return _sums(values_N, remaining_N, longest, discount)
    if discount == 1 and not values_N.requires_grad and (found_N := _of_last(values_N, remaining_N)) is not None:
        return found_N
    parts = _parts(remaining_N)
    return torch.cat([_sums(*both, longest, discount) for both in zip(values_N.split(parts), remaining_N.split(parts))])


def _of_last(values_N: Tensor, remaining_N: Tensor) -> Tensor | None:
    """Where the last token of a sequence is the only one that has a value, that value is every sum, to the bit."""
    ends = (remaining_N == 0).nonzero()[:, 0]
    last_S = values_N[ends]
    if torch.count_nonzero(values_N) != torch.count_nonzero(last_S):
        return None
    lengths_S = ends.diff(prepend=ends.new_tensor([-1]))
    return last_S.repeat_interleave(lengths_S, output_size=len(values_N)).add_(0.0)  # no sum is -0


def _parts(remaining_N: Tensor) -> list[int]:
    """How many tokens of whole sequences are summed up at a time, so that they stay in the processor's cache."""
    ends = ((remaining_N == 0).nonzero()[:, 0] + 1).tolist()
    parts, begin = [], 0
    for end, following in zip(ends, [*ends[1:], math.inf]):
        if following - begin > TOKENS_AT_ONCE:
            parts.append(end - begin)
            begin = end
    return parts


def _sums(values_N: Tensor, remaining_N: Tensor, longest: int, discount: float) -> Tensor:
    sums_N, width = values_N, 1
    while width <= longest:
        later_N = torch.where(remaining_N >= width, F.pad(sums_N[width:], (0, min(width, len(sums_N)))), 0)
        sums_N = sums_N + (later_N if discount == 1 else discount**width * later_N)
        width *= 2
    return sums_N


def gae(
    rewards_N: Tensor,
    values_N: Tensor,
    remaining_N: Tensor,
    gamma: float,
    lam: float,
    after_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns. `values_N` are the critic's before each token is chosen. `after_N`: V after each token,
    which is read at last tokens only; None: 0."""
    next_values_N = torch.where(remaining_N > 0, F.pad(values_N[1:], (0, 1)), 0 if after_N is None else after_N)
    deltas_N = rewards_N + gamma * next_values_N - values_N
    advantages_N = discounted_sums(deltas_N, remaining_N, gamma * lam)
    return advantages_N, advantages_N + values_N


def whiten(values_N: Tensor, scale: bool = True) -> Tensor:
    """Mean 0 and variance 1 over all tokens; without `scale` mean 0 only. Values that are equal but for rounding become
    exactly 0: they say nothing, and a division by their deviation would make a full step of it."""
    centred_N = values_N - values_N[:1]
    if (centred_N.abs() <= ROUNDING * torch.finfo(values_N.dtype).eps * values_N.abs().max()).all():
        return torch.zeros_like(values_N)
    centred_N = centred_N - centred_N.mean()
    if not scale:
        return centred_N
    return centred_N * centred_N.square().mean().clamp(min=1e-8).rsqrt()


# ---- token rewards


def token_rewards(
    rewards_S: Tensor,
    kl_N: Tensor | None,
    coefficient: float,
    remaining_N: Tensor,
    owners_N: Tensor,
    clip: tuple[float, float] | None = None,
) -> Tensor:
    """Reward of each token; without `kl_N` all but the last of a sequence get 0. `clip`: lowest and highest R."""
    if clip is not None:
        rewards_S = rewards_S.clamp(*clip)
    last = (remaining_N == 0).nonzero()[:, 0]
    rewards_N = rewards_S.new_zeros(len(owners_N)).index_put((last,), rewards_S[owners_N[last]])
    return rewards_N if kl_N is None else rewards_N - coefficient * kl_N


def overlong_penalty(lengths_S: Tensor, max_new_tokens: int, buffer: float, factor: float) -> Tensor:
    """What is subtracted from each sequence's reward: 0 up to the buffer, `factor` at its end."""
    return factor * (lengths_S - (max_new_tokens - buffer)).clamp(0, buffer) / buffer


# ---- running mean and deviation of rewards


NO_MOMENTS = (0.0, 0.0, 0.0)
"""The moments (n, mean, M) before anything was seen."""


def merge_moments(moments: Sequence[float], new_S: Tensor) -> tuple[float, float, float]:
    seen, mean, squares = moments
    new_S = new_S.double()
    new, own = len(new_S), float(new_S.mean())
    total, difference = seen + new, own - mean
    squares += float((new_S - own).square().sum()) + difference**2 * seen * new / total
    return total, mean + difference * new / total, squares


def whiten_with_moments(rewards_S: Tensor, moments: Sequence[float], *, centred: bool = True) -> Tensor:
    """Not `centred`: parts of rewards, which add up to them."""
    mean = moments[1] if centred else 0.0
    return ((rewards_S.double() - mean) / (moments_std(moments) + 1e-8)).to(rewards_S.dtype)


def moments_std(moments: Sequence[float]) -> float:
    seen, _, squares = moments
    return math.sqrt(squares / seen)
