"""The base class of environment adapters, the adapter of Trimtab's own environments, and agent functions.

A worker process plays an `EnvironmentAdapter`. An adapter checks and converts what the author's methods return, so that
no code after it has to. A method of the author's may be a coroutine function; the adapter's method then returns an
awaitable. Adapters for other projects: openrlhf.py, gymnasium.py, trl.py, verifiers_adapter.py.
"""

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast

from trimtab.envs.types import Message, Step, Task, Turn
from trimtab.errors import UserError

T = TypeVar("T")
R = TypeVar("R")
MaybeAwaitable: TypeAlias = T | Awaitable[T]
EnvironmentFactory = Callable[..., Any]
"""An author's class, or a function of theirs that returns a new environment."""


class EnvironmentAdapter:
    """One instance, one episode. The methods here are the defaults of shapes that lack them."""

    @property
    def tools(self) -> Sequence[Callable[..., Any]]:
        """May change with `reset`."""
        return ()

    def reset(self, task: Task) -> MaybeAwaitable[list[Message] | None]:
        raise NotImplementedError

    def step(self, turn: Turn) -> MaybeAwaitable[Step]:
        """Answer a turn that calls no tool, or any turn if there are no tools."""
        raise NotImplementedError

    def get_reward(self) -> MaybeAwaitable[float]:
        """The reward of the whole episode, added to those of its turns. Called once, at its end."""
        return 0.0

    def close(self) -> MaybeAwaitable[None]:
        return None


# ---- a loaded environment


@dataclass(frozen=True)
class EnvironmentInfo:
    """What a worker process tells the run about the environment that it has loaded."""

    name: str
    shape: str  # in words
    kind: Literal["environment", "agent"] = "environment"
    tools: list[dict[str, Any]] = field(default_factory=list)  # schemas that are known before a reset
    offers_rows: bool = False
    fixed: bool = False  # its rows are a dataset's, whatever the seed


class AgentFunction(Protocol):
    """Plays a whole episode at an endpoint; returns its reward and metrics."""

    def __call__(
        self, task: Task, *, base_url: str, api_key: str, model: str
    ) -> MaybeAwaitable[tuple[float, dict[str, float]]]: ...


@dataclass(frozen=True)
class LoadedEnvironment:
    info: EnvironmentInfo
    make: Callable[[], EnvironmentAdapter] | None = None  # of an environment
    run: AgentFunction | None = None  # of an agent
    rows: Callable[[int, int], list[dict[str, Any]]] | None = None
    """`rows(count, seed)`: up to `count` rows (prompt, label and further columns), if the source has prompts."""


def unknown_name(source: str, name: str, known: list[str]) -> UserError:
    """The error for a name that a library does not have, with the names that are similar."""
    near = [one for one in known if name.casefold() in one.casefold()] or known
    shown = ", ".join(near[:8]) + (f" and {len(near) - 8} more" if len(near) > 8 else "")
    return UserError(f"--environment {source}: there is no {name!r}, but {shown}")


# ---- return values of authors' methods


def then(found: MaybeAwaitable[T], convert: Callable[[T], R]) -> MaybeAwaitable[R]:
    """Apply `convert` to a result, now or once it is awaited."""
    if not inspect.isawaitable(found):
        return convert(found)

    async def awaited() -> R:
        return convert(await found)

    return awaited()


def to_messages(found: object, what: str) -> list[Message]:
    """Messages as they are; a string as one user message."""
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    if not isinstance(found, list | tuple):
        raise TypeError(f"{what} is {describe(found)}: a text or a list of messages is needed")
    for message in found:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TypeError(f"{what} has {describe(message)} in it: a message is a dict with role and content")
    return [dict(message) for message in found]


def to_float(found: object, what: str) -> float:
    """A finite number, also from a tensor or array of one element."""
    value = _item(found)
    if not isinstance(value, int | float):
        raise TypeError(f"{what} is {describe(found)}: a number is needed")
    if not math.isfinite(value):
        raise ValueError(f"{what} is {value}: a finite number is needed")
    return float(value)


def to_metrics(found: object) -> dict[str, float]:
    """The numeric entries of a dict; nothing if it is not a dict."""
    if not isinstance(found, Mapping):
        return {}
    values = {str(name): _item(value) for name, value in found.items()}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def to_sampling(found: object, what: str) -> dict[str, Any] | None:
    """Sampling parameters of the next turn: `max_new_tokens`, `stop_strings`."""
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise TypeError(f"{what} is {describe(found)}: a dict is needed")
    wanted: dict[str, Any] = {}
    for name, value in found.items():
        if value is None:
            continue
        if name == "max_new_tokens":
            if type(value) is not int or value < 1:
                raise ValueError(f"{what}: max_new_tokens is {describe(value)}: a whole number of at least 1 is needed")
            wanted[name] = value
        elif name == "stop_strings":
            texts = [value] if isinstance(value, str) else value
            if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
                raise ValueError(f"{what}: stop_strings is {describe(value)}: a list of texts is needed")
            wanted[name] = list(texts)
        else:
            raise ValueError(f"{what} has {describe(name)} in it: max_new_tokens and stop_strings are a step's to say")
    return wanted or None


