"""Which answers of an RL run are kept for a person to look at, and what metrics keep of all of them.

best and worst    of every iteration, each answer once
whole groups      of a few prompts, and always of the same ones where they come again: the first prompts of the
                  evaluation, and of an iteration those whose scrambled row number is lowest
histograms        of rewards and lengths, and the mean score of up to MOST_PROMPTS prompts, in every row of metrics
"""

from typing import Any

import torch

from trimtab.train.rl.experience import Experience

GROUPS = 2  # of an iteration
EVALUATION_GROUPS = 4
MOST_ANSWERS = 16  # of a group
MOST_ITERATIONS = 50  # about so many keep groups, and the first ten
BINS = 12
MOST_PROMPTS = 256
SCRAMBLE = 2654435761  # Knuth's multiplier: neighbours in the file come far apart


def best_and_worst(experience: Experience, count: int) -> dict[int, str]:
    """Up to `count` different answers, half of them the best and half the worst."""
    order = experience.answer_rewards_S.argsort(descending=True, stable=True).tolist()
    seen: dict[tuple, int] = {}
    for i in order:
        seen.setdefault((int(experience.rows_S[i]), *experience.response_ids[i]), i)
    different = list(seen.values())
    count = min(count, len(different))
    worst = different[len(different) - count // 2 :]
    return dict.fromkeys(different[: count - count // 2], "best") | dict.fromkeys(worst, "worst")


def groups(experience: Experience, iteration: int, total: int, size: int) -> list[int]:
    """The answers to a few prompts, where this iteration keeps some."""
    if iteration > 10 and iteration % max(1, total // MOST_ITERATIONS):
        return []
    first = experience.rows_S[::size].tolist()
    chosen = sorted(range(len(first)), key=lambda group: _key(first[group]))[:GROUPS]
    return [group * size + answer for group in sorted(chosen) for answer in range(min(size, MOST_ANSWERS))]


def of_evaluation(experience: Experience, size: int) -> Experience:
    """The answers to the first prompts."""
    shown = [group * size + i for group in range(EVALUATION_GROUPS) for i in range(min(size, MOST_ANSWERS))]
    return experience.take([i for i in shown if i < len(experience)])


def described(experience: Experience, i: int) -> dict[str, Any]:
    """What is known of an answer besides its text."""
    parts = {name: float(values[i]) for name, values in experience.logs.items() if not values[i].isnan()}
    found: dict[str, Any] = {"reward": float(experience.answer_rewards_S[i])}
    if len(parts) > 1:
        found["parts"] = parts
    if experience.advantages_N is not None:
        found["advantage"] = float(experience.advantages_N[experience.tokens_of([i])].mean())
    return found


def distributions(experience: Experience, size: int) -> dict[str, list]:
    """For a row of metrics: [lowest, highest, count, ...] of rewards and lengths, and [row, score] of prompts."""
    scores = {}
    for row, score in zip(experience.rows_S[::size].tolist(), experience.scores_S.view(-1, size).mean(1).tolist()):
        scores[row] = round(score, 4)
    followed = sorted(scores, key=_key)[:MOST_PROMPTS]
    return {
        "reward_histogram": _histogram(experience.answer_rewards_S),
        "length_histogram": _histogram(experience.lengths_S.float()),
        "prompt_scores": [[row, scores[row]] for row in sorted(followed)],
    }


def _histogram(values: torch.Tensor) -> list[float]:
    low, high = float(values.min()), float(values.max())
    return [low, high, *torch.histc(values.float(), BINS, low, high).int().tolist()]


def _key(row: int) -> int:
    return row * SCRAMBLE % 2**32
