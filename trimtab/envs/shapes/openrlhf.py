"""OpenRLHF's shapes: an `AgentInstance` with `reset(states)` and `step(states)`, and the function `step(observation,
action, label)` that came before it. What they say is text that is tokenised alone, with marks of a chat template as
their authors wrote them; what they are told of the conversation is text too.

Files import `openrlhf.utils.agent`: where that is not installed a stand-in is offered, with its classes and no code
behind them. An executor with an `execute` of its own drives an engine that is not there: refused."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Coroutine, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from trimtab.envs.shapes.adapted import (
    Adapted,
    Later,
    Maker,
    accepted,
    figures,
    has,
    named,
    needed,
    next_turn,
    number,
    parameters,
    then,
)
from trimtab.envs.types import VERBATIM, Message, Step, Task, Turn
from trimtab.errors import UserError

WORDS = "reset(states), step(states) (OpenRLHF's AgentInstance)"
OLDER_WORDS = "a function step(observation, action, label) (OpenRLHF until 2025)"
FEEDBACK = ("environment_feedback", "next_observation")  # newer, older: all of the text so far, and the new


class AgentInstanceBase:
    """What an author's class is made from."""

    def __init__(self, *arguments: Any, **named: Any) -> None: ...

    async def reset(self, states: dict[str, Any], **named: Any) -> dict[str, Any]:
        return states


class AgentExecutorBase:
    def __init__(self, *arguments: Any, **named: Any) -> None: ...

    async def execute(self, *arguments: Any, **named: Any) -> None: ...


class MultiTurnAgentExecutor(AgentExecutorBase): ...


class SingleTurnAgentExecutor(AgentExecutorBase): ...


def offer_stand_in() -> None:
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
    """Those that do more than their base: it plays turns, which is what is done here in its place."""
    for found in vars(module).values():
        if not inspect.isclass(found) or found.__module__ != module.__name__:
            continue
        own = vars(found).get("execute")
        if "AgentExecutorBase" in _bases(found) and own is not None and not _hands_on(own):
            raise UserError(
                f"{file}: {found.__name__} has an execute of its own, which needs OpenRLHF's engine: write what it "
                "does as reset and step of an AgentInstance, or as run(task, *, base_url, api_key, model) of an agent"
            )


def fits(candidate: Any) -> bool:
    if not has(candidate, "reset", "step"):
        return False
    return "AgentInstanceBase" in _bases(candidate) or needed(candidate.step)[:1] == ["states"]


def fits_older(function: Any) -> bool:
    return inspect.isfunction(function) and {"observation", "action", "label"} <= parameters(function).keys()


class _Talk:
    """What both generations are told: the text so far, and the settings of the next turn."""

    def __init__(self, task: Task):
        self.task = task
        self.text = _prompt(task) if task.text is None else task.text
        self.sampling = SimpleNamespace(max_tokens=None, stop=None, stop_token_ids=None)

    def step(self, turn: Turn, call: Callable[[], Any]) -> Later[Step]:
        self.sampling.max_tokens = turn.room
        return then(call(), lambda found: self._step(turn, found))

    def _step(self, turn: Turn, found: Any) -> Step:
        if not isinstance(found, Mapping) or not {"rewards", "done"} <= found.keys():
            raise TypeError(f"step gave {named(found)}: a dict with rewards, done and environment_feedback is needed")
        done = bool(found["done"])
        said = self.text + turn.text
        feedback = _feedback(found, said)
        self.text = said + feedback
        messages = [] if done or not feedback else [{"role": VERBATIM, "content": feedback}]
        logs = figures(found.get("extra_logs"))
        return Step(messages, number(found["rewards"], "rewards"), done, sampling=self._next(turn, found), logs=logs)

    def _next(self, turn: Turn, found: Mapping[str, Any]) -> dict[str, Any] | None:
        wanted = found.get("sampling_params")
        if wanted is None:
            return None
        limit, stop, tokens = (getattr(wanted, name, None) for name in ("max_tokens", "stop", "stop_token_ids"))
        if tokens:
            raise ValueError("sampling_params.stop_token_ids: turns end with the tokens of the run; give stop, a text")
        limit = limit if limit is not None and limit < turn.room else None
        return next_turn({"max_new_tokens": limit, "stop_strings": stop or None}, "sampling_params")


