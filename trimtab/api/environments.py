"""An environment as a class, with tools that were given beside it. Light: the processes that play it import this."""

from collections.abc import Callable, Sequence
from typing import Any

from trimtab.envs.types import Step, Task, Turn
from trimtab.errors import UserError


class ToolsAlone:
    """The row's own prompt, and tools; an episode is over with a turn that calls none."""

    def reset(self, task: Task) -> None:
        return None

    def step(self, turn: Turn) -> Step:
        return Step(done=True)


def with_tools(environment: Any, tools: Sequence[Callable[..., Any]]) -> Any:
    """The class, or the function that makes environments, with these tools too."""
    if not callable(environment) and environment is not None:
        raise UserError(
            f"environment takes a class, a function that makes one, FILE.py:NAME or a name such as trimtab:guess, not "
            f"{type(environment).__name__}"
        )
    if callable(tools):
        raise UserError("tools is one function; give a list: [function]")
    if not tools:
        return environment
    for tool in tools:
        if not callable(tool):
            raise UserError(f"tools: {tool!r} is no function")
    if environment is None:
        return type("Tools", (ToolsAlone,), {"tools": tuple(tools)})
    if not isinstance(environment, type):
        raise UserError("tools beside a function that makes environments: give its class, with its tools")
    if hasattr(environment, "step"):
        own = getattr(environment, "tools", ())
        if isinstance(own, property):
            raise UserError(f"tools: {environment.__name__} makes its own; add them there")
        return type(environment.__name__, (environment,), {"tools": (*own, *tools)})
    # TRL's shape: every public method is a tool.
    methods = {tool.__name__: staticmethod(tool) for tool in tools}
    return type(environment.__name__, (environment,), methods)
