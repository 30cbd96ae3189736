"""A game of one to three turns, so small that all its episodes can be listed. The policy decides when it ends, the
world answers by chance, and a turn has one token or two.

The policy is a table of logits, a row for each situation in which a token is chosen.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

STOP, LEFT, RIGHT, PLAIN, FANCY, ON, RED, BLUE = range(8)
CHOICES = [
    [STOP, LEFT, RIGHT],
    [PLAIN, FANCY],
    [STOP, ON],
    [STOP, ON],
    [STOP, ON],
    [STOP, ON],
    [RED, BLUE],
    [RED, BLUE],
]
LOGITS = [[0.2, 0.7, -0.1], [-0.4, 0.6], [0.5, -0.3], [-0.2, 0.4], [0.1, 0.3], [0.9, -0.5], [0.0, 0.8], [-0.7, 0.2]]
OPENINGS = {(STOP,): 0.3, (LEFT, PLAIN): 1.0, (LEFT, FANCY): -0.5, (RIGHT,): 0.4}
FAIR = {(LEFT, PLAIN): 0.7, (LEFT, FANCY): 0.2, (RIGHT,): 0.5}  # how likely the world says 0

TABLE = [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in LOGITS]


@dataclass(frozen=True)
class Game:
    """An episode: each turn's (situation, token) pairs and its reward, and how likely the world's part in it is."""

    turns: tuple[tuple[tuple[tuple[int, int], ...], float], ...]
    chance: float

    @property
    def total(self) -> float:
        return sum(reward for _, reward in self.turns)

    @property
    def tokens(self) -> list[tuple[int, int]]:
        return [pair for turn, _ in self.turns for pair in turn]

    def log_probs(self) -> Tensor:
        found = {place: TABLE[place].log_softmax(0) for place, _ in self.tokens}
        return torch.stack([found[place][CHOICES[place].index(token)] for place, token in self.tokens])

    def to_come(self) -> list[float]:
        """Of each token: the rewards of its turn and of those after it."""
        rewards = [reward for _, reward in self.turns]
        return [sum(rewards[k:]) for k, (turn, _) in enumerate(self.turns) for _ in turn]


def games() -> list[Game]:
    found = []
    for opening, first in OPENINGS.items():
        pairs = [(0, opening[0])] + [(1, token) for token in opening[1:]]
        if opening == (STOP,):
            found.append(Game(((tuple(pairs), first),), 1.0))
            continue
        for said in (0, 1):
            chance = FAIR[opening] if said == 0 else 1 - FAIR[opening]
            place = 2 + said + 2 * (opening == (RIGHT,))
            found.append(Game(((tuple(pairs), first), (((place, STOP),), 0.2 - said)), chance))
            for token in (RED, BLUE):
                last = 2.0 if (token == RED) == (said == 0) else -1.5
                turns = (tuple(pairs), first), (((place, ON),), -0.1), (((6 + said, token),), last)
                found.append(Game(turns, chance))
    return found


GAMES = games()


def probabilities() -> Tensor:
    return torch.stack([game.log_probs().sum().exp() * game.chance for game in GAMES])


def gradient(objective: Tensor) -> Tensor:
    return torch.cat(torch.autograd.grad(objective, TABLE))


def policy_gradient() -> Tensor:
    """Of the mean total, from the probabilities themselves."""
    return gradient((probabilities() * torch.tensor([game.total for game in GAMES], dtype=torch.float64)).sum())


def all_groups(samples: int) -> list[tuple[int, ...]]:
    return list(itertools.product(range(len(GAMES)), repeat=samples))


def mean_gradient(advantages: list[float], samples: int) -> Tensor:
    """What a step climbs on average over all groups; `advantages`: of all their tokens, group after group."""
    known, log_probs = probabilities().tolist(), [game.log_probs() for game in GAMES]
    left = iter(advantages)
    weights = [torch.zeros(len(game.tokens), dtype=torch.float64) for game in GAMES]
    for group in all_groups(samples):
        share = 1 / samples
        for index in group:
            share *= known[index]
        for index in group:
            weights[index] += share * torch.tensor([next(left) for _ in GAMES[index].tokens], dtype=torch.float64)
    assert next(left, None) is None
    return gradient(sum((own * log_probs).sum() for own, log_probs in zip(weights, log_probs)))