def describe(value: object) -> str:
    """Type and abbreviated repr, for error messages."""
    shown = " ".join(repr(value).split())
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"


def _item(value: object) -> object:
    if not hasattr(value, "item"):
        return value
    try:
        return cast(object, value.item())
    except (TypeError, ValueError, RuntimeError):  # it has several elements
        return value


# ---- signatures of authors' methods


def has_methods(candidate: object, *methods: str) -> bool:
    return all(callable(getattr(candidate, method, None)) for method in methods)


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters that a caller gives; `self` of a method that is looked up in its class is left out."""
    try:
        found = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}
    found.pop("self", None)
    return found


def required_parameters(function: Callable[..., Any]) -> list[str]:
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name
        for name, found in parameters(function).items()
        if found.default is inspect.Parameter.empty and found.kind not in rest
    ]


def accepted_arguments(function: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    """The offered keyword arguments that the function takes."""
    known = parameters(function)
    if any(found.kind is inspect.Parameter.VAR_KEYWORD for found in known.values()):
        return offered
    return {name: value for name, value in offered.items() if name in known}


# ---- Trimtab's own shape: reset(task), step(turn), and optionally tools, get_reward, close (types.py)

NATIVE_SHAPE = "reset(task), step(turn)"


def is_native(candidate: type) -> bool:
    """Tried after the other shapes with `reset` and `step`: both methods take one argument."""
    if not has_methods(candidate, "reset", "step"):
        return False
    return len(required_parameters(candidate.reset)) == 1 and len(required_parameters(candidate.step)) == 1  # type: ignore[attr-defined]


class NativeAdapter(EnvironmentAdapter):
    def __init__(self, factory: EnvironmentFactory):
        self._environment = factory()

    @property
    def tools(self) -> Sequence[Callable[..., Any]]:
        return tuple(getattr(self._environment, "tools", ()))

    def reset(self, task: Task) -> MaybeAwaitable[list[Message] | None]:
        return then(
            self._environment.reset(task),
            lambda found: None if found is None else to_messages(found, "what reset gave"),
        )

    def step(self, turn: Turn) -> MaybeAwaitable[Step]:
        return then(self._environment.step(turn), _checked_step)

    def get_reward(self) -> MaybeAwaitable[float]:
        method = getattr(self._environment, "get_reward", None)
        return 0.0 if method is None else then(method(), lambda found: to_float(found, "get_reward()"))

    def close(self) -> MaybeAwaitable[None]:
        method = getattr(self._environment, "close", None)
        return None if method is None else then(method(), lambda found: None)


def _checked_step(found: object) -> Step:
    if not isinstance(found, Step):
        raise TypeError(f"step gave {describe(found)}: a trimtab.envs.types.Step is needed")
    if found.ids is not None and not all(type(token) is int and 0 <= token < 2**31 for token in found.ids):
        raise TypeError("Step.ids has something in it that is no token's number")
    return Step(
        to_messages(found.messages, "Step.messages"),
        to_float(found.reward, "Step.reward"),
        bool(found.done),
        bool(found.truncated),
        found.ids,
        to_sampling(found.sampling, "Step.sampling"),
        to_metrics(found.logs),
    )


# ---- agents: a function run(task, *, base_url, api_key, model) that plays the episode with any client of OpenAI's API

AGENT_SHAPE = "run(task, *, base_url, api_key, model) (an agent)"


def is_agent(function: Any) -> bool:
    return callable(function) and "base_url" in parameters(function)


def run_agent(
    function: Callable[..., Any], task: Task, *, base_url: str, api_key: str, model: str
) -> MaybeAwaitable[tuple[float, dict[str, float]]]:
    """The reward and metrics of an episode; the author's function returns the reward, or a dict with both."""
    offered = {"base_url": base_url, "api_key": api_key, "model": model}
    return then(function(task, **accepted_arguments(function, offered)), _reward_and_metrics)


def _reward_and_metrics(found: object) -> tuple[float, dict[str, float]]:
    if found is None:
        raise TypeError("run gave nothing: its reward is needed, 0.0 where others judge")
    if not isinstance(found, Mapping):
        return to_float(found, "what run gave"), {}
    if "reward" not in found:
        raise TypeError(f"run gave {describe(found)}: a number, or a dict with reward, is needed")
    logs = to_metrics({name: value for name, value in found.items() if name != "reward"})
    return to_float(found["reward"], "the reward that run gave"), logs
