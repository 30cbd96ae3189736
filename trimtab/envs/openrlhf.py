"""Environments written for OpenRLHF: `AgentInstance` classes with `reset(states)` and `step(states)`, and the function
`step(observation, action, label)` of its versions until 2025.

Their observations are texts that are tokenized alone, with the chat template's tags as their authors wrote them; the
conversation is given to them as text, too. Files import `openrlhf.utils.agent`: if OpenRLHF is not installed, a stub
module with its classes is provided. An executor class with its own `execute` would drive OpenRLHF's engine and is
refused.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Coroutine, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from trimtab.envs.adapter import (
    EnvironmentAdapter,
    EnvironmentFactory,
    MaybeAwaitable,
    accepted_arguments,
    describe,
    has_methods,
    parameters,
    required_parameters,
    then,
    to_float,
    to_metrics,
    to_sampling,
)
from trimtab.envs.types import VERBATIM, Message, Step, Task, Turn
from trimtab.errors import UserError

AGENT_INSTANCE_SHAPE = "reset(states), step(states) (OpenRLHF's AgentInstance)"
STEP_FUNCTION_SHAPE = "a function step(observation, action, label) (OpenRLHF until 2025)"


# ---- the stub of openrlhf.utils.agent


class AgentInstanceBase:
    """The base class of an author's AgentInstance."""

    def __init__(self, *arguments: Any, **named: Any) -> None: ...

    async def reset(self, states: dict[str, Any], **named: Any) -> dict[str, Any]:
        return states


class AgentExecutorBase:
    def __init__(self, *arguments: Any, **named: Any) -> None: ...

    async def execute(self, *arguments: Any, **named: Any) -> None: ...


class MultiTurnAgentExecutor(AgentExecutorBase): ...


class SingleTurnAgentExecutor(AgentExecutorBase): ...


def install_stub() -> None:
    if "openrlhf" in sys.modules or importlib.util.find_spec("openrlhf") is not None:
        return
    agent = ModuleType("openrlhf.utils.agent")
    for found in (AgentInstanceBase, AgentExecutorBase, MultiTurnAgentExecutor, SingleTurnAgentExecutor):
        setattr(agent, found.__name__, found)
    package, utils = ModuleType("openrlhf"), ModuleType("openrlhf.utils")
    package.__path__, utils.__path__ = [], []
    package.utils, utils.agent = utils, agent  # type: ignore[attr-defined]
    sys.modules |= {found.__name__: found for found in (package, utils, agent)}


def refuse_executors(module: ModuleType, file: str) -> None:
    """Refuse executors that do more than call their base class, whose loop over turns Trimtab replaces."""
    for found in vars(module).values():
        if not inspect.isclass(found) or found.__module__ != module.__name__:
            continue
        own = vars(found).get("execute")
        if "AgentExecutorBase" in _base_names(found) and own is not None and not _only_calls_super(own):
            raise UserError(
                f"{file}: {found.__name__} has an execute of its own, which needs OpenRLHF's engine: write what it "
                "does as reset and step of an AgentInstance, or as run(task, *, base_url, api_key, model) of an agent"
            )


def _only_calls_super(execute: Any) -> bool:
    code = getattr(execute, "__code__", None)
    return code is not None and set(code.co_names) <= {"super", "execute"}


def _base_names(candidate: type) -> list[str]:
    return [base.__name__ for base in candidate.__mro__[1:]]


# ---- adapters


def is_agent_instance(candidate: Any) -> bool:
    if not has_methods(candidate, "reset", "step"):
        return False
    return "AgentInstanceBase" in _base_names(candidate) or required_parameters(candidate.step)[:1] == ["states"]


def is_step_function(function: Any) -> bool:
    return inspect.isfunction(function) and {"observation", "action", "label"} <= parameters(function).keys()


