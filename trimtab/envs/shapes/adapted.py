"""An environment of any shape as a worker plays it. What the author's methods give is checked here and made native, so
that nothing behind this has to doubt it; a method may be a coroutine, and then what stands here gives an awaitable."""

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

from trimtab.envs.types import Message, Step, Task, Turn

T = TypeVar("T")
R = TypeVar("R")
Later: TypeAlias = T | Awaitable[T]
Maker = Callable[..., Any]
"""An author's class, or a function of theirs that makes one environment a call."""


class Adapted:
    """One instance, one episode. Whatever a shape does not have, it has as here."""

    @property
    def tools(self) -> Sequence[Callable[..., Any]]:
        """May change with `reset`."""
        return ()

    def reset(self, task: Task) -> Later[list[Message] | None]:
        raise NotImplementedError

    def step(self, turn: Turn) -> Later[Step]:
        """Of a turn that calls no tool, or where there are none."""
        raise NotImplementedError

    def get_reward(self) -> Later[float]:
        """Of the episode as a whole, beside those of its turns; asked once, when it is over."""
        return 0.0

    def close(self) -> Later[None]:
        return None


def then(found: Later[T], convert: Callable[[T], R]) -> Later[R]:
    """`convert` of what was found, now or when it is there."""
    if not inspect.isawaitable(found):
        return convert(found)

    async def awaited() -> R:
        return convert(await found)

    return awaited()


def messages_of(found: object, what: str) -> list[Message]:
    """A text is one message of the user's."""
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    if not isinstance(found, list | tuple):
        raise TypeError(f"{what} is {named(found)}: a text or a list of messages is needed")
    for message in found:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TypeError(f"{what} has {named(message)} in it: a message is a dict with role and content")
    return [dict(message) for message in found]


def number(found: object, what: str) -> float:
    """Of a number, or of what holds a single one: a tensor, an array."""
    value = _plain(found)
    if not isinstance(value, int | float):
        raise TypeError(f"{what} is {named(found)}: a number is needed")
    if not math.isfinite(value):
        raise ValueError(f"{what} is {value}: a finite number is needed")
    return float(value)


def figures(found: object) -> dict[str, float]:
    """The numbers of a dict that may hold anything."""
    if not isinstance(found, Mapping):
        return {}
    values = {str(name): _plain(value) for name, value in found.items()}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def next_turn(found: object, what: str) -> dict[str, Any] | None:
    """Settings of the turn that comes next: `max_new_tokens`, `stop_strings`."""
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise TypeError(f"{what} is {named(found)}: a dict is needed")
    wanted: dict[str, Any] = {}
    for name, value in found.items():
        if value is None:
            continue
        if name == "max_new_tokens":
            if type(value) is not int or value < 1:
                raise ValueError(f"{what}: max_new_tokens is {named(value)}: a whole number of at least 1 is needed")
            wanted[name] = value
        elif name == "stop_strings":
            texts = [value] if isinstance(value, str) else value
            if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
                raise ValueError(f"{what}: stop_strings is {named(value)}: a list of texts is needed")
            wanted[name] = list(texts)
        else:
            raise ValueError(f"{what} has {named(name)} in it: max_new_tokens and stop_strings are a step's to say")
    return wanted or None


def named(value: object) -> str:
    shown = " ".join(repr(value).split())
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"


def has(candidate: object, *methods: str) -> bool:
    return all(callable(getattr(candidate, method, None)) for method in methods)


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Those that a caller gives; of a method looked at in its class, without the instance."""
    try:
        found = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}
    found.pop("self", None)
    return found


def needed(function: Callable[..., Any]) -> list[str]:
    """Parameters that it cannot be called without."""
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name
        for name, found in parameters(function).items()
        if found.default is inspect.Parameter.empty and found.kind not in rest
    ]


def accepted(function: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    """What of it the function takes."""
    known = parameters(function)
    if any(found.kind is inspect.Parameter.VAR_KEYWORD for found in known.values()):
        return offered
    return {name: value for name, value in offered.items() if name in known}


def _plain(value: object) -> object:
    if not hasattr(value, "item"):
        return value
    try:
        return cast(object, value.item())
    except (TypeError, ValueError, RuntimeError):  # it holds several
        return value
