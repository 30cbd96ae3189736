"""Gymnasium's shape, which GEM has too: `reset(seed)` gives an observation and a dict, `step(action)` an observation, a
reward, whether it is over, whether it was cut off, and a dict. The action is the turn's text. Four values are those of
Gymnasium's forerunner, which does not tell the two ends apart."""

from collections.abc import Callable, Mapping
from typing import Any

from trimtab.envs.shapes.adapted import (
    Adapted,
    Later,
    Maker,
    accepted,
    figures,
    has,
    messages_of,
    named,
    needed,
    number,
    parameters,
    then,
)
from trimtab.envs.shapes.chance import SEEDS, Chance
from trimtab.envs.types import Message, Step, Task, Turn

WORDS = "reset(seed), step(action) of five values (Gymnasium, GEM)"


def fits(candidate: Any) -> bool:
    if not has(candidate, "reset", "step") or len(needed(candidate.step)) != 1:
        return False
    return not needed(candidate.reset) and ("seed" in parameters(candidate.reset) or "action" in needed(candidate.step))


class Gymnasium(Adapted):
    def __init__(self, maker: Maker, chance: Chance | None = None):
        """`chance`: of an environment that draws from the process's generators, and waits for nobody."""
        self._chance = chance
        self._own = self._call(maker)

    def reset(self, task: Task) -> Later[list[Message] | None]:
        if self._chance is not None:
            self._chance.seed(task.seed)
        seed = accepted(self._own.reset, {"seed": task.seed % SEEDS})
        return then(self._call(self._own.reset, **seed), _opening)

    def step(self, turn: Turn) -> Later[Step]:
        return then(self._call(self._own.step, turn.text), _step)

    def close(self) -> Later[None]:
        own = getattr(self._own, "close", None)
        return None if own is None else then(own(), lambda found: None)

    def _call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named) if self._chance is None else self._chance.of(function, *arguments, **named)


def _opening(found: Any) -> list[Message]:
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping):
        return _said(*found)
    return _said(found, {})


def _step(found: Any) -> Step:
    if not isinstance(found, tuple | list) or len(found) not in (4, 5):
        raise TypeError(f"step gave {named(found)}: observation, reward, terminated, truncated and info are needed")
    observation, reward, done, *cut, info = found
    truncated = bool(cut and cut[0])
    # Games of GEM set both where they are over: then they are.
    ended = bool(done)
    return Step(
        _said(observation, info), number(reward, "the reward"), ended, truncated and not ended, logs=figures(info)
    )


def _said(observation: Any, info: Any) -> list[Message]:
    if isinstance(observation, list) and observation and isinstance(observation[0], Mapping):
        return messages_of(observation, "the observation")
    text = str(observation)
    suffix = info.get("suffix") if isinstance(info, Mapping) else None  # GEM's: what is asked of the player
    if isinstance(suffix, str):
        text += suffix if text.endswith("\n") else f"\n{suffix}"
    return [{"role": "user", "content": text}]
