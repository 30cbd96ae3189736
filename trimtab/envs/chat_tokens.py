"""Chat tokens: observations as tokens after the model's turns, and the model's turns as messages.

A generated turn is never decoded and encoded again: the tokens of what follows are appended to it. The chat template
gives these tokens for a probe conversation that ends alike: everything after the token that ends its last answer. That
they do not depend on what came before is tested when a `ChatAppender` is made; a template that fails is refused.

A tokenizer with a response template knows how its model calls tools. Turns of any other are parsed as Hermes writes:
<tool_call>{"name": ..., "arguments": {...}}</tool_call>. What does not parse stays text.
"""

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from trimtab.data.chat_template import ChatRenderer
from trimtab.data.tokenizer import decode_text, encode_text
from trimtab.envs.types import VERBATIM, EpisodeSettings, Message
from trimtab.errors import UserError

ANSWER, ARGUMENT, QUESTION, PROBE = "Zanswerq", "Zargumentq", "Zquestionq", "Zprobeq"
CACHE_SIZE = 1024
MAX_CACHED_KEY = 2**14  # characters
OTHER_TEMPLATE = "use another chat template (--tokenizer_chat_template)"
REMEDY = f"{OTHER_TEMPLATE}, or --agent_history template"


class AppendError(UserError):
    """The chat template can render a conversation, but not turn by turn."""


@dataclass(frozen=True)
class AssistantSpan:
    """Where a template writes the last answer of a conversation."""

    marker: str  # the last text of the answer
    count: int  # how often the marker occurs
    between: str  # the marker and the token that ends the answer
    ends: bool  # whether there is such a token


