"""What several rewards say of a sample, as one: their weighted sum.

A part that is NaN does not apply to the sample; a sample to which none applies has no reward. Where there are no parts,
as with a teacher alone, every reward is 0.
"""

import math
from collections.abc import Sequence
from typing import Any

from trimtab.rewards.types import Reward, RewardFailed, RewardRequest, RewardResult


class Weighing:
    def __init__(self, names: Sequence[str], weights: Sequence[float]):
        """What each part is called, and what it counts."""
        self.name, self.weights = "+".join(names), list(weights)
        self._labels = [name if names.count(name) == 1 else f"{name}_{i + 1}" for i, name in enumerate(names)]

    def combined(self, results: Sequence[RewardResult], samples: int) -> RewardResult:
        """The parts' results for the same samples; each is logged under its name."""
        if not self.weights:
            return RewardResult([0.0] * samples)
        logs: dict[str, list[float]] = {}
        for label, result in zip(self._labels, results, strict=True):
            logs[label] = result.rewards
            logs |= {f"{label}/{name}": values for name, values in result.logs.items()}
        rewards = self._sum([result.rewards for result in results])
        scores = self._sum([result.scores for result in results])
        return RewardResult(rewards, scores, logs, self._steps(results))

    def _sum(self, columns: list[list[float]]) -> list[float]:
        totals = []
        for row, parts in enumerate(zip(*columns, strict=True)):
            applying = [weight * part for weight, part in zip(self.weights, parts) if not math.isnan(part)]
            if not applying:
                raise RewardFailed(f"row {row}: none of {', '.join(self._labels)} gives it a reward", row)
            totals.append(math.fsum(applying))
        return totals

    def _steps(self, results: Sequence[RewardResult]) -> list[list[tuple[int, float]]] | None:
        if all(result.steps is None for result in results):
            return None
        steps: list[list[tuple[int, float]]] = [[] for _ in results[0].rewards]
        for weight, result in zip(self.weights, results):
            for sample, found in zip(steps, result.steps or []):
                sample += [(index, weight * score) for index, score in found]
        return steps


class Weighted:
    """The weighted sum of rewards that are all here."""

    def __init__(self, parts: Sequence[tuple[Reward, float]]):
        self.parts = list(parts)
        self._weighing = Weighing([reward.name for reward, _ in self.parts], [weight for _, weight in self.parts])
        self.name = self._weighing.name
        self.concurrent = all(reward.concurrent for reward, _ in self.parts)

    def __str__(self) -> str:
        return in_words(self.parts)

    def __call__(self, request: RewardRequest) -> RewardResult:
        return self._weighing.combined([reward(request) for reward, _ in self.parts], len(request))

    def close(self) -> None:
        for reward, _ in self.parts:
            reward.close()


def in_words(parts: Sequence[tuple[Reward, float]]) -> str:
    return "; ".join(f"{weight:g} x {reward}" for reward, weight in parts)


def described(parts: Sequence[tuple[Reward, float]]) -> dict[str, Any]:
    """What is to be known of rewards to add up what they say elsewhere."""
    return {
        "rewards": [reward.name for reward, _ in parts],
        "weights": [weight for _, weight in parts],
        "rewards_in_words": in_words(parts),
    }
