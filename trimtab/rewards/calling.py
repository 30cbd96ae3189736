"""What is asked of a reward function, whatever process it runs in, and what is made of its answers.

What goes wrong names the row. Where a function takes a whole batch the row is found by calling it again on halves of
the batch, so a function that fails may be called several times more; after that the run stops. One that takes too long
is not called again: the batch is named.
"""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trimtab.rewards.types import RewardFailed, RewardRequest, RewardResult, checked, figure, named
from trimtab.rewards.workers import Fault, Late, Stuck


class Calls:
    """Calls of one function."""

    file: Path
    name: str
    seconds: float
    """The most that a call may take."""
    _stuck_reward: float | None = None

    def _batch(self, request: RewardRequest, rows: range) -> RewardResult:
        began = time.monotonic()
        try:
            (answer,) = self._answers(request, 1)
            return _batch_result(answer, len(request), f"{self.file}: {self.name}: reward")
        except Late as error:
            raise RewardFailed(
                f"{self.file}: {self.name} was ended after {time.monotonic() - began:.1f} s on a batch of "
                f"{len(request)} samples ({named(rows)}): a call may take {self.seconds:g} s (--reward_timeout)"
            ) from error
        except (Fault, Stuck) as error:
            raise self._located(request, error) from error

    def _located(self, request: RewardRequest, error: Exception) -> RewardFailed:
        """The failure of a batch with the smallest part of it that fails alone."""
        rows = range(len(request))
        while len(rows) > 1:
            for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
                try:
                    list(self._answers(request.take(half), 1))
                except (Fault, Stuck) as again:
                    rows, error = half, again
                    break
            else:
                return RewardFailed(
                    f"{self.file}: {self.name} failed on {named(rows)} together, but on neither half of them: {error}"
                )
        return self._failed(request, rows[0], error)

    def _part(self, request: RewardRequest, rows: range) -> RewardResult:
        results: list[RewardResult] = []
        while len(results) < len(rows):
            left = rows[len(results) :]
            try:
                for answer in self._answers(request.take(left), len(left)):
                    result = _single_result(answer, rows[len(results)], f"{self.file}: {self.name}: reward")
                    if self._stuck_reward is not None:
                        result.logs["stuck"] = [0.0]
                    results.append(result)
            except Fault as error:
                raise self._failed(request, rows[len(results)], error) from error
            except Stuck as error:
                if self._stuck_reward is None:
                    raise self._failed(request, rows[len(results)], error) from error
                results.append(RewardResult([self._stuck_reward], logs={"stuck": [1.0]}))
        return RewardResult.joined(results)

    def _failed(self, request: RewardRequest, row: int, error: Exception) -> RewardFailed:
        shown = " ".join(request.prompts[row].split())
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return RewardFailed(f"{self.file}: {self.name} failed on row {row} (prompt {shown!r}): {error}", row)

    def _answers(self, request: RewardRequest, count: int) -> Iterator[Any]:
        """`count` answers of the function; a Fault or Stuck is told with the row."""
        raise NotImplementedError


def _batch_result(answer: Any, count: int, what: str) -> RewardResult:
    """A list of rewards, or OpenRLHF's dict of rewards, scores and extra_logs."""
    if not isinstance(answer, dict):
        return RewardResult(_rewards(answer, count, what))
    if "rewards" not in answer:
        raise RewardFailed(f"{what}: the dict has {', '.join(answer) or 'nothing'}, but no rewards")
    scores = answer.get("scores")
    logs = {name: _figures(values, count, f"{what}: extra_logs {name}") for name, values in _logs(answer, what)}
    return RewardResult(
        _rewards(answer["rewards"], count, what),
        [] if scores is None else checked(scores, count, f"{what}: score"),
        logs,
    )


def _single_result(answer: Any, row: int, what: str) -> RewardResult:
    """A number, or verl's dict of a score and other figures."""
    figures: dict[str, list[float]] = {}
    if isinstance(answer, dict):
        numbers = {name: value for name, value in answer.items() if isinstance(value, int | float)}
        figures = {name: [figure(value)] for name, value in numbers.items() if name != "score"}
        answer = answer.get("score")
    try:
        return RewardResult(checked([answer], 1, what), logs=figures)
    except RewardFailed as error:
        raise RewardFailed(str(error).replace("row 0", f"row {row}"), row) from error


def _rewards(values: Any, count: int, what: str) -> list[float]:
    """Checked, except that None is NaN: TRL's way to say that a reward does not apply to a sample (see Weighing)."""
    if not isinstance(values, list) or None not in values or len(values) != count:
        return checked(values, count, what)
    numbers = checked([0 if value is None else value for value in values], count, what)
    return [math.nan if value is None else number for value, number in zip(values, numbers)]


def _logs(answer: dict[str, Any], what: str) -> list[tuple[str, Any]]:
    logs = answer.get("extra_logs") or {}
    if not isinstance(logs, dict):
        raise RewardFailed(f"{what}: extra_logs is {type(logs).__name__}, not a dict")
    return list(logs.items())


def _figures(values: Any, count: int, what: str) -> list[float]:
    """Figures to be logged may be infinite; a single one is that of every sample."""
    values = values if isinstance(values, list) else [values] * count
    if len(values) != count or not all(isinstance(value, int | float) for value in values):
        raise RewardFailed(f"{what}: a number, or one for each of {count} samples, is needed")
    return [figure(value) for value in values]