class TextAppender:
    """Tokens of a conversation without a chat template: the contents of messages, one after another."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer

    def opening(self, messages: Sequence[Message]) -> list[int]:
        return encode_text(self.tokenizer, join_contents(messages))

    def after(self, messages: Sequence[Message], ended: bool) -> list[int]:
        return encode_text(self.tokenizer, join_contents(messages))


class ChatAppender:
    """Tokens of a conversation by a chat template, turn by turn."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[dict[str, Any]] = (),
        stops: Sequence[int] = (),
        settings: dict[str, Any] | None = None,
    ):
        """`stops`: further tokens that end an answer; `settings`: further variables of the template."""
        self.tokenizer, self.tools = tokenizer, list(tools) or None
        self.renderer = ChatRenderer(tokenizer, settings=settings)
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        # Other tokens may be stop tokens, too; but a template ends an answer with a special token.
        stopping = {tokenizer.eos_token, *(special & {*tokenizer.convert_ids_to_tokens(list(stops))})} - {None}
        self._special, self._stopping = _any_of(special | stopping), _any_of(stopping)
        self._places: dict[str, AssistantSpan] = {}  # by probe conversation
        self._cache: dict[str, list[int]] = {}  # samples begin alike, and observations repeat
        self._check()

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """The tokens before the first turn."""
        if is_verbatim(messages):
            return encode_text(self.tokenizer, join_contents(messages))
        return self._cached(
            ("opening", messages), lambda: encode_text(self.tokenizer, self._text(list(messages), prompt=True))
        )

    def after(self, messages: Sequence[Message], ended: bool) -> list[int]:
        """The tokens between a turn and the next. `ended`: the turn has its end token; otherwise that comes first."""
        if is_verbatim(messages):
            return encode_text(self.tokenizer, join_contents(messages))
        return self._cached(
            ("after", ended, messages), lambda: self._after(_probe(messages, self.tools), list(messages), ended)
        )

    def _cached(self, query: tuple, find: Callable[[], list[int]]) -> list[int]:
        key = json.dumps(query)
        if len(key) > MAX_CACHED_KEY:
            return find()
        if (ids := self._cache.get(key)) is None:
            self._cache[key] = ids = find()
            _evict(self._cache)
        return list(ids)

    # ---- the probe conversation

    def _after(self, before: list[Message], messages: list[Message], ended: bool) -> list[int]:
        """The tokens after the last answer of `before`."""
        text, answered, end = self._locate(before, messages)
        # Encoded from its end token on: text before a special token does not change the tokens after it.
        ids = encode_text(self.tokenizer, text[answered:])
        return ids[1:] if ended and end > answered else ids

    def _locate(self, before: list[Message], messages: list[Message]) -> tuple[str, int, int]:
        """The whole text, and where the token that ends the last answer of `before` begins and ends in it."""
        answer = self._answer_place(before)
        text = self._text([*before, *messages], prompt=True)
        index = -1
        for _ in range(answer.count):
            index = text.find(answer.marker, index + 1)
        if index < 0:
            raise self._refused("does not show what the assistant said before the last turn")
        start = index + len(answer.marker) + len(answer.between)
        if not text.startswith(answer.between, start - len(answer.between)):
            raise self._refused("writes an answer otherwise when others follow it")
        if not answer.ends:
            return text, start, start
        # Some templates end the last turn of all with another token.
        if (end := self._special.match(text, start)) is None:
            raise self._refused("writes an answer otherwise when others follow it")
        return text, end.start(), end.end()

    def _answer_place(self, before: list[Message]) -> AssistantSpan:
        key = json.dumps(before)
        if key not in self._places:
            text = self._text(before, prompt=False)
            marker = max((ANSWER, ARGUMENT), key=text.rfind)
            if marker not in text:
                raise self._refused("does not show what the assistant says")
            rest = text[text.rfind(marker) + len(marker) :]
            ends = [*self._stopping.finditer(rest)][:1] or [*self._special.finditer(rest)][-1:]
            between = rest[: ends[0].start()] if ends else rest.rstrip()
            self._places[key] = AssistantSpan(marker, text.count(marker), between, bool(ends))
            _evict(self._places)  # tools may have many names
        return self._places[key]

    def _text(self, messages: list[Message], prompt: bool) -> str:
        try:
            return self.renderer.render_text(messages, self.tools, "the conversation", prompt)
        except UserError:  # some templates need arguments as text
            if not any("tool_calls" in message for message in messages):
                raise
            return self.renderer.render_text(_with_json_arguments(messages), self.tools, "the conversation", prompt)

    # ---- the check that the template can be appended to

    def _check(self) -> None:
        """Check messages of users and, if there are tools, of tools."""
        said: dict[str, list[Message]] = {"user": [{"role": "user", "content": PROBE}]}
        if self.tools:
            name = self.tools[0]["function"]["name"]
            said["tool"] = [{"role": "tool", "name": name, "tool_call_id": "call_0", "content": PROBE}]
        for role, messages in said.items():
            try:
                self._check_turn(messages)
            except UserError as error:
                way = REMEDY if isinstance(error, AppendError) else OTHER_TEMPLATE
                raise UserError(f"what a {role} says cannot be put behind an answer: {error}; {way}") from error

    def _check_turn(self, messages: list[Message]) -> None:
        short = _probe(messages, self.tools)
        earlier: list[Message] = [{"role": "user", "content": "Hm?"}, {"role": "assistant", "content": "Well, no."}]
        talk = [short, [*earlier, *short], [{"role": "user", "content": "Another one, longer"}, *short[1:]]]
        for ended in (True, False):
            found = [self._after(before, messages, ended) for before in talk]
            if any(ids != found[0] for ids in found):
                raise self._refused("writes it otherwise after other turns")
        text, answered, end = self._locate(short, messages)
        said = text[end:]  # compared as text: a small tokenizer may not have these words
        if PROBE not in said or ANSWER in said or ARGUMENT in said:
            raise self._refused("does not write it there")
        whole, mark = encode_text(self.tokenizer, text), encode_text(self.tokenizer, text[answered:end])
        if end > answered and (len(mark) != 1 or whole[-len(found[0]) :] != found[0]):
            raise self._refused("leaves no border between tokens there")

    def _refused(self, how: str) -> AppendError:
        return AppendError(f"the chat template {how}")


