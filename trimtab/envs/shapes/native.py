"""The shape of envs/types.py: `reset(task)` and `step(turn)`, and where it has them `tools`, `get_reward`, `close`."""

from collections.abc import Callable, Sequence
from typing import Any

from trimtab.envs.shapes.adapted import (
    Adapted,
    Later,
    Maker,
    figures,
    has,
    messages_of,
    named,
    needed,
    next_turn,
    number,
    then,
)
from trimtab.envs.types import Message, Step, Task, Turn

WORDS = "reset(task), step(turn)"


def fits(candidate: type) -> bool:
    """Asked last of those that have `reset` and `step`: each takes one thing."""
    if not has(candidate, "reset", "step"):
        return False
    return len(needed(candidate.reset)) == 1 and len(needed(candidate.step)) == 1  # type: ignore[attr-defined]


class Native(Adapted):
    def __init__(self, maker: Maker):
        self._own = maker()

    @property
    def tools(self) -> Sequence[Callable[..., Any]]:
        return tuple(getattr(self._own, "tools", ()))

    def reset(self, task: Task) -> Later[list[Message] | None]:
        return then(self._own.reset(task), opening)

    def step(self, turn: Turn) -> Later[Step]:
        return then(self._own.step(turn), _checked)

    def get_reward(self) -> Later[float]:
        own = getattr(self._own, "get_reward", None)
        return 0.0 if own is None else then(own(), lambda found: number(found, "get_reward()"))

    def close(self) -> Later[None]:
        own = getattr(self._own, "close", None)
        return None if own is None else then(own(), lambda found: None)


def opening(found: object) -> list[Message] | None:
    return None if found is None else messages_of(found, "what reset gave")


def _checked(found: object) -> Step:
    if not isinstance(found, Step):
        raise TypeError(f"step gave {named(found)}: a trimtab.envs.types.Step is needed")
    if found.ids is not None and not all(type(token) is int and 0 <= token < 2**31 for token in found.ids):
        raise TypeError("Step.ids has something in it that is no token's number")
    return Step(
        messages_of(found.messages, "Step.messages"),
        number(found.reward, "Step.reward"),
        bool(found.done),
        bool(found.truncated),
        found.ids,
        next_turn(found.sampling, "Step.sampling"),
        figures(found.logs),
    )
