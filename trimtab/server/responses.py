"""Answers in the form that clients of each protocol insist on."""

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

from trimtab.envs.types import Message
from trimtab.rollout.trajectory import Rollout
from trimtab.server.request_params import RequestParams, sent
from trimtab.server.sessions import ServedPolicy

LEAST = -9999.0  # log-prob of a token


@dataclass(frozen=True)
class Completion:
    """What was drawn behind one prompt."""

    prompt_ids: list[int]
    rollouts: list[Rollout]
    messages: list[Message]  # of each, where it is a turn of a conversation


class ResponseBuilder:
    """Of one server."""

    def __init__(self, policy: ServedPolicy):
        self.policy = policy

    # ---- protocols

    def chat(self, answered: Completion, wanted: RequestParams) -> Response:
        choices = []
        for index, (rollout, message) in enumerate(zip(answered.rollouts, answered.messages)):
            called = "tool_calls" in message
            choices.append(
                {
                    "index": index,
                    "message": sent(message),
                    "finish_reason": "tool_calls" if called and rollout.finish == "stop" else rollout.finish,
                    "stop_reason": self._stop_reason(rollout, wanted),
                    "logprobs": {"content": self._content(rollout, wanted)} if wanted.log_probs else None,
                    **({"token_ids": rollout.ids} if wanted.token_ids else {}),
                }
            )
        body = self._head("chatcmpl", "chat.completion") | {"choices": choices, "usage": _usage([answered])}
        if wanted.token_ids:
            body["prompt_token_ids"] = answered.prompt_ids
        return _streamed(body, wanted, _chat_pieces) if wanted.stream else _json(body)

    def completions(self, answers: list[Completion], wanted: RequestParams) -> Response:
        choices: list[dict[str, Any]] = []
        for answered in answers:
            for rollout in answered.rollouts:
                ids = {"token_ids": rollout.ids, "prompt_token_ids": answered.prompt_ids} if wanted.token_ids else {}
                choices.append(
                    {
                        "index": len(choices),
                        "text": self.text(rollout, wanted),
                        "finish_reason": rollout.finish,
                        "stop_reason": self._stop_reason(rollout, wanted),
                        "logprobs": self._columns(rollout, wanted) if wanted.log_probs else None,
                        **ids,
                    }
                )
        body = self._head("cmpl", "text_completion") | {"choices": choices, "usage": _usage(answers)}
        return _streamed(body, wanted, _completion_pieces) if wanted.stream else _json(body)

    def generation(self, answered: Completion, wanted: RequestParams, name: str) -> Response:
        choices = [
            {
                "index": index,
                "token_ids": rollout.ids,
                "finish_reason": rollout.finish,
                "logprobs": {"content": self._content(rollout, wanted)},
            }
            for index, rollout in enumerate(answered.rollouts)
        ]
        return _json({"request_id": name, "choices": choices, "usage": _usage([answered])})

    # ---- parts of them

    def text(self, rollout: Rollout, wanted: RequestParams) -> str:
        """Without the token or the text that ended it, where that was asked to."""
        ids = rollout.ids
        if rollout.finish == "stop" and ids and ids[-1] in wanted.sampling.stop_token_ids:
            return self.policy.text(ids[:-1], special=wanted.special_tokens)
        return without_stop(self.policy.text(ids, special=wanted.special_tokens), rollout, wanted)

    def _head(self, kind: str, called: str) -> dict[str, Any]:
        name = f"{kind}-{uuid.uuid4().hex}"
        return {"id": name, "object": called, "created": int(time.time()), "model": self.policy.name}

    def _name(self, token: int, wanted: RequestParams) -> tuple[str, str]:
        """As it is, and in JSON."""
        return (f"token_id:{token}", f'"token_id:{token}"') if wanted.names_as_ids else self.policy.names[token]

    def _content(self, rollout: Rollout, wanted: RequestParams) -> "RawJSON":
        """The log-prob of every token, and of the likeliest others where they were asked for."""
        entries = self._entries(rollout.ids, rollout.log_probs, wanted)
        if rollout.alternatives is None:
            others = ["[]"] * len(entries)
        else:
            tokens, log_probs = rollout.alternatives.tokens, rollout.alternatives.log_probs
            rows = zip(tokens.tolist(), log_probs)
            others = [_listed(map("".join, zip(self._entries(*row, wanted), repeat("}")))) for row in rows]
        return RawJSON(_listed(f'{entry},"top_logprobs":{likely}}}' for entry, likely in zip(entries, others)))

    def _entries(self, tokens: list[int], log_probs: np.ndarray, wanted: RequestParams) -> list[str]:
        """Objects in JSON that are not closed yet."""
        found = []
        for token, log_prob in zip(tokens, _numbers(log_probs)):
            name, written = self._name(token, wanted)
            spelling = "null" if wanted.names_as_ids else str([*name.encode()])
            found.append(f'{{"token":{written},"logprob":{log_prob},"bytes":{spelling}')
        return found

    def _columns(self, rollout: Rollout, wanted: RequestParams) -> dict[str, Any]:
        if wanted.names_as_ids:
            names = [f"token_id:{token}" for token in rollout.ids]
            written = [f'"{name}"' for name in names]
        else:
            known = list(map(self.policy.names.__getitem__, rollout.ids))
            names, written = [name for name, _ in known], [name for _, name in known]
        others = None
        if rollout.alternatives is not None:
            rows = zip(rollout.alternatives.tokens.tolist(), _in_range(rollout.alternatives.log_probs).tolist())
            others = [{self._name(token, wanted)[0]: value for token, value in zip(*row)} for row in rows]
        return {
            "tokens": RawJSON(_listed(written)),
            "token_logprobs": RawJSON(_listed(_numbers(rollout.log_probs))),
            "top_logprobs": others,
            "text_offset": RawJSON(str([0, *accumulate(map(len, names[:-1]))] if names else [])),
        }

    def _stop_reason(self, rollout: Rollout, wanted: RequestParams) -> int | str | None:
        """The token that ended it, unless it is the model's own way to end, or the text."""
        if rollout.finish != "stop" or not rollout.ids or rollout.ids[-1] in self.policy.house.stops:
            return None
        if rollout.ids[-1] in wanted.sampling.stop_token_ids:
            return rollout.ids[-1]
        text = self.policy.text(rollout.ids, special=True)
        return next((stop for stop in wanted.sampling.stop_strings if stop in text), None)


