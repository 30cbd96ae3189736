"""Responses of the policy server in the formats of OpenAI and vLLM, whole or streamed.

Log-probs are most of a response, so they are formatted as JSON text by hand (`RawJSON`).
"""

import json
import secrets
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate, chain, repeat, zip_longest
from typing import Any

import numpy as np
from starlette.responses import Response

from trimtab.envs.chat_tokens import calls_as_json
from trimtab.envs.types import Message
from trimtab.rollout.trajectory import Trajectory
from trimtab.server.request_params import RequestParams
from trimtab.server.sessions import ServedPolicy

LEAST = -9999.0  # replaces a log-prob of -inf, which JSON does not have
PLACEHOLDER = secrets.token_hex(16)  # marks the place of a RawJSON in a dumped body


@dataclass(frozen=True)
class Completion:
    """The samples for one prompt."""

    prompt_ids: list[int]
    rollouts: list[Trajectory]
    messages: list[Message]  # one for each rollout of a chat


class ResponseBuilder:
    """Writes the responses of one server."""

    def __init__(self, policy: ServedPolicy):
        self.policy = policy

    def chat(self, completion: Completion, params: RequestParams) -> Response:
        choices = []
        for index, (rollout, message) in enumerate(zip(completion.rollouts, completion.messages)):
            called = "tool_calls" in message
            choices.append(
                {
                    "index": index,
                    "message": _shown_message(message),
                    "finish_reason": "tool_calls" if called and rollout.finish == "stop" else rollout.finish,
                    "stop_reason": self._stop_reason(rollout, params),
                    "logprobs": {"content": self._content(rollout, params)} if params.log_probs else None,
                    **({"token_ids": rollout.ids} if params.token_ids else {}),
                }
            )
        body = self._head("chatcmpl", "chat.completion") | {"choices": choices, "usage": _usage([completion])}
        if params.token_ids:
            body["prompt_token_ids"] = completion.prompt_ids
        return _streamed(body, params, _chat_pieces) if params.stream else _json(body)

    def completions(self, answers: list[Completion], params: RequestParams) -> Response:
        choices: list[dict[str, Any]] = []
        for completion in answers:
            for rollout in completion.rollouts:
                ids = {"token_ids": rollout.ids, "prompt_token_ids": completion.prompt_ids} if params.token_ids else {}
                choices.append(
                    {
                        "index": len(choices),
                        "text": self.text(rollout, params),
                        "finish_reason": rollout.finish,
                        "stop_reason": self._stop_reason(rollout, params),
                        "logprobs": self._columns(rollout, params) if params.log_probs else None,
                        **ids,
                    }
                )
        body = self._head("cmpl", "text_completion") | {"choices": choices, "usage": _usage(answers)}
        return _streamed(body, params, lambda choice: [choice]) if params.stream else _json(body)

    def generation(self, completion: Completion, params: RequestParams, name: str) -> Response:
        choices = [
            {
                "index": index,
                "token_ids": rollout.ids,
                "finish_reason": rollout.finish,
                "logprobs": {"content": self._content(rollout, params)},
            }
            for index, rollout in enumerate(completion.rollouts)
        ]
        return _json({"request_id": name, "choices": choices, "usage": _usage([completion])})

    # ---- parts

    def text(self, rollout: Trajectory, params: RequestParams) -> str:
        """The text without the stop token or stop string at its end."""
        ids = rollout.ids
        if rollout.finish == "stop" and ids and ids[-1] in params.sampling.stop_token_ids:
            return self.policy.text(ids[:-1], special=params.special_tokens)
        return without_stop(self.policy.text(ids, special=params.special_tokens), rollout, params)

    def _head(self, kind: str, called: str) -> dict[str, Any]:
        name = f"{kind}-{uuid.uuid4().hex}"
        return {"id": name, "object": called, "created": int(time.time()), "model": self.policy.name}

    def _name(self, token: int, params: RequestParams) -> tuple[str, str]:
        """A token's name as text and as JSON."""
        return (f"token_id:{token}", f'"token_id:{token}"') if params.names_as_ids else self.policy.names[token]

    def _content(self, rollout: Trajectory, params: RequestParams) -> "RawJSON":
        """The log-prob of every token, with the requested alternatives."""
        entries = self._entries(rollout.ids, rollout.log_probs, params)
        if rollout.alternatives is None:
            others = ["[]"] * len(entries)
        else:
            tokens, log_probs = rollout.alternatives.tokens, rollout.alternatives.log_probs
            rows = zip(tokens.tolist(), log_probs)
            others = [_listed(map("".join, zip(self._entries(*row, params), repeat("}")))) for row in rows]
        return RawJSON(_listed(f'{entry},"top_logprobs":{likely}}}' for entry, likely in zip(entries, others)))

    def _entries(self, tokens: list[int], log_probs: np.ndarray, params: RequestParams) -> list[str]:
        """JSON objects without their closing brace."""
        found = []
        for token, log_prob in zip(tokens, _numbers(log_probs)):
            name, written = self._name(token, params)
            spelling = "null" if params.names_as_ids else str([*name.encode()])
            found.append(f'{{"token":{written},"logprob":{log_prob},"bytes":{spelling}')
        return found

    def _columns(self, rollout: Trajectory, params: RequestParams) -> dict[str, Any]:
        if params.names_as_ids:
            names = [f"token_id:{token}" for token in rollout.ids]
            written = [f'"{name}"' for name in names]
        else:
            known = list(map(self.policy.names.__getitem__, rollout.ids))
            names, written = [name for name, _ in known], [name for _, name in known]
        others = None
        if rollout.alternatives is not None:
            rows = zip(rollout.alternatives.tokens.tolist(), _in_range(rollout.alternatives.log_probs).tolist())
            others = [{self._name(token, params)[0]: value for token, value in zip(*row)} for row in rows]
        return {
            "tokens": RawJSON(_listed(written)),
            "token_logprobs": RawJSON(_listed(_numbers(rollout.log_probs))),
            "top_logprobs": others,
            "text_offset": RawJSON(str([0, *accumulate(map(len, names[:-1]))] if names else [])),
        }

    def _stop_reason(self, rollout: Trajectory, params: RequestParams) -> int | str | None:
        """The stop token or stop string that ended the answer; None for the model's own stop tokens."""
        if rollout.finish != "stop" or not rollout.ids or rollout.ids[-1] in self.policy.defaults.stops:
            return None
        if rollout.ids[-1] in params.sampling.stop_token_ids:
            return rollout.ids[-1]
        text = self.policy.text(rollout.ids, special=True)
        return next((stop for stop in params.sampling.stop_strings if stop in text), None)


