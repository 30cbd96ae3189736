"""What a chat template tells the model about a tool, from the tool's signature and docstring (Google's format).

transformers.get_json_schema gives the same where it gives anything; it refuses functions without a docstring or with a
parameter that none describes, which are taken here. Workers import nothing heavy, so it is not used itself."""

import inspect
import json
import re
import types
import typing
from collections.abc import Callable
from typing import Any

TYPES: dict[object, str] = {
    **{int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"},
    **{list: "array", tuple: "array", dict: "object"},
}
SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)
PARAMETER = re.compile(r"^(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")
CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)

Schema = dict[str, Any]


def schema(tool: Callable[..., Any]) -> Schema:
    """As OpenAI's API and chat templates have it. Raises TypeError where a parameter cannot be told to a model."""
    name = getattr(tool, "__name__", type(tool).__name__)
    description, described, returned = _read(inspect.getdoc(tool) or "")
    hints = type_hints(tool)
    properties: Schema = {}
    required = []
    for parameter in _parameters(tool, name):
        found = _of_type(hints[parameter.name], f"{name}({parameter.name})") if parameter.name in hints else {}
        words = described.get(parameter.name)
        if words is not None and (choices := CHOICES.search(words)):
            found["enum"] = json.loads(choices.group(1))
            words = words[: choices.start()].strip()
        properties[parameter.name] = found | ({} if words is None else {"description": words})
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    function = {"name": name, "description": description, "parameters": parameters}
    if "return" in hints:
        function["return"] = _of_type(hints["return"], name) | ({"description": returned} if returned else {})
    return {"type": "function", "function": function}


def _parameters(tool: Callable[..., Any], name: str) -> list[inspect.Parameter]:
    found = [parameter for parameter in inspect.signature(tool).parameters.values() if parameter.name != "self"]
    for parameter in found:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"tool {name}: its parameter {parameter} cannot be given by name")
    return found


def type_hints(tool: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of its parameters; none where some cannot be evaluated."""
    own = tool if inspect.isroutine(tool) else type(tool).__call__
    try:
        return typing.get_type_hints(own)
    except (NameError, TypeError):  # names that only a type checker knows
        return {}


def _of_type(hint: Any, what: str) -> Schema:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _of_type(inner[0], what)
    if origin in (typing.Union, types.UnionType):
        return _of_union([one for one in inner if one is not type(None)], type(None) in inner, what)
    if origin is typing.Literal:
        kinds = list(dict.fromkeys(TYPES.get(type(one), "object") for one in inner))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(inner)}
    if origin is list:
        return {"type": "array", "items": _of_type(inner[0], what)}
    if origin is tuple:
        if ... in inner:
            return {"type": "array", "items": _of_type(inner[0], what)}
        return {"type": "array", "prefixItems": [_of_type(one, what) for one in inner]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _of_type(inner[1], what)}
    if hint is Any:
        return {}
    return {"type": TYPES.get(hint if origin is None else origin, "object")}


def _of_union(members: list[Any], nullable: bool, what: str) -> Schema:
    found = [_of_type(one, what) for one in members]
    if len(found) == 1:
        union = found[0]
    elif all(one.keys() == {"type"} for one in found):
        names = sorted({one["type"] for one in found})
        union = {"type": names[0] if len(names) == 1 else names}
    else:
        union = {"anyOf": found}
    return union | ({"nullable": True} if nullable else {})


def _read(docstring: str) -> tuple[str, dict[str, str], str | None]:
    """Description, parameters, what is returned."""
    before, *rest = SECTION.split(docstring)
    sections = dict(zip(rest[::2], rest[1::2]))
    described: dict[str, list[str]] = {}
    arguments = next((sections[name] for name in ("Args", "Arguments", "Parameters") if name in sections), "")
    last: list[str] = []
    for line in filter(None, map(str.strip, arguments.splitlines())):
        if begun := PARAMETER.match(line):
            last = described.setdefault(begun.group(1), [])
            line = begun.group(2)
        last.append(line)
    returned = sections.get("Returns")
    words = {name: " ".join(filter(None, lines)) for name, lines in described.items()}
    return before.strip(), words, returned.strip() if returned else None
