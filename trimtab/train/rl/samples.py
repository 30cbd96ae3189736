"""Which answers of an RL run are kept for a person to look at, and what metrics keep of all of them.

best and worst    of every iteration, each answer once
whole groups      of a few prompts, and always of the same ones where they come again: the first prompts of the
                  evaluation, and of an iteration those whose scrambled row number is lowest
histograms        of rewards and lengths, and the mean score of up to MOST_PROMPTS prompts, in every row of metrics
"""

from collections.abc import Iterable
from typing import Any

import torch

from trimtab.algos.group_rewards import for_groups
from trimtab.train.rl.experience import Experience

GROUPS = 2  # of an iteration
EVALUATION_GROUPS = 4
MOST_ANSWERS = 16  # of a group
MOST_ITERATIONS = 50  # about so many keep groups, and the first ten
BINS = 12
MOST_PROMPTS = 256
SCRAMBLE = 2654435761  # Knuth's multiplier: neighbours in the file come far apart


def best_and_worst(experience: Experience, count: int) -> dict[int, str]:
    """Up to `count` different answers, half of them the best and half the worst; of an episode in several branches the
    last."""
    ends, rows = experience.lasts_E, experience.rows_S.tolist()
    order = ends[experience.answer_rewards_S[ends].argsort(descending=True, stable=True)].tolist()
    seen: dict[tuple[int, bytes], int] = {}
    for i in order:
        seen.setdefault((rows[i], experience.response_bytes(i)), i)
    different = list(seen.values())
    count = min(count, len(different))
    worst = different[len(different) - count // 2 :]
    return dict.fromkeys(different[: count - count // 2], "best") | dict.fromkeys(worst, "worst")


def groups(experience: Experience, iteration: int, total: int) -> list[int]:
    """The answers to a few prompts, where this iteration keeps some."""
    if iteration > 10 and iteration % max(1, total // MOST_ITERATIONS):
        return []
    first = experience.rows_S[experience.firsts_G].tolist()
    chosen = sorted(range(len(first)), key=lambda group: _key(first[group]))[:GROUPS]
    ends = set(experience.lasts_E.tolist())
    return [i for i in _shown(experience, sorted(chosen)) if i in ends]


def of_evaluation(experience: Experience) -> Experience:
    """The answers to the first prompts."""
    return experience.take(_shown(experience, range(min(EVALUATION_GROUPS, experience.groups))))


def _shown(experience: Experience, groups: Iterable[int]) -> list[int]:
    """The first answers of each group, with all their branches."""
    found = []
    for group in groups:
        samples = experience.samples_of([group])
        first = int(experience.episodes_S[samples[0]])
        found += [i for i in samples if experience.episodes_S[i] - first < MOST_ANSWERS]
    return found


def described(experience: Experience, i: int) -> dict[str, Any]:
    """What is known of an answer besides its text."""
    parts = {name: float(values[i]) for name, values in experience.logs.items() if not values[i].isnan()}
    found: dict[str, Any] = {"reward": float(experience.answer_rewards_S[i])}
    if len(parts) > 1:
        found["parts"] = parts
    if experience.advantages_N is not None and experience.lengths_S[i]:
        found["advantage"] = float(experience.advantages_N[experience.tokens_of([i])].mean())
    return found


def distributions(experience: Experience) -> dict[str, list]:
    """For a row of metrics: [lowest, highest, count, ...] of rewards and lengths, and [row, score] of prompts."""
    firsts_E = experience.firsts_E
    means_G = for_groups(lambda scores_GA: scores_GA.mean(1), experience.groups_E, experience.scores_S[firsts_E])
    scores = {}
    for row, score in zip(experience.rows_S[experience.firsts_G].tolist(), means_G.tolist()):
        scores[row] = round(score, 4)
    followed = sorted(scores, key=_key)[:MOST_PROMPTS]
    return {
        "reward_histogram": _histogram(experience.answer_rewards_S[firsts_E]),
        "length_histogram": _histogram(experience.lengths_E.float()),
        "prompt_scores": [[row, scores[row]] for row in sorted(followed)],
    }


def _histogram(values: torch.Tensor) -> list[float]:
    low, high = float(values.min()), float(values.max())
    return [low, high, *torch.histc(values.float(), BINS, low, high).int().tolist()]


def _key(row: int) -> int:
    return row * SCRAMBLE % 2**32