def tokens_after(
    appender: ChatAppender | TextAppender, turn: Sequence[int], messages: Sequence[Message], stops: Collection[int]
) -> list[int]:
    """The tokens after a generated turn, which may end with a stop token. If the template's next token is that very
    token, it is not repeated."""
    ended = bool(turn) and turn[-1] in stops
    ids = appender.after(messages, ended)
    return ids[1:] if ended and ids and ids[0] == turn[-1] else ids


def join_contents(messages: Sequence[Message]) -> str:
    return "".join(content for message in messages if isinstance(content := message.get("content"), str))


def is_verbatim(messages: Sequence[Message]) -> bool:
    return bool(messages) and all(message["role"] == VERBATIM for message in messages)


def _with_json_arguments(messages: Sequence[Message]) -> list[Message]:
    """The messages with the arguments of tool calls as JSON."""
    return [
        {**message, "tool_calls": calls_as_json(calls)} if (calls := message.get("tool_calls")) else message
        for message in messages
    ]


def calls_as_json(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool calls with their arguments as JSON."""
    return [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in calls
    ]


def _probe(messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> list[Message]:
    """A conversation that these messages can follow: an answer, with tool calls if they are results of tools."""
    answer: Message = {"role": "assistant", "content": ANSWER}
    answers = [message for message in messages if message["role"] == "tool"]
    if answers:
        some = tools[0]["function"]["name"] if tools else "tool"
        answer["tool_calls"] = [
            {
                "id": message.get("tool_call_id", f"call_{number}"),
                "type": "function",
                "function": {"name": message.get("name", some), "arguments": {"value": ARGUMENT}},
            }
            for number, message in enumerate(answers)
        ]
    return [{"role": "user", "content": QUESTION}, answer]


def _evict(known: dict[str, Any]) -> None:
    """Drop the oldest entries."""
    while len(known) > CACHE_SIZE:
        known.pop(next(iter(known)), None)  # the server calls from several threads


def _any_of(names: set[str]) -> re.Pattern[str]:
    alternatives = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.compile(alternatives if names else r"(?!)")


# ---- the model's turns as messages

# Searched with str.find: a regular expression for both tags would backtrack over unclosed ones.
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
SPACE = re.compile(r"\s*")


class MessageParser:
    """Parses generated tokens into a message with its text, its reasoning and its tool calls."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict[str, Any]] = ()):
        self.tokenizer, self.tools = tokenizer, list(tools)

    def text(self, ids: Sequence[int], stops: Collection[int]) -> str:
        """The text without the stop token."""
        return decode_text(self.tokenizer, ids[:-1] if len(ids) and ids[-1] in stops else ids)

    def message(
        self, ids: Sequence[int], prefix: Sequence[int], stops: Collection[int], *, calls: bool = True
    ) -> Message:
        """The message of a served turn. `prefix`: the tokens before the turn, whose end may be the beginning of the
        message; `calls`: whether tool calls are parsed."""
        text = self.text(ids, stops)
        if self.by_template and (found := self._by_template(list(ids), list(prefix))) is not None:
            return found if calls or "tool_calls" not in found else {"role": "assistant", "content": text}
        return self.hermes(text, opened=self.opened(prefix), calls=calls)

    @property
    def by_template(self) -> bool:
        return getattr(self.tokenizer, "response_template", None) is not None

    def opened(self, prefix: Sequence[int]) -> bool:
        """Whether a prompt ends with the beginning of reasoning."""
        return decode_text(self.tokenizer, prefix[-16:]).rstrip().endswith(THINK_OPEN)

    def turn(self, ids: Sequence[int], prefix: Sequence[int], stops: Collection[int]) -> tuple[Message, str]:
        """The message, and its text."""
        text, found = self.text(ids, stops), None
        if self.by_template:
            found = self._by_template(list(ids), list(prefix))
        return self.hermes(text) if found is None else found, text

    def written(self, name: str, arguments: dict[str, Any]) -> str:
        """A tool call as the model writes it, the inverse of `turn`."""
        if not self.by_template:
            return f"{CALL_OPEN}{json.dumps({'name': name, 'arguments': arguments})}{CALL_CLOSE}"
        renderer = ChatRenderer(self.tokenizer)
        asked: Message = {"role": "user", "content": ""}
        call: Message = {
            "role": "assistant",
            "content": "",
            "tool_calls": [_call(0, {"name": name, "arguments": arguments})],
        }
        opening = renderer.render_prompt([asked])
        whole = renderer.render_text([asked, call])
        return whole.removeprefix(opening).partition(self.tokenizer.eos_token)[0]

    def hermes(self, text: str, *, opened: bool | None = None, calls: bool = True, whole: bool = True) -> Message:
        """Parse reasoning and tool calls in Hermes' tags. `opened`: whether the prompt begins the reasoning; without an
        opening tag there or here there is none. None: unknown, so everything before a closing tag is reasoning.
        `whole`: False: more text follows; the message has what it cannot change, without tool calls."""
        message: Message = {"role": "assistant"}
        begun, (thought, closed, rest) = text.lstrip(), text.partition(THINK_CLOSE)
        if not whole and begun != THINK_OPEN and THINK_OPEN.startswith(begun):
            return {**message, "content": ""}
        if closed if opened is None else opened or begun.startswith(THINK_OPEN):
            if not whole and not closed:
                thought = without_beginnings(thought, [THINK_CLOSE])
            message["reasoning_content"], text = thought.lstrip().removeprefix(THINK_OPEN).strip("\n"), rest.lstrip()
        if not calls:
            return {**message, "content": text}
        if not whole:  # white space around the content is removed if there are calls
            certain = without_beginnings(text.partition(CALL_OPEN)[0], [CALL_OPEN]).rstrip()
            return {**message, "content": "" if certain[:1].isspace() else certain}
        content, found = _split_calls(text)
        message["content"] = content.strip() if found else content
        return {**message, "tool_calls": found} if found else message

    def _by_template(self, ids: list[int], prefix: list[int]) -> Message | None:
        try:
            found = self.tokenizer.parse_response(ids, prefix=prefix, tools=self.tools or None)
        except Exception:  # the model may have generated anything
            return None
        if not isinstance(found, dict):
            return None
        message: Message = {"role": "assistant", "content": found.get("content") or ""}
        if thought := found.get("reasoning_content") or found.get("thinking") or found.get("reasoning"):
            message["reasoning_content"] = thought
        functions = [
            _checked_function(call.get("function")) for call in found.get("tool_calls") or () if isinstance(call, dict)
        ]
        if any(function is None for function in functions) or not isinstance(message["content"], str):
            return None
        calls = [_call(number, function) for number, function in enumerate(functions) if function is not None]
        return {**message, "tool_calls": calls} if calls else message


def without_beginnings(text: str, marks: Sequence[str]) -> str:
    """The text without an end that may be the beginning of a mark."""
    ends = [size for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size])]
    return text[: len(text) - max(ends, default=0)]


