"""What the model has said, as a message: its words, its thoughts, and the tools that it calls.

A tokenizer that has a response template knows its model's way of calling tools. Any other is read as Hermes writes:
<tool_call>{"name": ..., "arguments": {...}}</tool_call>. What does not parse stays text.
"""

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from trimtab.envs.types import Message

CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>\s*", re.DOTALL)
THOUGHT = re.compile(r"\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)


class Parsing:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict[str, Any]] = ()):
        self.tokenizer, self.tools = tokenizer, list(tools)

    def text(self, ids: Sequence[int], stops: Collection[int]) -> str:
        """All of it, but for the token that ended it."""
        words = ids[:-1] if len(ids) and ids[-1] in stops else ids
        return self.tokenizer.decode(list(words), clean_up_tokenization_spaces=False)

    def message(self, ids: Sequence[int], prefix: Sequence[int], stops: Collection[int]) -> Message:
        """`prefix`: what it was drawn from, whose end may be the beginning of the message."""
        if getattr(self.tokenizer, "response_template", None) is not None:
            found = self._by_template(list(ids), list(prefix))
            if found is not None:
                return found
        return self.hermes(self.text(ids, stops))

    def hermes(self, text: str) -> Message:
        message: Message = {"role": "assistant", "content": text}
        if thought := THOUGHT.match(text):
            message["reasoning_content"], text = thought[1].strip("\n"), text[thought.end() :]
        calls: list[dict[str, Any]] = []

        def read(found: re.Match[str]) -> str:
            function = _function(found[1])
            if function is None:
                return found[0]
            calls.append(_call(len(calls), function))
            return ""

        content = CALL.sub(read, text)
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