def _in_range(log_probs: np.ndarray) -> np.ndarray:
    """Of a token that is all but certain it may be a last bit above 0, which clients do not believe. Of one that must
    not be drawn it is an infinity, which JSON does not know."""
    return np.clip(log_probs, LEAST, 0.0)


def _numbers(log_probs: np.ndarray) -> list[str]:
    """In as many digits as fp32 is known again by: all those of a double take three times as long to find."""
    return ("%.9g " * len(log_probs) % tuple(_in_range(log_probs).tolist())).split()


def _listed(written: Iterable[str]) -> str:
    return f"[{','.join(written)}]"


def without_stop(text: str, rollout: Rollout, wanted: RequestParams) -> str:
    """Up to the stop string that ended it."""
    if rollout.finish != "stop" or wanted.stop_strings_shown:
        return text
    places = [place for stop in wanted.sampling.stop_strings if (place := text.rfind(stop)) >= 0]
    return text[: min(places)] if places else text


def _usage(answers: list[Completion]) -> dict[str, int]:
    read = sum(len(answered.prompt_ids) for answered in answers)
    drawn = sum(len(rollout.tokens) for answered in answers for rollout in answered.rollouts)
    return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}


# ---- JSON


@dataclass(frozen=True)
class RawJSON:
    """A part of a reply that is JSON already."""

    text: str


PLACE = secrets.token_hex(16)  # which stands in JSON where a part goes that is written already


def _dumped(body: dict[str, Any]) -> str:
    parts: list[str] = []

    def put_off(part: RawJSON) -> str:
        parts.append(part.text)
        return PLACE

    pieces = json.dumps(body, separators=(",", ":"), default=put_off).split(f'"{PLACE}"')
    return "".join(chain.from_iterable(zip_longest(pieces, parts, fillvalue="")))


def _json(body: dict[str, Any]) -> Response:
    return Response(_dumped(body), media_type="application/json")


# ---- server-sent events: whole turns, since they are all there


def _streamed(
    body: dict[str, Any], wanted: RequestParams, pieces: Callable[[dict[str, Any]], list[dict[str, Any]]]
) -> Response:
    head = {name: value for name, value in body.items() if name not in ("choices", "usage", "prompt_token_ids")}
    head["object"] = {"chat.completion": "chat.completion.chunk"}.get(head["object"], head["object"])
    chunks = [head | {"choices": [piece]} for choice in body["choices"] for piece in pieces(choice)]
    if "prompt_token_ids" in body:
        chunks[0]["prompt_token_ids"] = body["prompt_token_ids"]
    if wanted.stream_usage:
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


def _completion_pieces(choice: dict[str, Any]) -> list[dict[str, Any]]:
    return [choice]