def _split_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """The text without the tool calls, and the calls."""
    around: list[str] = []
    calls: list[dict[str, Any]] = []
    place = 0
    while (start := text.find(CALL_OPEN, place)) >= 0 and (end := text.find(CALL_CLOSE, start)) >= 0:
        behind = end + len(CALL_CLOSE)
        function = _parsed_function(text[start + len(CALL_OPEN) : end].strip())
        if function is None:
            around.append(text[place:behind])
        else:
            calls.append(_call(len(calls), function))
            around.append(text[place:start])
            behind = SPACE.match(text, behind).end()  # type: ignore[union-attr]  # it also matches the empty string
        place = behind
    return "".join([*around, text[place:]]), calls


def _call(number: int, function: dict[str, Any]) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": function}


def _parsed_function(text: str) -> dict[str, Any] | None:
    try:
        return _checked_function(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _checked_function(found: Any) -> dict[str, Any] | None:
    """A function call with name and arguments, or None if it is not one."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return {"name": found["name"], "arguments": arguments} if isinstance(arguments, dict) else None


# ---- both directions, for the tools of an episode

ELISION = "\n[... {} tokens are left out here ...]\n"


class ObservationError(Exception):
    """An observation cannot be rendered as tokens."""


class ChatTokens:
    """Between tokens and messages, for the tools of an episode."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[dict[str, Any]],
        stops: Collection[int],
        settings: EpisodeSettings,
    ):
        self.tokenizer, self.tools, self.stops = tokenizer, list(tools), frozenset(stops)
        self.vocabulary = len(tokenizer)
        self.max_len = settings.observation_max_len
        self.parser = MessageParser(tokenizer, self.tools)
        self.renderer: ChatRenderer | None = None
        if settings.plain and (self.tools or settings.history == "template"):
            what = "tools" if self.tools else "--agent_history template"
            raise UserError(f"{what}: prompts must be rendered by a chat template for that: --apply_chat_template")
        self.appender: ChatAppender | TextAppender | None = None
        if settings.plain:
            self.appender = TextAppender(tokenizer)
        elif settings.history == "append":
            self.appender = ChatAppender(tokenizer, self.tools, sorted(self.stops))
        else:
            self.renderer = ChatRenderer(tokenizer)

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation up to the model's next turn."""
        with as_observation_error():
            if self.appender is not None:
                return self.appender.opening(messages)
            return encode_text(self.tokenizer, self._text(messages))

    def after(
        self, ids: list[int], turn: list[int], before: Sequence[Message], new: Sequence[Message]
    ) -> list[int] | None:
        """The tokens of new messages after these tokens, which end with the model's turn. `before`: the conversation up
        to and with that turn. None: the template renders that conversation differently from these tokens."""
        with as_observation_error():
            if self.appender is not None:
                return tokens_after(self.appender, turn, new, self.stops)
            text = self._text([*before, *new])
        written = decode_text(self.tokenizer, ids)
        # Compared as text: the tokens may differ from the tokenizer's, and stay as they were generated.
        return encode_text(self.tokenizer, text[len(written) :]) if text.startswith(written) else None

    def _text(self, messages: Sequence[Message]) -> str:
        assert self.renderer is not None, "history is rendered by the template"
        return self.renderer.render_prompt(list(messages), tools=self.tools or None, where="an episode")

    def shortened(self, messages: Sequence[Message]) -> list[Message]:
        """The messages of an observation within the limit, cut in the middle if they are too long."""
        if self.max_len is None:
            return list(messages)
        texts = {place: content for place, m in enumerate(messages) if isinstance(content := m.get("content"), str)}
        ids = {place: encode_text(self.tokenizer, text) for place, text in texts.items()}
        if sum(map(len, ids.values())) <= self.max_len:
            return list(messages)
        limit = _common_limit([len(own) for own in ids.values()], self.max_len)
        return [
            {**message, "content": self._elided(ids[place], limit)} if len(ids.get(place, ())) > limit else message
            for place, message in enumerate(messages)
        ]

    def _elided(self, ids: list[int], most: int) -> str:
        longest = ELISION.format(f"{len(ids):,}")
        keep = max(0, most - len(encode_text(self.tokenizer, longest)))
        head, tail = ids[: keep - keep // 2], ids[len(ids) - keep // 2 :]
        elision = ELISION.format(f"{len(ids) - keep:,}")
        return decode_text(self.tokenizer, head) + elision + decode_text(self.tokenizer, tail)


@contextlib.contextmanager
def as_observation_error() -> Iterator[None]:
    """Turn a UserError of the template into an ObservationError."""
    try:
        yield
    except UserError as error:
        raise ObservationError(f"what the environment says cannot be read: {error}") from error


def _common_limit(lengths: list[int], most: int) -> int:
    """The greatest length to which texts can be cut so that they have at most `most` tokens together."""
    left = most
    for rank, length in enumerate(sorted(lengths)):
        share = left // (len(lengths) - rank)
        if length > share:
            return share
        left -= length
    return most
