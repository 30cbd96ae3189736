"""Requests to rewards and their results, for every kind of reward: functions, verifiers, models, servers; and the
weighted sum of several rewards.

Imports nothing heavy: the worker processes of reward functions import it too.
"""

import itertools
import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from trimtab.errors import RunFailed
from trimtab.rollout.episode import EpisodeRecord


class RewardFailed(RunFailed):
    """A reward could not be computed. The run stops after a checkpoint; it never trains on an invented score."""

    def __init__(self, message: str, row: int | None = None):
        """`row`: which sample of the request, where that is known; the message names it too."""
        super().__init__(message)
        self.row = row


class BadSample(RewardFailed):
    """The sample itself, such as its label, is not of the kind that this reward scores."""


@dataclass(frozen=True)
class RewardRequest:
    """Finished samples, one entry a sample in every list."""

    queries: list[str]
    """Prompt and response together, as the policy saw them."""
    prompts: list[str]
    responses: list[str]
    labels: list[Any]
    """The truth according to the data, such as an answer; None where they have none."""
    columns: dict[str, list[Any]] = field(default_factory=dict)
    """All columns of the samples' rows, by their names."""
    prompt_ids: list[list[int]] = field(default_factory=list)
    """Token ids, for models that read the policy's tokens and for rewards of steps; others work without them."""
    response_ids: Sequence[list[int]] = field(default_factory=list)
    conversations: list[list[dict[str, Any]]] = field(default_factory=list)
    """The prompts as messages, where the data have conversations."""
    episodes: list[EpisodeRecord] = field(default_factory=list)
    """Records of episodes, where there is an environment; a response is then everything after the prompt."""

    def __len__(self) -> int:
        return len(self.queries)

    def __post_init__(self) -> None:
        ids = (known for known in (self.prompt_ids, self.response_ids, self.conversations, self.episodes) if known)
        for name in (self.prompts, self.responses, self.labels, *self.columns.values(), *ids):
            assert len(name) == len(self.queries), "a request has one entry a sample in every list"

    def truth(self, row: int) -> Any:
        """The label, or its counterpart in verl's data."""
        known = self.columns.get("reward_model")
        if self.labels[row] is None and known and isinstance(known[row], dict):
            return known[row].get("ground_truth")
        return self.labels[row]

    @classmethod
    def joined(cls, requests: Sequence["RewardRequest"]) -> "RewardRequest":
        """The samples of several requests that have the same columns."""

        def all_of(name: str) -> list:
            return [value for request in requests for value in getattr(request, name)]

        columns = {name: [x for request in requests for x in request.columns[name]] for name in requests[0].columns}
        plain = {field.name: all_of(field.name) for field in fields(cls) if field.name != "columns"}
        return cls(columns=columns, **plain)

    def take(self, rows: Sequence[int]) -> "RewardRequest":
        """These samples of it, in this order."""

        def taken(values: Sequence) -> list:
            return [values[row] for row in rows] if values else []

        lists = {field.name: taken(getattr(self, field.name)) for field in fields(self) if field.name != "columns"}
        return RewardRequest(columns={name: taken(values) for name, values in self.columns.items()}, **lists)

    def with_columns(self, names: Sequence[str]) -> "RewardRequest":
        """The same with these columns alone, of those that there are."""
        return replace(self, columns={name: values for name, values in self.columns.items() if name in names})


@dataclass
class RewardResult:
    """One entry a sample, in the order of the request."""

    rewards: list[float]
    """The rewards to train on."""
    scores: list[float] = field(default_factory=list)
    """Scores for dynamic filtering; the rewards themselves unless others are given."""
    logs: dict[str, list[float]] = field(default_factory=dict)
    """Other numbers of the samples, to be logged."""
    steps: list[list[tuple[int, float]]] | None = None
    """Rewards of steps within a response: (index of a response token, score), in addition to the reward."""
    failed: dict[int, str] = field(default_factory=dict)
    """Samples that have no reward, and why: their groups are left out."""

    def __post_init__(self) -> None:
        self.scores = self.scores or list(self.rewards)

    def __len__(self) -> int:
        return len(self.rewards)

    @classmethod
    def joined(cls, results: Sequence["RewardResult"]) -> "RewardResult":
        """The result of a request from the results of its consecutive parts. A log that a part lacks is NaN there."""
        names = list(dict.fromkeys(name for result in results for name in result.logs))
        firsts = itertools.accumulate((len(result) for result in results), initial=0)
        steps = None
        if any(result.steps is not None for result in results):
            steps = [found for result in results for found in result.steps or [[] for _ in result.rewards]]
        return cls(
            [reward for result in results for reward in result.rewards],
            [score for result in results for score in result.scores],
            {n: [x for r in results for x in r.logs.get(n, [math.nan] * len(r))] for n in names},
            steps,
            {first + row: why for first, r in zip(firsts, results) for row, why in r.failed.items()},
        )

    @classmethod
    def of_failed(cls, count: int, why: str) -> "RewardResult":
        """The result of samples that all have no reward."""
        return cls([math.nan] * count, failed=dict.fromkeys(range(count), why))

    def take(self, rows: Sequence[int]) -> "RewardResult":
        """These samples of it, in this order."""
        return RewardResult(
            [self.rewards[row] for row in rows],
            [self.scores[row] for row in rows],
            {name: [values[row] for row in rows] for name, values in self.logs.items()},
            None if self.steps is None else [self.steps[row] for row in rows],
            {place: self.failed[row] for place, row in enumerate(rows) if row in self.failed},
        )


