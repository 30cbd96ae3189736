"""Rewards of tokens from rewards of sequences.

    r_t = -beta KL_t,   at the last token of a sequence + clip(R)                         Ziegler et al. 2019

An answer whose last tokens lie in the buffer before the length limit is punished (Yu et al. 2025, DAPO):

    R - factor min(length - (max_new_tokens - buffer), buffer) / buffer                   where that length is positive
"""

from torch import Tensor


def per_token(
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
