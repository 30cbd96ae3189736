"""One instance of an environment in a worker: opened, played turn by turn, ended."""

import functools
import json
from typing import Any

from trimtab.envs.adapter import EnvironmentAdapter, LoadedEnvironment, describe
from trimtab.envs.tools import BadArguments, UnknownTool, call_tool, tool_schemas
from trimtab.envs.types import Message, Step, Task, Turn
from trimtab.sandbox.calls import Caller, Late, Stuck

AGENT_PATIENCE = 64
"""So many times as long as a call may take, an agent may: it plays all turns of an episode, and waits for the policy in
each of them."""
LONGEST_TEXT = 1_000_000
"""Characters of a message. More would take long to become tokens, and no context holds it: the middle is cut out."""


class Instance:
    def __init__(self, loaded: LoadedEnvironment, caller: Caller, seconds: float):
        """`seconds`: that a call may take."""
        self.loaded, self.caller, self.seconds = loaded, caller, seconds
        self.busy = self.dropped = False
        self._environment: EnvironmentAdapter | None = None
        self._told = 0.0  # of the caller's seconds

    @property
    def environment(self) -> EnvironmentAdapter:
        assert self._environment is not None, "it has been opened"
        return self._environment

    async def answer(self, kind: str, words: list[Any]) -> dict[str, Any]:
        """What is asked of it, by name."""
        if kind == "reset":
            return await self.reset(*words)
        if kind == "step":
            return await self.step(*words)
        if kind == "run":
            return await self.run(*words)
        return await self.end()

    async def reset(self, task: Task) -> dict[str, Any]:
        assert self.loaded.make is not None, "an agent is not opened"
        self._environment = await self._call(self.loaded.make)
        messages = await self._call(self.environment.reset, task)
        tools = await self._call(lambda: tool_schemas(self.environment.tools))
        return {"messages": None if messages is None else _cut(messages), "tools": tools, "seconds": self._spent()}

    async def step(self, turn: Turn) -> dict[str, Any]:
        calls = turn.message.get("tool_calls") or []
        if calls and self.environment.tools:
            counts = {"tool_calls": len(calls), "tool_failures": 0, "unknown_tools": 0}
            step = Step([await self._tool(one, counts) for one in calls])
        else:
            counts = {}
            step = await self._call(self.environment.step, turn)
        answer = vars(step) | {"messages": _cut(step.messages)}
        return {"step": answer, **counts, "seconds": self._spent()}

    async def end(self) -> dict[str, Any]:
        reward = await self._call(self.environment.get_reward)
        logs = await self.close()
        return {"reward": reward, "logs": logs, "seconds": self._spent()}

    async def run(self, task: Task, base_url: str, api_key: str, model: str) -> dict[str, Any]:
        assert self.loaded.run is not None, "an environment is played turn by turn"
        play = functools.partial(self.loaded.run, task, base_url=base_url, api_key=api_key, model=model)
        reward, logs = await self.caller.call(AGENT_PATIENCE * self.seconds, play)
        return {"reward": reward, "logs": logs, "seconds": self._spent()}

    async def close(self) -> dict[str, float]:
        """What its author's code makes of it spoils nothing that is there already; the figure says that it raised."""
        environment, self._environment = self._environment, None
        if environment is None:
            return {}
        try:
            await self._call(environment.close)
        except Stuck:
            raise
        except BaseException:
            return {"close_failures": 1.0}
        return {}

    def drop(self) -> None:
        """Nobody wants an answer any more."""
        self.dropped = True
        self.caller.cancel()

    async def _tool(self, found: Message, counts: dict[str, int]) -> Message:
        function = found.get("function") or {}
        name = str(function.get("name"))
        try:
            text = await self._call(call_tool, self.environment.tools, name, function.get("arguments"))
        except (Late, Stuck):
            raise
        except UnknownTool as error:
            counts["unknown_tools"] += 1
            text = _error(str(error))
        except BadArguments as error:
            counts["tool_failures"] += 1
            text = _error(str(error))
        except BaseException as error:
            counts["tool_failures"] += 1
            text = _error(f"{type(error).__name__}: {error}".removesuffix(": "))
        identity = {"tool_call_id": found["id"]} if "id" in found else {}
        return {"role": "tool", "name": name, "content": text, **identity}

    async def _call(self, function: Any, *arguments: Any) -> Any:
        return await self.caller.call(self.seconds, function, *arguments)

    def _spent(self) -> float:
        """Since the last answer."""
        spent, self._told = self.caller.seconds - self._told, self.caller.seconds
        return spent


def _error(words: str) -> str:
    return json.dumps({"error": words[:2000]}, ensure_ascii=False)


def _cut(messages: str | list[Message]) -> list[Message]:
    assert not isinstance(messages, str), "shapes make messages of it"
    return [message | {"content": _readable(message.get("content"))} for message in messages]


def _readable(content: object) -> object:
    """As tokenizers can read it: a text, or parts some of which are texts."""
    if isinstance(content, str):
        return shortened(content)
    if isinstance(content, list | tuple):
        return [
            part | {"text": shortened(part["text"])}
            if isinstance(part, dict) and isinstance(part.get("text"), str)
            else part
            for part in content
        ]
    if content is not None:
        raise TypeError(f"the content of a message is {describe(content)}: a text is needed")
    return None


def shortened(text: str) -> str:
    """Halves of surrogate pairs, which come from file names and the like, are no characters."""
    if len(text) > LONGEST_TEXT:
        half = LONGEST_TEXT // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
    return text.encode(errors="replace").decode()
