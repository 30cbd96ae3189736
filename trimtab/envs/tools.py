"""The tools of an environment: what the model is told of them, and how one is called."""

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

from trimtab.envs.schemas import Schema, schema
from trimtab.envs.shapes.adapted import Later, named, then

Tools = Sequence[Callable[..., Any]]


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
    given = _arguments(name, arguments)
    try:
        inspect.signature(tool).bind(**given)
    except TypeError as error:
        raise BadArguments(f"{name}{inspect.signature(tool)}: {error}") from error
    return then(tool(**given), _text)


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
