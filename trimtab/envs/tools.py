"""The tools of an environment: what the model is told of them, and how one is called."""

import contextlib
import inspect
import json
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from trimtab.envs.schemas import Schema, schema, type_hints
from trimtab.envs.shapes.adapted import Later, named, then

Tools = Sequence[Callable[..., Any]]

ACCEPTED: dict[Any, tuple[type, ...]] = {
    **{int: (int,), float: (float, int), str: (str,), bool: (bool,), type(None): (type(None),)},
    **{list: (list,), tuple: (list,), dict: (dict,)},
}
"""The types of JSON values that fit an annotation. A bool is no integer there."""
LONGEST_SHOWN = 80  # characters of an argument that does not fit


class UnknownTool(Exception):
    """The model called one that there is not."""


class BadArguments(Exception):
    """The model's arguments are none, or do not fit the tool."""


def schemas(tools: Tools) -> list[Schema]:
    """Raises TypeError where a tool cannot be told to a model."""
    names = [tool_name(tool) for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise TypeError(f"two tools are called {name}: the model could not tell them apart")
    return [schema(tool) for tool in tools]


def call(tools: Tools, name: str, arguments: object) -> Later[str]:
    """What the tool says, as the model reads it: a text as it is, anything else as JSON. `arguments` is a dict, or one
    as JSON. Whatever the tool raises passes through."""
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
    """A JSON value as its annotation wants it. Raises TypeError where it is something else.

    An integer is a float, as it is to Python, and a list becomes a tuple; nothing else is converted. Classes that JSON
    has no values of are not checked. `place` names the value in the error."""
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


def tool_name(tool: Callable[..., Any]) -> str:
    return getattr(tool, "__name__", type(tool).__name__)


def _arguments(name: str, found: object) -> dict[str, Any]:
    if found is None or found == "":
        return {}
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except json.JSONDecodeError as error:
            raise BadArguments(f"{name}: its arguments are no JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadArguments(f"{name}: its arguments are {named(found)}: a JSON object is needed")
    return {str(key): value for key, value in found.items()}


def _text(found: object) -> str:
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)
