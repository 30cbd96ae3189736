"""What the model has said, as a message: its words, its thoughts, and the tools that it calls.

A tokenizer that has a response template knows its model's way of calling tools. Any other is read as Hermes writes:
<tool_call>{"name": ..., "arguments": {...}}</tool_call>. What does not parse stays text.
"""

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from trimtab.data.chat import ChatRenderer
from trimtab.envs.types import Message

# Sought one after the other: one pattern for both would go back and forth in what a model draws that ends nothing.
CALL, CALLED = "<tool_call>", "</tool_call>"
THOUGHT, THOUGHT_THROUGH = "<think>", "</think>"
SPACE = re.compile(r"\s*")


class Parsing:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict[str, Any]] = ()):
        self.tokenizer, self.tools = tokenizer, list(tools)

    def text(self, ids: Sequence[int], stops: Collection[int]) -> str:
        """All of it, but for the token that ended it."""
        words = ids[:-1] if len(ids) and ids[-1] in stops else ids
        return self.tokenizer.decode(list(words), clean_up_tokenization_spaces=False)

    def message(self, ids: Sequence[int], prefix: Sequence[int], stops: Collection[int]) -> Message:
        """`prefix`: what it was drawn from, whose end may be the beginning of the message."""
        return self.turn(ids, prefix, stops)[0]

    def turn(self, ids: Sequence[int], prefix: Sequence[int], stops: Collection[int]) -> tuple[Message, str]:
        """The message, and its text."""
        text, found = self.text(ids, stops), None
        if getattr(self.tokenizer, "response_template", None) is not None:
            found = self._by_template(list(ids), list(prefix))
        return self.hermes(text) if found is None else found, text

    def written(self, name: str, arguments: dict[str, Any]) -> str:
        """A call as the model writes it: what `turn` reads."""
        if getattr(self.tokenizer, "response_template", None) is None:
            return f"{CALL}{json.dumps({'name': name, 'arguments': arguments})}{CALLED}"
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

    def hermes(self, text: str) -> Message:
        message: Message = {"role": "assistant"}
        thought, through, rest = text.partition(THOUGHT_THROUGH)
        if through:
            message["reasoning_content"], text = thought.lstrip().removeprefix(THOUGHT).strip("\n"), rest.lstrip()
        content, calls = _without_calls(text)
        message["content"] = content.strip() if calls else content
        return {**message, "tool_calls": calls} if calls else message

    def _by_template(self, ids: list[int], prefix: list[int]) -> Message | None:
        try:
            found = self.tokenizer.parse_response(ids, prefix=prefix, tools=self.tools or None)
        except Exception:  # a template of the model's, applied to whatever the model has drawn
            return None
        if not isinstance(found, dict):
            return None
        message: Message = {"role": "assistant", "content": found.get("content") or ""}
        if thought := found.get("reasoning_content") or found.get("thinking") or found.get("reasoning"):
            message["reasoning_content"] = thought
        functions = [_checked(call.get("function")) for call in found.get("tool_calls") or () if isinstance(call, dict)]
        if any(function is None for function in functions) or not isinstance(message["content"], str):
            return None
        calls = [_call(number, function) for number, function in enumerate(functions) if function is not None]
        return {**message, "tool_calls": calls} if calls else message


def _without_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """What stands around the calls, and the calls."""
    around: list[str] = []
    calls: list[dict[str, Any]] = []
    place = 0
    while (start := text.find(CALL, place)) >= 0 and (end := text.find(CALLED, start)) >= 0:
        behind = end + len(CALLED)
        function = _function(text[start + len(CALL) : end].strip())
        if function is None:
            around.append(text[place:behind])
        else:
            calls.append(_call(len(calls), function))
            around.append(text[place:start])
            behind = SPACE.match(text, behind).end()  # type: ignore[union-attr]  # it matches nothing, too
        place = behind
    return "".join([*around, text[place:]]), calls


def _call(number: int, function: dict[str, Any]) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": function}


def _function(text: str) -> dict[str, Any] | None:
    try:
        return _checked(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _checked(found: Any) -> dict[str, Any] | None:
    """A name and arguments by name, or nothing."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return {"name": found["name"], "arguments": arguments} if isinstance(arguments, dict) else None
