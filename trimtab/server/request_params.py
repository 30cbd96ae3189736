"""Request bodies of the policy server: fields of the right type, sampling parameters, messages and tools.

`Fields` checks a JSON object field by field; `chat_params`, `completion_params` and `generate_params` turn it into
`RequestParams`, the same for every protocol; `read_messages` and `read_tools` read conversations. A field that is wrong
is an `InvalidRequest` that names it.
"""

import dataclasses
import json
import logging
import math
from dataclasses import dataclass
from typing import Any

from trimtab.envs.types import Message
from trimtab.rollout.sampling import MOST_ALTERNATIVES, SamplingParams
from trimtab.server.http import HTTPError

log = logging.getLogger(__name__)

LARGEST = 2**63
MOST_ANSWERS = 128
COLDEST = 0.01  # least temperature above 0; with lower ones probabilities overflow
SET_BY_THE_RUN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias", "min_tokens")
PENALTIES_NOT_OFFERED = ("presence_penalty", "frequency_penalty")
ROLES = ("system", "developer", "user", "assistant", "tool")


class InvalidRequest(HTTPError):
    """A client's mistake. `param`: the field that is wrong."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(status, message)
        self.param, self.code = param, code


def no_room(most: int, found: int, param: str) -> InvalidRequest:
    # Clients look for these first words and this code.
    words = f"This model's maximum context length is {most} tokens, and the prompt has {found}: shorten it"
    return InvalidRequest(words, param, "context_length_exceeded")


# ---- fields


class Fields:
    """The fields of a JSON object; null is the same as absent."""

    def __init__(self, body: dict[str, Any], within: str = "", size: int = 0):
        """`within`: prefix of field names in errors; `size`: of the whole request, in bytes."""
        self.body, self.within, self.size = body, within, size

    def __contains__(self, name: str) -> bool:
        return self.body.get(name) is not None

    def wrong(self, name: str, needed: str) -> InvalidRequest:
        return InvalidRequest(f"{self.within}{name} must be {needed}", self.within + name)

    def object(self, name: str) -> "Fields":
        found = self.body.get(name)
        if found is not None and not isinstance(found, dict):
            raise self.wrong(name, "an object")
        return Fields(found or {}, f"{self.within}{name}.")

    def integer(self, name: str, default: int, least: int, most: int = LARGEST - 1) -> int:
        found = self.optional_integer(name, least, most)
        return default if found is None else found

    def optional_integer(self, name: str, least: int, most: int = LARGEST - 1) -> int | None:
        found = self.body.get(name)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= most:
            bounds = f"at least {least}" if most == LARGEST - 1 else f"between {least} and {most}"
            raise self.wrong(name, f"a whole number, {bounds}")
        return found

    def number(self, name: str, default: float, least: float, most: float = math.inf) -> float:
        found = self.body.get(name)
        if found is None:
            return default
        numeric = isinstance(found, int | float) and not isinstance(found, bool) and abs(found) < LARGEST
        if not numeric or not least <= found <= most:
            bounds = f"at least {least:g}" if most == math.inf else f"between {least:g} and {most:g}"
            raise self.wrong(name, f"a number, {bounds}")
        return float(found)

    def boolean(self, name: str, default: bool = False) -> bool:
        found = self.body.get(name)
        if found is not None and not isinstance(found, bool):
            raise self.wrong(name, "true or false")
        return default if found is None else found

    def text(self, name: str) -> str | None:
        found = self.body.get(name)
        if found is not None and not is_text(found):
            raise self.wrong(name, "a text")
        return found

    def texts(self, name: str) -> tuple[str, ...]:
        """One text, or a list of them."""
        found = self.body.get(name)
        listed = [] if found is None else found if isinstance(found, list) else [found]
        if not all(is_text(text) and text for text in listed):
            raise self.wrong(name, "a text that is not empty, or a list of such texts")
        return tuple(listed)

    def ids(self, name: str) -> list[int]:
        found = self.body.get(name)
        if not isinstance(found, list) or not are_ids(found):
            raise self.wrong(name, "a list of token ids")
        return found


def is_text(value: Any) -> bool:
    """Whether the value is a string without lone surrogates, which JSON may contain but tokenizers reject."""
    return isinstance(value, str) and (value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value))


def are_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}


# ---- parameters


@dataclass(frozen=True)
class RequestParams:
    """The parameters of a request: sampling, and the content of the response."""

    sampling: SamplingParams  # without the number of tokens
    limit: int | None  # new tokens; None: up to the context's end
    seed: int | None
    answers: int = 1
    log_probs: bool = False
    names_as_ids: bool = False  # "token_id:7" in place of a token's text
    token_ids: bool = False
    special_tokens: bool = False  # shown in texts
    stop_strings_shown: bool = False
    stream: bool = False
    stream_usage: bool = False
    echo: bool = False  # the prompt is part of the answer

    @property
    def hidden_stops(self) -> tuple[str, ...]:
        """Stop strings that texts do not contain."""
        return () if self.stop_strings_shown else self.sampling.stop_strings


@dataclass
class ServerDefaults:
    """Settings that apply to all requests of a server."""

    stops: tuple[int, ...]  # stop tokens
    vocabulary: int
    pinned: SamplingParams | None = None
    """In training: the run's sampling. Requests set only lengths and stops."""
    warned: set[str] = dataclasses.field(default_factory=set)  # ignored fields that were logged


