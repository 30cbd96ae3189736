"""Where the turns of episodes lie among the drawn tokens, and in which order these were drawn.

Samples are branches, and a branch may be gone on with after another was begun: then the order of the columns is not the
order of time, by which rewards and KL are still to come or not.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from trimtab.train.rl.experience import Experience
from trimtab.train.rl.trajectories import joined, runs


class InTime:
    """The columns over drawn tokens as time sees them: episode after episode, whatever branch a token is in."""

    def __init__(self, experience: Experience):
        self.experience = experience
        self.order_N = None if experience.branches_S is None else _order(experience)

    def sorted(self, column_N: Tensor) -> Tensor:
        return column_N if self.order_N is None else column_N[self.order_N]

    def back(self, sorted_N: Tensor) -> Tensor:
        """A column of the experience from one that was sorted."""
        if self.order_N is None:
            return sorted_N
        return torch.empty_like(sorted_N).index_copy(0, self.order_N, sorted_N)

    @cached_property
    def places_N(self) -> Tensor:
        """Where each token is when they are sorted."""
        return self.back(torch.arange(len(self.experience.sampled_N)))

    # ---- of the sorted tokens

    @property
    def owners_N(self) -> Tensor:
        """Which episode each belongs to."""
        experience = self.experience
        if self.order_N is None:  # every sample is an answer
            return experience.owners_N
        return self.sorted(experience.episodes_S[experience.owners_N])

    @property
    def remaining_N(self) -> Tensor:
        """How many of the same episode follow."""
        if self.order_N is None:
            return self.experience.remaining_N
        lengths_E = self.experience.lengths_E
        return torch.repeat_interleave(lengths_E.cumsum(0) - 1, lengths_E) - torch.arange(len(self.order_N))


def _order(experience: Experience) -> Tensor:
    """The drawn tokens in the order of time. Where no record says it, branches were drawn one after another."""
    if experience.episodes is None:
        return torch.arange(len(experience.sampled_N))
    turns = Turns.of(experience)
    places_N = torch.arange(len(experience.sampled_N))
    order_N = joined(places_N, runs(turns.starts_K, turns.tokens_K + 1 - turns.starts_K))
    assert len(order_N) == len(places_N), "every drawn token is one of a turn"
    return order_N


@dataclass
class Turns:
    """The K turns of the model in all episodes, in the order of time."""

    rewards_K: Tensor
    episodes_K: Tensor  # which answer or episode
    starts_K: Tensor  # its first token in the columns over drawn tokens
    tokens_K: Tensor  # its last one

    @classmethod
    def of(cls, experience: Experience) -> "Turns":
        assert experience.episodes is not None
        behind_prompt = (experience.offsets_S + experience.prompt_lengths_S).tolist()
        found: list[tuple[float, int, int, int]] = []
        for episode, first in enumerate(experience.firsts_E.tolist()):
            for turn in experience.episodes[first].turns:
                begin = behind_prompt[first + turn.branch]
                found.append((turn.reward, episode, begin + turn.start, begin + turn.end))
        rewards, episodes, starts, ends = zip(*found) if found else ((), (), (), ())
        drawn_before = F.pad(experience.drawn_T.cumsum(0), (1, 0))
        starts_K, ends_K = (drawn_before[torch.tensor(places, dtype=torch.int64)] for places in (starts, ends))
        assert bool((starts_K < ends_K).all()), "a turn has drawn something"
        episodes_K = torch.tensor(episodes, dtype=torch.int64)
        return cls(torch.tensor(rewards, dtype=torch.float32), episodes_K, starts_K, ends_K - 1)
