"""Requests, and rewards that can be foretold."""

from typing import Any

from trimtab.rewards.types import RewardRequest, RewardResult


def make_reward_request(
    responses: list[str], labels: list[Any] | None = None, prompts: list[str] | None = None, **columns: list[Any]
) -> RewardRequest:
    prompts = prompts or [f"prompt {row}: " for row in range(len(responses))]
    queries = [prompt + response for prompt, response in zip(prompts, responses)]
    return RewardRequest(queries, prompts, responses, labels or [None] * len(responses), columns)


class Lengths:
    """The length of the response, and of the query as its score."""

    name = "length"
    concurrent = True

    def __init__(self) -> None:
        self.closed = False

    def __call__(self, request: RewardRequest) -> RewardResult:
        return RewardResult([float(len(r)) for r in request.responses], [float(len(q)) for q in request.queries])

    def close(self) -> None:
        self.closed = True
