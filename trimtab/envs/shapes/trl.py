"""TRL's shape (`environment_factory`): `reset(**row)`, public methods that are tools, and `get_reward()`. There is no
`step`: an episode is over with a turn that calls no tool."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from trimtab.envs.shapes.adapted import Adapted, Later, Maker, accepted, has, named, number, then
from trimtab.envs.types import Message, Step, Task, Turn

WORDS = "reset(**row), tool methods, get_reward() (TRL)"
NO_TOOLS = ("reset", "get_reward")


def fits(candidate: Any) -> bool:
    return (
        has(candidate, "reset")
        and not has(candidate, "step")
        and bool(_tools(candidate) or has(candidate, "get_reward"))
    )


class Tooled(Adapted):
    def __init__(self, maker: Maker):
        self._own = maker()

    @property
    def tools(self) -> Sequence[Callable[..., Any]]:
        return [getattr(self._own, name) for name in _tools(type(self._own))]

    def reset(self, task: Task) -> Later[list[Message] | None]:
        row = {"prompt": task.prompt, "label": task.label} | task.columns
        return then(self._own.reset(**accepted(self._own.reset, row)), lambda found: _opening(task.prompt, found))

    def step(self, turn: Turn) -> Later[Step]:
        return Step(done=True)

    def get_reward(self) -> Later[float]:
        own = getattr(self._own, "get_reward", None)
        return 0.0 if own is None else then(own(), lambda found: number(found, "get_reward()"))


def _tools(candidate: type) -> list[str]:
    # Looked for in the class: an instance's properties would be read.
    members = inspect.getmembers(candidate, inspect.isfunction)
    return [name for name, _ in members if name not in NO_TOOLS and not name.startswith("_")]


def _opening(prompt: str | list[Message], found: object) -> list[Message] | None:
    """What is given stands behind the last thing that the user said."""
    if found is None:
        return None
    if not isinstance(found, str):
        raise TypeError(f"reset gave {named(found)}: a text or None is needed")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt + found}]
    if not prompt:
        return [{"role": "user", "content": found}]
    *before, last = prompt
    return [*before, {**last, "content": f"{last['content']}{found}"}]
