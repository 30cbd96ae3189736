"""From words on the command line, or values in YAML, to an option's value.

A ValueError's text is meant to follow the option's name.
"""

import math
from typing import Any

from trimtab.config.catalogue import Option

REDACTED = "<redacted>"
"""Stands in written configs for a value that is a key."""

_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}


def from_text(option: Option, text: str) -> Any:
    """One value of the option, from one word. In a list None is a word like any other."""
    if option.optional and option.count is None and text == "None":
        return None
    if option.bare and text.lower() in ("true", "false"):
        return option.bare if text.lower() == "true" else None
    if text in option.words:
        return text
    try:
        return plain(option.kind, text)
    except ValueError as error:
        raise ValueError(f"{error}; or {' or '.join(option.words)}" if option.words else str(error)) from None


def from_yaml(option: Option, value: Any) -> Any:
    """The option's whole value, from what a YAML file holds. Numbers such as 5e-6 are text to YAML, so text is read as
    on the command line."""
    if option.count is not None:
        if option.optional and value in (None, "None"):
            return None
        items = value if isinstance(value, list) else [value]
        if not items or len(items) != (option.count or len(items)):
            raise ValueError(f"takes a list of {option.count or 'one or more'} values, not {value!r}")
        return tuple(_one_from_yaml(option, item) for item in items)
    return _one_from_yaml(option, value)


def _one_from_yaml(option: Option, value: Any) -> Any:
    if isinstance(value, str):
        return from_text(option, value)
    if value is None and option.optional:
        return None
    if isinstance(value, bool) and option.bare:
        return from_text(option, str(value))
    return plain(option.kind, value, shown="what is there" if option.secret else None)


def plain(kind: type, value: Any, shown: str | None = None) -> Any:
    """A value of this type, from what a YAML file or a word holds. `shown`: what an error says of the value."""
    if isinstance(value, str):
        return _truth(value) if kind is bool else value if kind is str else _number(kind, value)
    if isinstance(value, bool) and kind is bool:
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and kind in (int, float):
        return _number(kind, repr(value))
    if number and kind is str:
        return str(value)
    raise ValueError(f"takes {_NAMES[kind]}, not {shown or repr(value)}")


def _truth(text: str) -> bool:
    if text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    raise ValueError(f"takes {_NAMES[bool]}, not {text!r}")


def _number(kind: type, text: str) -> int | float:
    try:
        if kind is int:
            try:
                return int(text)
            except ValueError:
                number = float(text)  # 1e8 is a whole number too
                if number != int(number):
                    raise
                return int(number)
        number = float(text)
        if not math.isfinite(number):
            raise ValueError
        return number
    except (ValueError, OverflowError):
        raise ValueError(f"takes {_NAMES[kind]}, not {text!r}") from None


_NAMES = {bool: "True or False", int: "a whole number", float: "a number", str: "text"}