class Reward(Protocol):
    """Anything that scores samples; `str` of it is a line for the log. If it is `concurrent`, several threads may call
    it at a time."""

    name: str
    concurrent: bool
    """Whether it may compute while a model of this process does; a model in this process may not."""

    def __call__(self, request: RewardRequest) -> RewardResult: ...

    def close(self) -> None:
        """End its processes and connections."""
        ...


def checked(numbers: Any, count: int, what: str) -> list[float]:
    """`count` finite floats out of a list, a tuple or a tensor; anything else is a RewardFailed that begins with
    `what` and names the row. A single number is a list of one."""
    if hasattr(numbers, "tolist"):
        numbers = numbers.tolist()
    if isinstance(numbers, int | float):
        numbers = [numbers]
    if not isinstance(numbers, list | tuple):
        raise RewardFailed(f"{what} is {type(numbers).__name__}, not a list of numbers")
    if len(numbers) != count:
        raise RewardFailed(f"{what}: {len(numbers)} for {count} samples, there must be one for each")
    values = []
    for row, number in enumerate(numbers):
        if hasattr(number, "item"):
            number = number.item()
        if not isinstance(number, int | float):
            raise RewardFailed(f"{what} of row {row} is {_shown(number)}, not a number", row)
        try:
            number = float(number)
        except OverflowError:
            raise RewardFailed(f"{what} of row {row} is too large for a number", row) from None
        if not math.isfinite(number):
            raise RewardFailed(f"{what} of row {row} is {number}", row)
        values.append(number)
    return values


def tolerated(score: Callable[[RewardRequest], RewardResult], request: RewardRequest) -> RewardResult:
    """Score; a sample for which that fails is in the result's `failed`, and all are where no row is known."""
    left, failed = list(range(len(request))), dict[int, str]()
    while left:
        try:
            found = score(request.take(left))
            break
        except RewardFailed as error:
            failed |= dict.fromkeys(left if error.row is None else [left[error.row]], str(error))
            left = [row for row in left if row not in failed]
    else:
        found = RewardResult([])
    whole = RewardResult.joined([found, *(RewardResult.of_failed(1, why) for why in failed.values())])
    places = {row: place for place, row in enumerate([*left, *failed])}
    return whole.take([places[row] for row in range(len(request))])


def finite_or_infinite(number: int | float) -> float:
    """A number to be logged as a float, infinite where it is too large: no run stops for one."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def rows_text(rows: Sequence[int]) -> str:
    """Consecutive rows, for messages."""
    return f"row {rows[0]}" if len(rows) == 1 else f"rows {rows[0]} to {rows[-1]}"


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:40]}"


# ---- weighted sums


class RewardSum:
    """The weighted sum of several rewards' results.

    A part that is NaN does not apply to the sample; a sample to which none applies has no reward. Without any parts, as
    with a teacher alone, every reward is 0.
    """

    def __init__(self, names: Sequence[str], weights: Sequence[float]):
        """The parts' names and weights."""
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
        failed = {row: why for result in results for row, why in result.failed.items()}
        rewards = self._sum([result.rewards for result in results], failed)
        scores = self._sum([result.scores for result in results], failed)
        return RewardResult(rewards, scores, logs, self._steps(results), failed)

    def _sum(self, columns: list[list[float]], failed: Container[int]) -> list[float]:
        totals = []
        for row, parts in enumerate(zip(*columns, strict=True)):
            if row in failed:
                totals.append(math.nan)
                continue
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


class WeightedReward:
    """The weighted sum of rewards that are all in this process."""

    def __init__(self, parts: Sequence[tuple[Reward, float]]):
        self.parts = list(parts)
        self._parts_sum = RewardSum([reward.name for reward, _ in self.parts], [weight for _, weight in self.parts])
        self.name = self._parts_sum.name
        self.concurrent = all(reward.concurrent for reward, _ in self.parts)

    def __str__(self) -> str:
        return rewards_text(self.parts)

    def __call__(self, request: RewardRequest) -> RewardResult:
        return self._parts_sum.combined([reward(request) for reward, _ in self.parts], len(request))

    def close(self) -> None:
        for reward, _ in self.parts:
            reward.close()


def rewards_text(parts: Sequence[tuple[Reward, float]]) -> str:
    """Rewards and their weights, for the log."""
    return "; ".join(f"{weight:g} x {reward}" for reward, weight in parts)


def rewards_info(parts: Sequence[tuple[Reward, float]]) -> dict[str, Any]:
    """What another process must know to add up the results of these rewards (RewardSum)."""
    return {
        "rewards": [reward.name for reward, _ in parts],
        "weights": [weight for _, weight in parts],
        "rewards_in_words": rewards_text(parts),
    }


# ---- environments


EPISODE_LOGS = (
    *("tool_calls", "tool_failures", "unknown_tools", "seconds_environment"),
    *("turns", "episode_length", "branches"),
)
"""Logs that every episode has; all others are the environment's own."""


class EnvironmentReward:
    """The reward that an environment gives an episode: the rewards of all turns, and that of the whole."""

    name = "environment"
    concurrent = True

    def __init__(self, source: str):
        """`source`: the environment's name in the options."""
        self.source = source

    def __str__(self) -> str:
        return f"environment {self.source}"

    def __call__(self, request: RewardRequest) -> RewardResult:
        episodes = request.episodes
        assert len(episodes) == len(request), "an environment was played"
        names = dict.fromkeys(name for episode in episodes for name in episode.logs if name not in EPISODE_LOGS)
        logs = {name: [episode.logs.get(name, math.nan) for episode in episodes] for name in names}
        return RewardResult([episode.reward for episode in episodes], logs=logs)

    def close(self) -> None:
        """Its processes belong to the episodes' engine."""
