"""The two protocols of reward servers, as bodies of requests and replies, for both sides.

OpenRLHF   POST {"query": [...], "prompts": [...], "labels": [...]}  ->  {"rewards": [...]}
PaddleNLP  POST {"src": [...], "tgt": [...], "response": [...]}      ->  {"error_code": 0, ..., "score": [...]}

A query is prompt and response together. OpenRLHF's reply may also have scores (for dynamic filtering) and extra_logs.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

from trimtab.rewards.types import RewardFailed, RewardRequest, RewardResult, checked, figure


class NotUnderstood(Exception):
    """A body that is not of this protocol, and why."""


class OpenRLHF:
    name = "openrlhf"
    path = "/get_reward"
    mark = "query"
    """The field by which a request is told from the others'."""

    def request_body(self, request: RewardRequest) -> dict[str, Any]:
        return {"query": request.queries, "prompts": request.prompts, "labels": request.labels}

    def read_request(self, body: dict[str, Any]) -> RewardRequest:
        queries = _texts(body, "query")
        prompts = _texts(body, "prompts", queries) if body.get("prompts") is not None else [""] * len(queries)
        labels = _list(body, "labels", queries) if body.get("labels") is not None else [None] * len(queries)
        # Whoever sends something else as prompts still sends the whole text as the query.
        starts = [len(prompt) if query.startswith(prompt) else 0 for query, prompt in zip(queries, prompts)]
        return RewardRequest(queries, prompts, [query[start:] for query, start in zip(queries, starts)], labels)

    def reply_body(self, result: RewardResult) -> dict[str, Any]:
        # JSON has no NaN.
        logs = {name: values for name, values in result.logs.items() if all(map(math.isfinite, values))}
        return {"rewards": result.rewards, "scores": result.scores, "extra_logs": logs}

    def read_reply(self, body: dict[str, Any], count: int) -> RewardResult:
        if "rewards" not in body:
            raise NotUnderstood(f"a reply with {', '.join(body) or 'nothing'} in place of rewards")
        return RewardResult(
            checked(body["rewards"], count, "reward"),
            checked(body["scores"], count, "score") if body.get("scores") is not None else [],
            dict(_readable_figures(body.get("extra_logs"), count)),
        )

    def error_body(self, status: int, message: str) -> dict[str, Any]:
        return {"error": message}


class PaddleNLP:
    name = "paddlenlp"
    path = "/"
    mark = "src"

    def request_body(self, request: RewardRequest) -> dict[str, Any]:
        return {
            "src": request.prompts,
            "tgt": [_as_text(label) for label in request.labels],
            "response": request.responses,
        }

    def read_request(self, body: dict[str, Any]) -> RewardRequest:
        prompts = _texts(body, "src")
        labels, responses = _texts(body, "tgt", prompts), _texts(body, "response", prompts)
        return RewardRequest([a + b for a, b in zip(prompts, responses)], prompts, responses, labels)

    def reply_body(self, result: RewardResult) -> dict[str, Any]:
        return {"error_code": 0, "error_msg": "Success", "score": result.rewards}

    def read_reply(self, body: dict[str, Any], count: int) -> RewardResult:
        if body.get("error_code", 0) != 0:
            raise RewardFailed(f"error {body['error_code']}: {body.get('error_msg', '')}")
        if "score" not in body:
            raise NotUnderstood(f"a reply with {', '.join(body) or 'nothing'} in place of score")
        return RewardResult(checked(body["score"], count, "score"))

    def error_body(self, status: int, message: str) -> dict[str, Any]:
        return {"error_code": status, "error_msg": message, "score": []}


Protocol = OpenRLHF | PaddleNLP
PROTOCOLS: dict[str, Protocol] = {protocol.name: protocol for protocol in (OpenRLHF(), PaddleNLP())}


def protocol_of(body: dict[str, Any]) -> Protocol:
    """The protocol of a request, by its fields."""
    for protocol in PROTOCOLS.values():
        if protocol.mark in body:
            return protocol
    raise NotUnderstood(f"a request has a field {' or '.join(protocol.mark for protocol in PROTOCOLS.values())}")


def encode(body: dict[str, Any]) -> bytes:
    """JSON as the Python standard library and the package requests write it."""
    return json.dumps(body, default=_of_another_library).encode()


def _readable_figures(logs: Any, count: int) -> Iterator[tuple[str, list[float]]]:
    """Figures to be logged, a single one for every sample; no run stops for one that cannot be read."""
    for name, values in logs.items() if isinstance(logs, dict) else ():
        values = values if isinstance(values, list) else [values] * count
        if len(values) == count and all(isinstance(value, int | float) for value in values):
            yield name, [figure(value) for value in values]


def _list(body: dict[str, Any], field: str, like: list[str] | None = None) -> list[Any]:
    values = body.get(field)
    if not isinstance(values, list):
        raise NotUnderstood(f"{field} must be a list, not {type(values).__name__}")
    if like is not None and len(values) != len(like):
        raise NotUnderstood(f"{field} has {len(values)} entries for {len(like)} samples")
    return values


def _texts(body: dict[str, Any], field: str, like: list[str] | None = None) -> list[str]:
    values = _list(body, field, like)
    for row, value in enumerate(values):
        if not isinstance(value, str):
            raise NotUnderstood(f"{field} of row {row} must be text, not {type(value).__name__}")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise NotUnderstood(f"{field} of row {row} has half a surrogate pair, which is no character") from None
    return values


def _as_text(label: Any) -> str:
    if label is None:
        return ""
    return label if isinstance(label, str) else json.dumps(label, ensure_ascii=False, default=_of_another_library)


def _of_another_library(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
