"""Responses of the policy server in the formats of OpenAI and vLLM, whole or streamed.

Log-probs are most of a response, so they are formatted as JSON text by hand (`RawJSON`).
"""

import json
import secrets
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, repeat, zip_longest
from typing import Any, Literal

import numpy as np
from starlette.responses import Response

from trimtab.envs.chat_tokens import calls_as_json, without_beginnings
from trimtab.envs.types import Message
from trimtab.rollout.trajectory import TopLogprobs, Trajectory
from trimtab.server.request_params import RequestParams
from trimtab.server.request_queue import EngineFailed
from trimtab.server.sessions import ServedPolicy

LEAST = -9999.0  # replaces a log-prob of -inf, which JSON does not have
PLACEHOLDER = secrets.token_hex(16)  # marks the place of a RawJSON in a dumped body


@dataclass(frozen=True)
class Completion:
    """The samples for one prompt."""

    prompt_ids: list[int]
    rollouts: list[Trajectory]
    messages: list[Message]  # one for each rollout of a chat
    echoed: tuple[list[int], str] = ([], "")  # the prompt and its text, if answers include it


class ResponseBuilder:
    """Writes the responses of one server."""

    def __init__(self, policy: ServedPolicy):
        self.policy = policy

    def chat(self, completion: Completion, params: RequestParams) -> Response:
        choices = []
        for index, (rollout, message) in enumerate(zip(completion.rollouts, completion.messages)):
            choices.append(
                {
                    "index": index,
                    "message": _shown_message(message),
                    **self._ending(rollout, params, message),
                    "logprobs": {"content": self._content(rollout, params)} if params.log_probs else None,
                    **({"token_ids": rollout.ids} if params.token_ids else {}),
                }
            )
        body = self._head("chatcmpl", "chat.completion") | {"choices": choices, "usage": _usage([completion])}
        if params.token_ids:
            body["prompt_token_ids"] = completion.prompt_ids
        return _json(body)

    def completions(self, answers: list[Completion], params: RequestParams) -> Response:
        choices: list[dict[str, Any]] = []
        for completion in answers:
            for rollout in completion.rollouts:
                ids = {"token_ids": rollout.ids, "prompt_token_ids": completion.prompt_ids} if params.token_ids else {}
                choices.append(
                    {
                        "index": len(choices),
                        "text": completion.echoed[1] + self.text(rollout, params),
                        **self._ending(rollout, params),
                        "logprobs": self._columns(rollout, params, completion.echoed[0])[0],
                        **ids,
                    }
                )
        body = self._head("cmpl", "text_completion") | {"choices": choices, "usage": _usage(answers)}
        return _json(body)

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

    # ---- chunks of a stream

    def chunk(self, kind: Literal["chat", "text"], params: RequestParams) -> dict[str, Any]:
        """A chunk without choices."""
        head = (
            self._head("chatcmpl", "chat.completion.chunk") if kind == "chat" else self._head("cmpl", "text_completion")
        )
        return head | ({"usage": None} if params.stream_usage else {})

    def chat_choices(
        self, index: int, stream: "AnswerStream", new: Trajectory, message: Message, params: RequestParams
    ) -> list[dict[str, Any]]:
        """The choices of the next chunks. `new`: new tokens; `message`: so far, or of the finished answer."""
        choices: list[dict[str, Any]] = []
        if not stream.begun:
            choices.append({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})
        delta: dict[str, Any] = stream.delta(message)
        if thought := delta.get("reasoning_content"):
            delta["reasoning"] = thought
        if calls := message.get("tool_calls"):
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls_as_json(calls))]
        if delta or ((params.log_probs or params.token_ids) and new.ids):
            log_probs = {"content": self._content(new, params)} if params.log_probs else None
            middle = {"index": index, "delta": delta, "logprobs": log_probs, "finish_reason": None}
            choices.append(middle | ({"token_ids": new.ids} if params.token_ids else {}))
        if new.finish is not None:
            ending = self._ending(replace(new, tokens=np.array(stream.ids, np.int32)), params, message)
            choices.append({"index": index, "delta": {}, **ending})
        return choices

    def completion_choices(
        self, index: int, stream: "AnswerStream", new: Trajectory, message: Message, params: RequestParams
    ) -> list[dict[str, Any]]:
        text = stream.delta(message).get("content", "")
        if not text and new.finish is None and not ((params.log_probs or params.token_ids) and new.ids):
            return []
        columns, stream.offset = self._columns(new, params, [] if stream.begun else stream.before, stream.offset)
        ending: dict[str, Any] = {"finish_reason": None, "stop_reason": None}
        if new.finish is not None:
            ending = self._ending(replace(new, tokens=np.array(stream.ids, np.int32)), params)
        return [
            {"index": index, "text": text, **ending, "logprobs": columns}
            | ({"token_ids": new.ids} if params.token_ids else {})
        ]

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

    def _columns(
        self, rollout: Trajectory, params: RequestParams, before: list[int], offset: int = 0
    ) -> tuple[dict[str, Any] | None, int]:
        """Log-probs of the echoed prompt's tokens and of the answer's, if requested, and the text offset behind them.
        `offset`: of the first token."""
        if not params.log_probs:
            return None, 0
        known = [self._name(token, params) for token in [*before, *rollout.ids]]
        numbers, others = _numbers(rollout.log_probs), self._others(rollout.alternatives, params)
        if before and rollout.prompt_log_probs is not None:  # the first token has none
            scores = rollout.prompt_log_probs
            numbers = ["null", *_numbers(scores.log_probs), *numbers]
            others = ["null", *self._others(scores.alternatives, params), *others]
        offsets = list(accumulate((len(name) for name, _ in known), initial=offset))
        columns = {
            "tokens": RawJSON(_listed(written for _, written in known)),
            "token_logprobs": RawJSON(_listed(numbers)),
            "top_logprobs": RawJSON(_listed(others)) if params.sampling.top_log_probs else None,
            "text_offset": RawJSON(str(offsets[:-1])),
        }
        return columns, offsets[-1]

    def _others(self, likely: TopLogprobs | None, params: RequestParams) -> list[str]:
        """JSON objects of the most likely tokens. Of several with the same name, which are no whole characters, the
        most likely one is named."""
        if likely is None:
            return []
        rows = zip(likely.tokens[:, ::-1].tolist(), likely.log_probs[:, ::-1])
        named = [
            {self._name(token, params)[1]: value for token, value in zip(tokens, _numbers(p))} for tokens, p in rows
        ]
        return [f"{{{','.join(f'{name}:{own[name]}' for name in reversed(own))}}}" for own in named]

    def _ending(self, rollout: Trajectory, params: RequestParams, message: Message | None = None) -> dict[str, Any]:
        called = message is not None and "tool_calls" in message and rollout.finish == "stop"
        reason = "tool_calls" if called else rollout.finish
        return {"finish_reason": reason, "stop_reason": self._stop_reason(rollout, params)}

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
    return usage_of(read, sampled)


