"""A library's environment by its name, `NAME` or `NAME?option=value&...`."""

import importlib
import json
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl

from trimtab.errors import UserError


def split(place: str) -> tuple[str, dict[str, Any]]:
    """The name, and options for its maker: JSON where they are, else text."""
    name, _, options = place.partition("?")
    return name, {key: _value(value) for key, value in parse_qsl(options, keep_blank_values=True)}


def library(module: str, package: str, source: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise UserError(f"--environment {source}: {package} is not installed: pip install {package}") from error


def unknown(source: str, name: str, known: list[str]) -> UserError:
    near = [one for one in known if name.casefold() in one.casefold()] or known
    shown = ", ".join(near[:8]) + (f" and {len(near) - 8} more" if len(near) > 8 else "")
    return UserError(f"--environment {source}: there is no {name!r}, but {shown}")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
