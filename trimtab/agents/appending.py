"""What the world says, as tokens behind the model's own (rule 3 of docs/agents.md).

A turn that was drawn is never decoded and encoded again: what comes next is put behind it. Which tokens those are, the
chat template says of a made-up conversation that ends alike: everything after the mark that ends its last answer. That
this is the same whatever was said before is tried when the class is made; a template that fails is refused.
"""

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from trimtab.data.chat import ChatRenderer
from trimtab.envs.types import VERBATIM, Message
from trimtab.errors import UserError

ANSWER, ARGUMENT, QUESTION, PROBE = "Zanswerq", "Zargumentq", "Zquestionq", "Zprobeq"
MOST_KNOWN = 1024
LONGEST_KEPT = 2**14  # characters
ANOTHER = "use another chat template (--tokenizer_chat_template)"
WAY_OUT = f"{ANOTHER}, or --agent_history template"


class CannotAppend(UserError):
    """The template can render the conversation, but not turn by turn."""


@dataclass(frozen=True)
class Shown:
    """Where a template writes the last answer of a conversation."""

    mark: str  # of what it says, the last that stands there
    times: int  # that it stands there
    between: str  # and the token that ends it
    ends: bool  # whether one does


class Opener(Protocol):
    """What begins a conversation, and goes on with it."""

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """The tokens from which the first turn is drawn."""

    def after(self, messages: Sequence[Message], ended: bool) -> list[int]:
        """The tokens between a turn and the next. `ended`: the turn's last token is one that ends it; else such a one
        is put in first."""