def usage_of(read: int, sampled: int) -> dict[str, int]:
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


# ---- server-sent events


class AnswerStream:
    """An answer on its way to a client that reads along: which part of its text is certain, and what was sent."""

    def __init__(self, policy: ServedPolicy, *, special: bool, echoed: tuple[list[int], str] = ([], "")):
        """`special`: its text has the names of special tokens; `echoed`: the prompt that precedes it."""
        self._policy, self._special = policy, special
        self.before, self.prompt_text = echoed
        self.ids: list[int] = []
        self.begun = False
        self.offset = 0  # of the next token in the text of all
        self._text = ""
        # The tokens from the first place on are decoded, and those up to the second are in the text: tokens before a
        # word may change how it is written.
        self._window = 0, 0
        self._sent: dict[str, int] = {}

    def take(self, piece: Trajectory) -> Trajectory:
        """The new tokens of a piece, or of the finished answer."""
        count, likely = len(self.ids), piece.alternatives
        if piece.finish is not None:
            if piece.ids[:count] != self.ids:
                raise EngineFailed("the answer was begun anew with other weights; ask again")
            likely = None if likely is None else TopLogprobs(likely.tokens[count:], likely.log_probs[count:])
            piece = replace(piece, tokens=piece.tokens[count:], log_probs=piece.log_probs[count:], alternatives=likely)
        self.ids += piece.ids
        return piece

    def certain_text(self, stops: Sequence[str]) -> str:
        """The text that later tokens do not change: without an incomplete character, or what may be a stop string."""
        first, last = self._window
        known, found = (self._policy.text(self.ids[first:end], special=self._special) for end in (last, len(self.ids)))
        # Tokenizers with tokens for bytes give up all characters of a sequence of such tokens if one is incomplete.
        complete = not found.endswith("\ufffd") and not str(
            self._policy.tokenizer.convert_ids_to_tokens(self.ids[-1])
        ).startswith("<0x")
        if len(found) > len(known) and complete:
            self._text += found[len(known) :]
            self._window = last, len(self.ids)
        places = [place for stop in stops if (place := self._text.find(stop)) >= 0]
        return self._text[: min(places)] if places else without_beginnings(self._text, stops)

    def delta(self, message: Message) -> dict[str, str]:
        """What of a message was not sent yet."""
        texts = {"reasoning_content": message.get("reasoning_content"), "content": message["content"]}
        sent, self._sent = self._sent, {name: len(text or "") for name, text in texts.items()}
        return {
            name: text[sent.get(name, 0) :] for name, text in texts.items() if text and len(text) > sent.get(name, 0)
        }


def as_event(body: dict[str, Any] | str) -> bytes:
    return f"data: {body if isinstance(body, str) else _dumped(body)}\n\n".encode()
