"""Which samples go into one forward and backward pass, and which samples into one optimiser step.

Answers to one prompt stay beside each other where they fit, because a row then holds their prompt once.
"""

from collections.abc import Sequence

import numpy as np

from trimtab.data.packing import pack
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.trajectories import Trajectories


def mini_batches(experience: Experience, at_once: int, seed: Sequence[int]) -> list[list[int]]:
    """The samples of a rollout in optimiser steps of `at_once` whole groups, in random order."""
    groups = np.random.default_rng(seed).permutation(experience.groups)
    steps = [groups[i : i + at_once] for i in range(0, len(groups), at_once)]
    return [experience.samples_of(sorted(step.tolist())) for step in steps]


def micro_batches(
    experience: Trajectories, samples: Sequence[int], *, count: int, budget: int | None
) -> list[list[int]]:
    """Passes of at most `budget` tokens, or of `count` samples."""
    pieces = _pieces(experience, samples, count=count, budget=budget)
    if budget is None:
        order = sorted(pieces, key=lambda piece: -cost(experience, piece))
        passes: list[list[int]] = []
        for piece in order:
            if passes and len(passes[-1]) + len(piece) <= count:
                passes[-1] += piece
            else:
                passes.append(list(piece))
        return passes
    return packed(experience, pieces, budget)


def packed(experience: Trajectories, pieces: Sequence[Sequence[int]], budget: int) -> list[list[int]]:
    """Passes of at most `budget` tokens, none of which has only a part of a piece."""
    costs = [cost(experience, piece) for piece in pieces]
    return [[i for member in members for i in pieces[member]] for members in pack(costs, budget)]


def _pieces(experience: Trajectories, samples: Sequence[int], *, count: int, budget: int | None) -> list[list[int]]:
    """Runs of answers to one prompt, as long as a pass can hold."""
    pieces: list[list[int]] = []
    before, tokens = None, 0  # of the last piece
    for i in samples:
        prompt, own, after = experience.costs[i]
        same = prompt == before
        if same and (len(pieces[-1]) < count if budget is None else tokens + after <= budget):
            pieces[-1].append(i)
            tokens += after
        else:
            pieces.append([i])
            before, tokens = prompt, own + after
    return pieces


def cost(experience: Trajectories, samples: Sequence[int]) -> int:
    """Tokens that these samples take in a row."""
    tokens, before = 0, None
    for i in samples:
        prompt, own, after = experience.costs[i]
        tokens += after + (0 if prompt == before else own)
        before = prompt
    return tokens


def halves(samples: list[int]) -> list[list[int]]:
    middle = len(samples) // 2
    return [samples[:middle], samples[middle:]] if middle else [samples]
