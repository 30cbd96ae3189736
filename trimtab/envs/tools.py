"""Tools of an environment: their schemas for the chat template, and how a tool call is executed.

A schema comes from the tool's signature and docstring (Google's format). transformers.get_json_schema returns the same
where it returns anything; it refuses functions without a docstring or with a parameter that is not described, which are
accepted here. Worker processes import nothing heavy, so transformers is not used itself.
"""

import contextlib
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from trimtab.envs.adapter import MaybeAwaitable, describe, then

TYPES: dict[object, str] = {
    **{int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"},
    **{list: "array", tuple: "array", dict: "object"},
}
SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)
PARAMETER = re.compile(r"^(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")
CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)

Schema = dict[str, Any]
Tools = Sequence[Callable[..., Any]]


def tool_schemas(tools: Tools) -> list[Schema]:
    """The schemas of all tools. Raise TypeError if one cannot be described to a model."""
    names = [tool_name(tool) for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise TypeError(f"two tools are called {name}: the model could not tell them apart")
    return [tool_schema(tool) for tool in tools]


def tool_schema(tool: Callable[..., Any]) -> Schema:
    """A tool's schema in the format of OpenAI's API and chat templates. Raise TypeError if a parameter has no name."""
    name = tool_name(tool)
    description, described, returned = _parse_docstring(inspect.getdoc(tool) or "")
    hints = type_hints(tool)
    properties: Schema = {}
    required = []
    for parameter in _parameters(tool, name):
        found = _type_schema(hints[parameter.name]) if parameter.name in hints else {}
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
        function["return"] = _type_schema(hints["return"]) | ({"description": returned} if returned else {})
    return {"type": "function", "function": function}


def _parameters(tool: Callable[..., Any], name: str) -> list[inspect.Parameter]:
    found = [parameter for parameter in inspect.signature(tool).parameters.values() if parameter.name != "self"]
    for parameter in found:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"tool {name}: its parameter {parameter} cannot be given by name")
    return found


def type_hints(tool: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of its parameters; none if some cannot be evaluated."""
    own = tool if inspect.isroutine(tool) else type(tool).__call__
    try:
        return typing.get_type_hints(own)
    except (NameError, TypeError):  # names that only a type checker knows
        return {}


def _type_schema(hint: Any) -> Schema:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _type_schema(inner[0])
    if origin in (typing.Union, types.UnionType):
        return _union_schema([one for one in inner if one is not type(None)], type(None) in inner)
    if origin is typing.Literal:
        kinds = list(dict.fromkeys(TYPES.get(type(one), "object") for one in inner))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(inner)}
    if origin is list:
        return {"type": "array", "items": _type_schema(inner[0])}
    if origin is tuple:
        if ... in inner:
            return {"type": "array", "items": _type_schema(inner[0])}
        return {"type": "array", "prefixItems": [_type_schema(one) for one in inner]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type_schema(inner[1])}
    if hint is Any:
        return {}
    return {"type": TYPES.get(hint if origin is None else origin, "object")}


def _union_schema(members: list[Any], nullable: bool) -> Schema:
    found = [_type_schema(one) for one in members]
    if len(found) == 1:
        union = found[0]
    elif all(one.keys() == {"type"} for one in found):
        names = sorted({one["type"] for one in found})
        union = {"type": names[0] if len(names) == 1 else names}
    else:
        union = {"anyOf": found}
    return union | ({"nullable": True} if nullable else {})


def _parse_docstring(docstring: str) -> tuple[str, dict[str, str], str | None]:
    """The description of the tool, those of its parameters, and that of its result."""
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


def tool_name(tool: Callable[..., Any]) -> str:
    return getattr(tool, "__name__", type(tool).__name__)


# ---- tool calls

ACCEPTED: dict[Any, tuple[type, ...]] = {
    **{int: (int,), float: (float, int), str: (str,), bool: (bool,), type(None): (type(None),)},
    **{list: (list,), tuple: (list,), dict: (dict,)},
}
"""The types of JSON values that fit an annotation. A bool does not fit int."""
LONGEST_SHOWN = 80  # characters of an argument that does not fit


class UnknownTool(Exception):
    """The model called a tool that does not exist."""


class BadArguments(Exception):
    """The model's arguments are no JSON object, or do not fit the tool's signature."""


def call_tool(tools: Tools, name: str, arguments: object) -> MaybeAwaitable[str]:
    """The tool's result as the model reads it: a text as it is, anything else as JSON. `arguments` is a dict, or a JSON
    object. Exceptions of the tool pass through."""
    tool = next((tool for tool in tools if tool_name(tool) == name), None)
    if tool is None:
        raise UnknownTool(f"there is no tool {name}, but {', '.join(map(tool_name, tools)) or 'none at all'}")
    given, signature = _arguments(name, arguments), inspect.signature(tool)
    try:
        signature.bind(**given)
        hints = type_hints(tool)
        fitted = {key: _fitted(value, hints.get(key, Any), key, signature) for key, value in given.items()}
    except TypeError as error:
        raise BadArguments(f"{name}{signature}: {error}") from error
    return then(tool(**fitted), _text)


def _fitted(value: Any, hint: Any, name: str, signature: inspect.Signature) -> Any:
    parameter = signature.parameters.get(name)
    if value is None and parameter is not None and parameter.default is None:  # `limit: int = None`
        return None
    return as_annotated(value, hint, name)


def as_annotated(value: Any, hint: Any, place: str) -> Any:
    """A JSON value converted to its annotation. Raise TypeError if it does not fit; `place` names the value.

    An integer is a float, as it is to Python, and a list becomes a tuple; nothing else is converted. Classes without
    JSON values are not checked."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return as_annotated(value, inner[0], place)
    if origin in (typing.Union, types.UnionType):
        for member in inner:
            with contextlib.suppress(TypeError):
                return as_annotated(value, member, place)
        raise _misfit(value, hint, place)
    if origin is typing.Literal:
        if not any(type(value) is type(choice) and value == choice for choice in inner):
            raise _misfit(value, hint, place)
        return value
    kind = origin or hint
    if kind not in ACCEPTED:
        return value
    if type(value) not in ACCEPTED[kind]:
        raise _misfit(value, hint, place)
    if kind is dict and inner:
        return {key: as_annotated(one, inner[1], f"{place}[{key!r}]") for key, one in value.items()}
    if kind is list and inner:
        return [as_annotated(one, inner[0], f"{place}[{number}]") for number, one in enumerate(value)]
    if kind is not tuple:
        return value
    members = [inner[0] if inner else Any] * len(value) if not inner or inner[-1] is ... else inner
    if len(members) != len(value):
        raise _misfit(value, hint, place)
    return tuple(as_annotated(one, members[number], f"{place}[{number}]") for number, one in enumerate(value))


def _misfit(value: Any, hint: Any, place: str) -> TypeError:
    found = json.dumps(value, ensure_ascii=False)
    shown = found if len(found) <= LONGEST_SHOWN else f"{found[:LONGEST_SHOWN]}..."
    return TypeError(f"{place} must be {inspect.formatannotation(hint)}, not {shown}")


def _arguments(name: str, found: object) -> dict[str, Any]:
    if found is None or found == "":
        return {}
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except json.JSONDecodeError as error:
            raise BadArguments(f"{name}: its arguments are no JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadArguments(f"{name}: its arguments are {describe(found)}: a JSON object is needed")
    return {str(key): value for key, value in found.items()}


def _text(found: object) -> str:
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)
