"""Environments written for TRL (`environment_factory`) and SkyRL (`BaseTextEnv`)."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trimtab.envs.adapter import (
    EnvironmentAdapter,
    EnvironmentFactory,
    MaybeAwaitable,
    accepted_arguments,
    describe,
    has_methods,
    then,
    to_float,
    to_messages,
    to_metrics,
)
from trimtab.envs.types import Message, Step, Task, Turn

# ---- TRL: reset(**row), public methods that are tools, get_reward(). There is no step: an episode ends with a turn
# that calls no tool.

TRL_SHAPE = "reset(**row), tool methods, get_reward() (TRL)"


def is_trl(candidate: Any) -> bool:
    if not has_methods(candidate, "reset") or has_methods(candidate, "step"):
        return False
    return bool(_tool_methods(candidate) or has_methods(candidate, "get_reward"))


class TRLAdapter(EnvironmentAdapter):
    def __init__(self, factory: EnvironmentFactory):
        self._environment = factory()

    @property
    def tools(self) -> Sequence[Callable[..., Any]]:
        return [getattr(self._environment, name) for name in _tool_methods(type(self._environment))]

    def reset(self, task: Task) -> MaybeAwaitable[list[Message] | None]:
        row = {"prompt": task.prompt, "label": task.label} | task.columns
        reset = self._environment.reset
        return then(reset(**accepted_arguments(reset, row)), lambda found: _appended(task.prompt, found))

    def step(self, turn: Turn) -> MaybeAwaitable[Step]:
        return Step(done=True)

    def get_reward(self) -> MaybeAwaitable[float]:
        method = getattr(self._environment, "get_reward", None)
        return 0.0 if method is None else then(method(), lambda found: to_float(found, "get_reward()"))


def _tool_methods(candidate: type) -> list[str]:
    # Looked up in the class: in an instance, properties would be evaluated.
    members = inspect.getmembers(candidate, inspect.isfunction)
    return [name for name, _ in members if name not in ("reset", "get_reward") and not name.startswith("_")]


def _appended(prompt: str | list[Message], found: object) -> list[Message] | None:
    """The prompt with what `reset` returned behind its last message."""
    if found is None:
        return None
    if not isinstance(found, str):
        raise TypeError(f"reset gave {describe(found)}: a text or None is needed")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt + found}]
    if not prompt:
        return [{"role": "user", "content": found}]
    *before, last = prompt
    return [*before, {**last, "content": f"{last['content']}{found}"}]


# ---- SkyRL: constructed from the row (`extras`); init(prompt) returns messages and a dict, step(action) a dict of
# observations, reward, done and metadata; get_metrics() is called at the end

SKYRL_SHAPE = "init(prompt), step(action) of a dict (SkyRL)"


def is_skyrl(candidate: Any) -> bool:
    return has_methods(candidate, "init", "step")


class SkyRLAdapter(EnvironmentAdapter):
    def __init__(self, factory: EnvironmentFactory):
        self._factory = factory
        self._environment: Any = None

    def reset(self, task: Task) -> MaybeAwaitable[list[Message] | None]:
        extras = {"reward_spec": {"method": "rule", "ground_truth": task.label}} | task.columns
        offered = {"env_config": {}, "extras": extras}
        self._environment = self._factory(**accepted_arguments(self._factory, offered))
        prompt = to_messages(task.prompt, "the prompt")
        return then(self._environment.init(prompt), lambda found: _init_messages(prompt, found))

    def step(self, turn: Turn) -> MaybeAwaitable[Step]:
        return then(self._environment.step(turn.text), self._step)

    def close(self) -> MaybeAwaitable[None]:
        return None if self._environment is None else then(self._environment.close(), lambda found: None)

    def _step(self, found: Any) -> Step:
        if not isinstance(found, Mapping) or not {"observations", "reward", "done"} <= found.keys():
            raise TypeError(f"step gave {describe(found)}: a dict with observations, reward and done is needed")
        done = bool(found["done"])
        logs = to_metrics(found.get("metadata"))
        if done and has_methods(self._environment, "get_metrics"):
            logs |= to_metrics(self._environment.get_metrics())
        messages = to_messages(found["observations"], "observations")
        return Step(messages, to_float(found["reward"], "reward"), done, logs=logs)


def _init_messages(prompt: list[Message], found: Any) -> list[Message] | None:
    if not isinstance(found, tuple) or len(found) != 2:
        raise TypeError(f"init gave {describe(found)}: messages and a dict are needed")
    messages = to_messages(found[0], "what init gave")
    return None if messages == prompt else messages
