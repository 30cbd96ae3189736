"""Conversations as clients write them, and as chat templates and records read them."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from trimtab.envs.types import Message
from trimtab.serving.fields import Fields, is_text
from trimtab.serving.refusals import NotUnderstood

ROLES = ("system", "developer", "user", "assistant", "tool")


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


def calls_are_read(fields: Fields) -> bool:
    return bool(fields.body.get("tools")) and fields.body.get("tool_choice") != "none"


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and is_text(function.get("name"))


def _message(found: Any, where: str) -> Message:
    if not isinstance(found, dict) or found.get("role") not in ROLES:
        raise NotUnderstood(f"{where} must be an object whose role is one of {', '.join(ROLES)}", "messages")
    message: Message = {"role": found["role"], "content": _content(found.get("content"), where)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if found.get(name) is not None:
            if not is_text(found[name]):
                raise NotUnderstood(f"{where}.{name} must be a text", "messages")
            message[name] = found[name]
    if found.get("tool_calls"):
        if not isinstance(found["tool_calls"], list):
            raise NotUnderstood(f"{where}.tool_calls must be a list", "messages")
        message["tool_calls"] = [_call(call, where) for call in found["tool_calls"]]
    return message


def _content(found: Any, where: str) -> str:
    """Text; parts that are text follow each other line by line."""
    if found is None:
        return ""
    parts = found if isinstance(found, list) else [{"type": "text", "text": found}]
    texts = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise NotUnderstood(f"{where} has content that is no text; only text is read here", "messages")
        if not is_text(part.get("text")):
            raise NotUnderstood(f"{where}.content must be a text", "messages")
        texts.append(part["text"])
    return "\n".join(texts)


def _call(found: Any, where: str) -> dict[str, Any]:
    function = found.get("function") if isinstance(found, dict) else None
    if not isinstance(function, dict) or not is_text(function.get("name")):
        raise NotUnderstood(f"{where}.tool_calls must hold functions that have a name", "messages")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise NotUnderstood(f"{where}.tool_calls has arguments that are not JSON", "messages") from None
    call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": str(found["id"]), **call} if found.get("id") is not None else call


def sent(message: Message) -> Message:
    """A message of the model's as clients read it: arguments are a text of JSON there."""
    shown: Message = {"role": "assistant", "content": message["content"]}
    if thought := message.get("reasoning_content"):
        shown |= {"reasoning": thought, "reasoning_content": thought}
    if calls := message.get("tool_calls"):
        shown["content"] = message["content"] or None
        shown["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in calls
        ]
    return shown


# ---- histories


def history_keys(messages: Sequence[Message], about: Any) -> list[bytes]:
    """Of each beginning of a conversation, a name: alike where who said what is, and `about` (tools, settings of the
    template). The names of calls, thoughts and spaces at the ends are not looked at, for clients change those."""
    key = hashlib.blake2b(_plain(about), digest_size=16)
    keys = [key.digest()]
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        own = [message["role"], (message.get("content") or "").strip(), calls]
        if message["role"] != "assistant":
            own.append(message.get("name"))
        key.update(_plain(own))
        keys.append(key.digest())
    return keys


def _plain(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode() + b"\n"