class Instance(Adapted):
    def __init__(self, maker: Maker):
        # Its examples have constructors that are coroutines by mistake: they are awaited before the reset.
        self._begun: Coroutine[Any, Any, None] | None = None
        if inspect.isclass(maker):
            self._own: Any = maker.__new__(maker)
            self._begun = maker.__init__(self._own)
        else:
            self._own = maker()
        self._talk: _Talk | None = None

    def reset(self, task: Task) -> Later[list[Message] | None]:
        self._talk = _Talk(task)
        return self._reset(task, self._talk) if self._begun is None else self._late(task, self._talk)

    def step(self, turn: Turn) -> Later[Step]:
        assert self._talk is not None, "an episode begins with reset"
        talk = self._talk
        states = {
            "observation_text": talk.text,
            "action_text": turn.text,
            "label": talk.task.label,
            "sampling_params": talk.sampling,
        }
        return talk.step(turn, lambda: self._own.step(states))

    def close(self) -> Later[None]:
        if self._begun is not None and self._talk is None:
            self._begun.close()  # nobody will await it
        return None

    async def _late(self, task: Task, talk: _Talk) -> list[Message] | None:
        assert self._begun is not None
        await self._begun
        found = self._reset(task, talk)
        return await found if inspect.isawaitable(found) else found

    def _reset(self, task: Task, talk: _Talk) -> Later[list[Message] | None]:
        states = {"observation": talk.text, "prompt": talk.text, "label": task.label}
        return then(
            self._own.reset(states, **accepted(self._own.reset, {"seed": task.seed})),
            lambda found: _opening(talk, found),
        )


class Older(Adapted):
    def __init__(self, step: Callable[..., Any]):
        self._own, self._talk = step, _Talk(Task(0, 0, 0))

    def reset(self, task: Task) -> Later[list[Message] | None]:
        self._talk = _Talk(task)
        return None

    def step(self, turn: Turn) -> Later[Step]:
        talk = self._talk
        offered = accepted(self._own, {"sampling_params": talk.sampling})
        return talk.step(turn, lambda: self._own(talk.text, turn.text, talk.task.label, **offered))


def _opening(talk: _Talk, found: Any) -> list[Message] | None:
    text = found.get("observation") if isinstance(found, Mapping) else found
    if not isinstance(text, str):
        raise TypeError(f"reset gave {named(found)}: a dict with observation, a text, is needed")
    if text == talk.text:
        return None
    talk.text = text
    return [{"role": VERBATIM, "content": text}]


def _feedback(found: Mapping[str, Any], said: str) -> str:
    newer, older = (found.get(name) for name in FEEDBACK)
    if isinstance(newer, str):
        return newer
    if not isinstance(older, str):
        raise TypeError(f"step gave {named(dict(found))}: it has no environment_feedback, a text")
    if not older.startswith(said):
        raise ValueError(
            "next_observation does not begin with the observation and the action: history is not rewritten"
        )
    return older.removeprefix(said)


def _prompt(task: Task) -> str:
    if isinstance(task.prompt, str):
        return task.prompt
    return "\n".join(str(message.get("content") or "") for message in task.prompt)


def _bases(candidate: type) -> list[str]:
    return [base.__name__ for base in candidate.__mro__[1:]]


def _hands_on(execute: Any) -> bool:
    """It calls that of its base, and nothing else."""
    code = getattr(execute, "__code__", None)
    return code is not None and set(code.co_names) <= {"super", "execute"}