class PlainText:
    """Of prompts that no chat template has rendered: what is said stands there as it is."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer

    def opening(self, messages: Sequence[Message]) -> list[int]:
        return encoded(self.tokenizer, texts_of(messages))

    def after(self, messages: Sequence[Message], ended: bool) -> list[int]:
        return encoded(self.tokenizer, texts_of(messages))


class Appending:
    """By a chat template. `stops`: tokens that end an answer, beside the tokenizer's own; `settings`: what else the
    template is told."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[dict[str, Any]] = (),
        stops: Sequence[int] = (),
        settings: dict[str, Any] | None = None,
    ):
        self.tokenizer, self.tools = tokenizer, list(tools) or None
        self.renderer = ChatRenderer(tokenizer, settings=settings)
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        # Words may stop an answer, too; but it is special tokens that a template ends it with.
        stopping = {tokenizer.eos_token, *(special & {*tokenizer.convert_ids_to_tokens(list(stops))})} - {None}
        self._special, self._stopping = _any_of(special | stopping), _any_of(stopping)
        self._known: dict[str, Shown] = {}  # by the made-up conversation
        self._kept: dict[str, list[int]] = {}  # samples begin alike, and worlds repeat themselves
        self._prove()

    def opening(self, messages: Sequence[Message]) -> list[int]:
        if is_verbatim(messages):
            return encoded(self.tokenizer, texts_of(messages))
        return self._keeping(
            ("opening", messages), lambda: encoded(self.tokenizer, self._text(list(messages), prompt=True))
        )

    def after(self, messages: Sequence[Message], ended: bool) -> list[int]:
        if is_verbatim(messages):
            return encoded(self.tokenizer, texts_of(messages))
        return self._keeping(
            ("after", ended, messages), lambda: self._behind(_made_up(messages, self.tools), list(messages), ended)
        )

    def _keeping(self, asked: tuple, find: Callable[[], list[int]]) -> list[int]:
        key = json.dumps(asked)
        if len(key) > LONGEST_KEPT:
            return find()
        if (ids := self._kept.get(key)) is None:
            self._kept[key] = ids = find()
            _shrink(self._kept)
        return list(ids)

    # ---- the made-up conversation

    def _behind(self, before: list[Message], messages: list[Message], ended: bool) -> list[int]:
        """What follows the last answer of `before`."""
        text, answered, end = self._places(before, messages)
        # From the token on that ends it: what stands before such a one changes nothing of what comes behind.
        ids = encoded(self.tokenizer, text[answered:])
        return ids[1:] if ended and end > answered else ids

    def _places(self, before: list[Message], messages: list[Message]) -> tuple[str, int, int]:
        """The whole text, where in it the mark begins that ends the last answer of `before`, and where it ends."""
        answer = self._shown(before)
        text = self._text([*before, *messages], prompt=True)
        place = -1
        for _ in range(answer.times):
            place = text.find(answer.mark, place + 1)
        if place < 0:
            raise self._refused("does not show what the assistant said before the last turn")
        start = place + len(answer.mark) + len(answer.between)
        if not text.startswith(answer.between, start - len(answer.between)):
            raise self._refused("writes an answer otherwise when others follow it")
        if not answer.ends:
            return text, start, start
        # Some end the last turn of all with another token.
        if (end := self._special.match(text, start)) is None:
            raise self._refused("writes an answer otherwise when others follow it")
        return text, end.start(), end.end()

    def _shown(self, before: list[Message]) -> "Shown":
        key = json.dumps(before)
        if key not in self._known:
            text = self._text(before, prompt=False)
            mark = max((ANSWER, ARGUMENT), key=text.rfind)
            if mark not in text:
                raise self._refused("does not show what the assistant says")
            rest = text[text.rfind(mark) + len(mark) :]
            ends = [*self._stopping.finditer(rest)][:1] or [*self._special.finditer(rest)][-1:]
            between = rest[: ends[0].start()] if ends else rest.rstrip()
            self._known[key] = Shown(mark, text.count(mark), between, bool(ends))
            _shrink(self._known)  # calls may have names of all kinds
        return self._known[key]

    def _text(self, messages: list[Message], prompt: bool) -> str:
        try:
            return self.renderer.render_text(messages, self.tools, "the conversation", prompt)
        except UserError:  # some want arguments as text
            if not any("tool_calls" in message for message in messages):
                raise
            return self.renderer.render_text(as_text(messages), self.tools, "the conversation", prompt)

    # ---- whether it can be appended to

    def _prove(self) -> None:
        """For what users and, where there are any, tools say."""
        said: dict[str, list[Message]] = {"user": [{"role": "user", "content": PROBE}]}
        if self.tools:
            name = self.tools[0]["function"]["name"]
            said["tool"] = [{"role": "tool", "name": name, "tool_call_id": "call_0", "content": PROBE}]
        for role, messages in said.items():
            try:
                self._prove_turn(messages)
            except UserError as error:
                way = WAY_OUT if isinstance(error, CannotAppend) else ANOTHER
                raise UserError(f"what a {role} says cannot be put behind an answer: {error}; {way}") from error

    def _prove_turn(self, messages: list[Message]) -> None:
        short = _made_up(messages, self.tools)
        earlier: list[Message] = [{"role": "user", "content": "Hm?"}, {"role": "assistant", "content": "Well, no."}]
        talk = [short, [*earlier, *short], [{"role": "user", "content": "Another one, longer"}, *short[1:]]]
        for ended in (True, False):
            found = [self._behind(before, messages, ended) for before in talk]
            if any(ids != found[0] for ids in found):
                raise self._refused("writes it otherwise after other turns")
        text, answered, end = self._places(short, messages)
        said = text[end:]  # a tokenizer of few words need not know these
        if PROBE not in said or ANSWER in said or ARGUMENT in said:
            raise self._refused("does not write it there")
        whole, mark = encoded(self.tokenizer, text), encoded(self.tokenizer, text[answered:end])
        if end > answered and (len(mark) != 1 or whole[-len(found[0]) :] != found[0]):
            raise self._refused("leaves no border between tokens there")

    def _refused(self, how: str) -> CannotAppend:
        return CannotAppend(f"the chat template {how}")


def tail_of(opener: Opener, turn: Sequence[int], messages: Sequence[Message], stops: Collection[int]) -> list[int]:
    """What comes behind a turn that was drawn, of which a stop token may be the last. Where such a token is the next
    speaker's mark it is there already."""
    ended = bool(turn) and turn[-1] in stops
    ids = opener.after(messages, ended)
    return ids[1:] if ended and ids and ids[0] == turn[-1] else ids


def encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, verbose=False)


def texts_of(messages: Sequence[Message]) -> str:
    return "".join(content for message in messages if isinstance(content := message.get("content"), str))


def is_verbatim(messages: Sequence[Message]) -> bool:
    return bool(messages) and all(message["role"] == VERBATIM for message in messages)


def as_text(messages: Sequence[Message]) -> list[Message]:
    """The same with the arguments of calls as JSON."""
    found = []
    for message in messages:
        if calls := message.get("tool_calls"):
            written = [
                {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
                for call in calls
            ]
            message = {**message, "tool_calls": written}
        found.append(message)
    return found


def _made_up(messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> list[Message]:
    """A conversation after which somebody may say this: tools have been called that answer now."""
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


def _shrink(known: dict[str, Any]) -> None:
    """Forget what has been known longest."""
    while len(known) > MOST_KNOWN:
        known.pop(next(iter(known)), None)  # the server asks in several threads


def _any_of(names: set[str]) -> re.Pattern[str]:
    alternatives = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.compile(alternatives if names else r"(?!)")