def chat_params(fields: Fields, defaults: ServerDefaults) -> RequestParams:
    alternatives = fields.integer("top_logprobs", 0, 0, MOST_ALTERNATIVES)
    shown = fields.boolean("logprobs") or alternatives > 0
    if fields.boolean("echo"):
        raise InvalidRequest("echo is not offered in chats; ask /v1/completions", "echo")
    return _request_params(fields, defaults, alternatives, shown)


def completion_params(fields: Fields, defaults: ServerDefaults) -> RequestParams:
    if fields.boolean("use_beam_search"):
        raise InvalidRequest("use_beam_search is not offered; leave it out", "use_beam_search")
    if fields.text("suffix"):
        raise InvalidRequest("suffix is not offered; leave it out", "suffix")
    alternatives, shown = fields.integer("logprobs", 0, 0, MOST_ALTERNATIVES), "logprobs" in fields
    return _request_params(fields, defaults, alternatives, shown, echo=fields.boolean("echo"))


def generate_params(fields: Fields, defaults: ServerDefaults) -> RequestParams:
    """Parameters of vLLM's tokens-in-tokens-out protocol."""
    asked = fields.object("sampling_params")
    count = asked.integer("logprobs", 1, 0, MOST_ALTERNATIVES)
    # 1 requests the log-prob of the sampled token, which is always included.
    params = _request_params(asked, defaults, count if count > 1 else 0, True)
    return dataclasses.replace(params, names_as_ids=True, token_ids=True, stream=fields.boolean("stream"))


def _request_params(
    fields: Fields, defaults: ServerDefaults, alternatives: int, log_probs: bool, *, echo: bool = False
) -> RequestParams:
    for name in PENALTIES_NOT_OFFERED:
        if fields.number(name, 0.0, -100, 100) and defaults.pinned is None:
            raise InvalidRequest(f"{name} is not offered; leave it out, or give repetition_penalty", name)
    longest = fields.optional_integer("max_tokens", 0 if echo else 1)
    longest = fields.optional_integer("max_completion_tokens", 1) or longest
    if defaults.pinned is not None:
        most = defaults.pinned.max_new_tokens
        longest = most if longest is None else min(longest, most)
    sampling = _sampling(fields, defaults, alternatives)
    return RequestParams(
        # Without new tokens only the prompt is read, which the engine does for its log-probs.
        sampling=dataclasses.replace(sampling, prompt_log_probs=alternatives)
        if echo and (log_probs or longest == 0)
        else sampling,
        limit=longest,
        seed=fields.optional_integer("seed", -(2**63)),
        answers=fields.integer("n", 1, 1, MOST_ANSWERS),
        log_probs=log_probs,
        # A client that requests ids takes token texts as a sign that log-probs ignore the temperature.
        names_as_ids=fields.boolean("return_tokens_as_token_ids", fields.boolean("return_token_ids")),
        token_ids=fields.boolean("return_token_ids"),
        special_tokens=not fields.boolean("skip_special_tokens", True),
        stop_strings_shown=fields.boolean("include_stop_str_in_output"),
        stream=fields.boolean("stream"),
        stream_usage=fields.object("stream_options").boolean("include_usage"),
        echo=echo,
    )