def _in_range(log_probs: np.ndarray) -> np.ndarray:
    """Clip log-probs: rounding may leave one slightly above 0, which clients reject, and forbidden tokens have -inf,
    which JSON does not have."""
    return np.clip(log_probs, LEAST, 0.0)


def _numbers(log_probs: np.ndarray) -> list[str]:
    """Numbers with the digits that identify an fp32 value; those of a double take three times as long to write."""
    return ("%.9g " * len(log_probs) % tuple(_in_range(log_probs).tolist())).split()


def _listed(written: Iterable[str]) -> str:
    return f"[{','.join(written)}]"


def without_stop(text: str, rollout: Trajectory, params: RequestParams) -> str:
    """The text up to the stop string that ended it."""
    if rollout.finish != "stop" or params.stop_strings_shown:
        return text
    places = [place for stop in params.sampling.stop_strings if (place := text.rfind(stop)) >= 0]
    return text[: min(places)] if places else text


def _usage(answers: list[Completion]) -> dict[str, int]:
    read = sum(len(completion.prompt_ids) for completion in answers)
    sampled = sum(len(rollout.tokens) for completion in answers for rollout in completion.rollouts)
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


def _shown_message(message: Message) -> Message:
    """The message in OpenAI's format: arguments of tool calls are JSON in a string."""
    shown: Message = {"role": "assistant", "content": message["content"]}
    if thought := message.get("reasoning_content"):
        shown |= {"reasoning": thought, "reasoning_content": thought}
    if calls := message.get("tool_calls"):
        shown["content"] = message["content"] or None
        shown["tool_calls"] = calls_as_json(calls)
    return shown


# ---- JSON


@dataclass(frozen=True)
class RawJSON:
    """A part of a response that is JSON text already."""

    text: str


def _dumped(body: dict[str, Any]) -> str:
    parts: list[str] = []

    def placeholder(part: RawJSON) -> str:
        parts.append(part.text)
        return PLACEHOLDER

    pieces = json.dumps(body, separators=(",", ":"), default=placeholder).split(f'"{PLACEHOLDER}"')
    return "".join(chain.from_iterable(zip_longest(pieces, parts, fillvalue="")))


def _json(body: dict[str, Any]) -> Response:
    return Response(_dumped(body), media_type="application/json")


# ---- server-sent events: each answer is sent whole, once it is finished


def _streamed(
    body: dict[str, Any], params: RequestParams, pieces: Callable[[dict[str, Any]], list[dict[str, Any]]]
) -> Response:
    head = {name: value for name, value in body.items() if name not in ("choices", "usage", "prompt_token_ids")}
    head["object"] = {"chat.completion": "chat.completion.chunk"}.get(head["object"], head["object"])
    chunks = [head | {"choices": [piece]} for choice in body["choices"] for piece in pieces(choice)]
    if "prompt_token_ids" in body:
        chunks[0]["prompt_token_ids"] = body["prompt_token_ids"]
    if params.stream_usage:
        chunks.append(head | {"choices": [], "usage": body["usage"]})
    lines = [*map(_dumped, chunks), "[DONE]"]
    return Response("".join(f"data: {line}\n\n" for line in lines), media_type="text/event-stream")


def _chat_pieces(choice: dict[str, Any]) -> list[dict[str, Any]]:
    message = choice["message"]
    delta = {name: value for name, value in message.items() if name != "role"}
    if calls := message.get("tool_calls"):
        delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
    opening = {"index": choice["index"], "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    middle = choice | {"delta": delta, "finish_reason": None}
    del middle["message"], middle["stop_reason"]
    ending = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
    return [opening, middle, ending | {"stop_reason": choice["stop_reason"]}]