class _TextEpisode:
    """The state that both shapes are given: the text so far, and sampling parameters of the next turn."""

    def __init__(self, task: Task):
        self.task = task
        if task.text is not None:
            self.text = task.text
        else:
            self.text = "\n".join(str(message.get("content") or "") for message in task.asked)
        self.sampling = SimpleNamespace(max_tokens=None, stop=None, stop_token_ids=None)

    def reset_to(self, found: Any) -> list[Message] | None:
        text = found.get("observation") if isinstance(found, Mapping) else found
        if not isinstance(text, str):
            raise TypeError(f"reset gave {describe(found)}: a dict with observation, a text, is needed")
        if text == self.text:
            return None
        self.text = text
        return [{"role": VERBATIM, "content": text}]

    def step(self, turn: Turn, call: Callable[[], Any]) -> MaybeAwaitable[Step]:
        self.sampling.max_tokens = turn.room
        return then(call(), lambda found: self._step(turn, found))

    def _step(self, turn: Turn, found: Any) -> Step:
        if not isinstance(found, Mapping) or not {"rewards", "done"} <= found.keys():
            raise TypeError(
                f"step gave {describe(found)}: a dict with rewards, done and environment_feedback is needed"
            )
        done = bool(found["done"])
        history = self.text + turn.text
        feedback = _feedback(found, history)
        self.text = history + feedback
        messages = [] if done or not feedback else [{"role": VERBATIM, "content": feedback}]
        logs = to_metrics(found.get("extra_logs"))
        reward = to_float(found["rewards"], "rewards")
        return Step(messages, reward, done, sampling=_next_sampling(turn, found), logs=logs)


def _next_sampling(turn: Turn, found: Mapping[str, Any]) -> dict[str, Any] | None:
    wanted = found.get("sampling_params")
    if wanted is None:
        return None
    limit, stop, tokens = (getattr(wanted, name, None) for name in ("max_tokens", "stop", "stop_token_ids"))
    if tokens:
        raise ValueError("sampling_params.stop_token_ids: turns end with the tokens of the run; give stop, a text")
    limit = limit if limit is not None and limit < turn.room else None
    return to_sampling({"max_new_tokens": limit, "stop_strings": stop or None}, "sampling_params")


def _feedback(found: Mapping[str, Any], history: str) -> str:
    """The new text: `environment_feedback`, or what older versions' `next_observation` adds to the history."""
    feedback, whole = found.get("environment_feedback"), found.get("next_observation")
    if isinstance(feedback, str):
        return feedback
    if not isinstance(whole, str):
        raise TypeError(f"step gave {describe(dict(found))}: it has no environment_feedback, a text")
    if not whole.startswith(history):
        raise ValueError(
            "next_observation does not begin with the observation and the action: history is not rewritten"
        )
    return whole.removeprefix(history)


class AgentInstanceAdapter(EnvironmentAdapter):
    def __init__(self, factory: EnvironmentFactory):
        # Constructors in OpenRLHF's examples are coroutines by mistake: they are awaited before the reset.
        self._constructor: Coroutine[Any, Any, None] | None = None
        if inspect.isclass(factory):
            self._instance: Any = factory.__new__(factory)
            self._constructor = factory.__init__(self._instance)
        else:
            self._instance = factory()
        self._episode: _TextEpisode | None = None

    def reset(self, task: Task) -> MaybeAwaitable[list[Message] | None]:
        self._episode = _TextEpisode(task)
        return self._reset(self._episode) if self._constructor is None else self._construct_and_reset(self._episode)

    def step(self, turn: Turn) -> MaybeAwaitable[Step]:
        assert self._episode is not None, "an episode begins with reset"
        episode = self._episode
        states = {
            "observation_text": episode.text,
            "action_text": turn.text,
            "label": episode.task.label,
            "sampling_params": episode.sampling,
        }
        return episode.step(turn, lambda: self._instance.step(states))

    def close(self) -> MaybeAwaitable[None]:
        if self._constructor is not None and self._episode is None:
            self._constructor.close()  # it will not be awaited
        return None

    async def _construct_and_reset(self, episode: _TextEpisode) -> list[Message] | None:
        assert self._constructor is not None
        await self._constructor
        found = self._reset(episode)
        return await found if inspect.isawaitable(found) else found

    def _reset(self, episode: _TextEpisode) -> MaybeAwaitable[list[Message] | None]:
        states = {"observation": episode.text, "prompt": episode.text, "label": episode.task.label}
        reset = self._instance.reset
        return then(reset(states, **accepted_arguments(reset, {"seed": episode.task.seed})), episode.reset_to)


class StepFunctionAdapter(EnvironmentAdapter):
    def __init__(self, step: Callable[..., Any]):
        self._function, self._episode = step, _TextEpisode(Task(0, 0, 0))

    def reset(self, task: Task) -> MaybeAwaitable[list[Message] | None]:
        self._episode = _TextEpisode(task)
        return None

    def step(self, turn: Turn) -> MaybeAwaitable[Step]:
        episode = self._episode
        offered = accepted_arguments(self._function, {"sampling_params": episode.sampling})
        return episode.step(turn, lambda: self._function(episode.text, turn.text, episode.task.label, **offered))