def _sampling(fields: Fields, defaults: ServerDefaults, alternatives: int) -> SamplingParams:
    own_stops = fields.ids("stop_token_ids") if "stop_token_ids" in fields else []
    if any(not 0 <= token < defaults.vocabulary for token in own_stops):
        raise fields.wrong("stop_token_ids", f"a list of token ids below {defaults.vocabulary}")
    stops = (() if fields.boolean("ignore_eos") else defaults.stops) + tuple(own_stops)
    ends: dict[str, Any] = {
        "stop_token_ids": tuple(dict.fromkeys(stops)),
        "stop_strings": fields.texts("stop"),
        "top_log_probs": alternatives,
    }
    if defaults.pinned is not None:
        ignored = [name for name in SET_BY_THE_RUN if name in fields]
        if ignored and not defaults.warned:
            defaults.warned.update(ignored)
            log.warning("%s: requests do not say that in training, the run's options do", ", ".join(ignored))
        return dataclasses.replace(defaults.pinned, n=1, **ends)
    temperature = fields.number("temperature", 1.0, 0, 100)
    return SamplingParams(
        temperature=max(temperature, COLDEST) if temperature else 0.0,
        top_p=max(fields.number("top_p", 1.0, 0, 1), 1e-6),
        top_k=max(fields.integer("top_k", 0, -1), 0),
        min_p=fields.number("min_p", 0.0, 0, 1),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0.01, 100),
        min_new_tokens=fields.integer("min_tokens", 0, 0),
        logit_bias=_bias(fields, defaults.vocabulary),
        **ends,
    )


def _bias(fields: Fields, vocabulary: int) -> dict[int, float]:
    given = fields.object("logit_bias")
    bias: dict[int, float] = {}
    for name in given.body:
        if not name.isdecimal() or len(name) > 12 or int(name) >= vocabulary:
            raise InvalidRequest(
                f"logit_bias names the token {name[:20]!r}, and ids are below {vocabulary}", "logit_bias"
            )
        bias[int(name)] = given.number(name, 0.0, -100, 100)
    return bias


# ---- messages and tools


def read_messages(fields: Fields) -> list[Message]:
    found = fields.body.get("messages")
    if not isinstance(found, list) or not found:
        raise fields.wrong("messages", "a list of at least one message")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(found)]


def read_tools(fields: Fields) -> list[dict[str, Any]]:
    found = fields.body.get("tools")
    if found is None:
        return []
    if not isinstance(found, list) or not all(_is_tool(tool) for tool in found):
        raise fields.wrong("tools", 'a list of {"type": "function", "function": {"name": ...}}')
    choice = fields.body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise fields.wrong("tool_choice", "auto or none: that a tool is called is the model's to say")
    return found


def parses_tool_calls(fields: Fields) -> bool:
    return bool(fields.body.get("tools")) and fields.body.get("tool_choice") != "none"


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and is_text(function.get("name"))


def _message(found: Any, where: str) -> Message:
    if not isinstance(found, dict) or found.get("role") not in ROLES:
        raise InvalidRequest(f"{where} must be an object whose role is one of {', '.join(ROLES)}", "messages")
    message: Message = {"role": found["role"], "content": _content(found.get("content"), where)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if found.get(name) is not None:
            if not is_text(found[name]):
                raise InvalidRequest(f"{where}.{name} must be a text", "messages")
            message[name] = found[name]
    if found.get("tool_calls"):
        if not isinstance(found["tool_calls"], list):
            raise InvalidRequest(f"{where}.tool_calls must be a list", "messages")
        message["tool_calls"] = [_call(call, where) for call in found["tool_calls"]]
    return message


def _content(found: Any, where: str) -> str:
    """The content as text; text parts are joined by newlines."""
    if found is None:
        return ""
    parts = found if isinstance(found, list) else [{"type": "text", "text": found}]
    texts = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise InvalidRequest(f"{where} has content that is no text; only text is read here", "messages")
        if not is_text(part.get("text")):
            raise InvalidRequest(f"{where}.content must be a text", "messages")
        texts.append(part["text"])
    return "\n".join(texts)


def _call(found: Any, where: str) -> dict[str, Any]:
    function = found.get("function") if isinstance(found, dict) else None
    if not isinstance(function, dict) or not is_text(function.get("name")):
        raise InvalidRequest(f"{where}.tool_calls must hold functions that have a name", "messages")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise InvalidRequest(f"{where}.tool_calls has arguments that are not JSON", "messages") from None
    call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": str(found["id"]), **call} if found.get("id") is not None else call
